#include "cpu/forward.h"

#include <algorithm>
#include <atomic>

#include "core/ceil_div.h"
#include "core/check.h"
#include "cpu/levels.h"
#include "fusedmoe/router.h"
#include "moe/experts_args.h"
#include "moe/problem_size.h"
#include "quant/quantize.h"

namespace fusedmoe::cpu {
namespace {

bool per_tensor(const QuantKey& key) {
  return key.group == GroupShape{-1, -1};
}

/// From one row to the next; rows of the batched format have no stride of their own.
std::int64_t row_bytes(const TensorView& rows) {
  return bytes(rows.dtype(), rows.stride(rows.rank() - 2));
}

}  // namespace

Epilogue::Rounding rounding_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return Epilogue::Rounding::kBF16;
    case DType::kF16:
      return Epilogue::Rounding::kF16;
    default:
      return Epilogue::Rounding::kNone;
  }
}

Epilogue epilogue_of(const ResolvedActivation& activation, DType dtype, bool store_f32) {
  static_assert(static_cast<int>(Epilogue::Kind::kSilu) ==
                    static_cast<int>(Activation::kSilu) + 1 &&
                static_cast<int>(Epilogue::Kind::kRelu2NoMul) ==
                    static_cast<int>(Activation::kRelu2NoMul) + 1);
  Epilogue epilogue;
  epilogue.kind = static_cast<Epilogue::Kind>(static_cast<int>(activation.kind) + 1);
  epilogue.gated = is_gated(activation.kind);
  epilogue.alpha = activation.alpha;
  epilogue.beta = activation.kind == Activation::kSwigluOai ? 1.0f : activation.beta;
  epilogue.limit = activation.limit;
  epilogue.situ_beta = activation.situ_beta;
  epilogue.situ_linear_beta = activation.situ_linear_beta;
  epilogue.rounding = rounding_of(dtype);
  epilogue.store_f32 = store_f32;
  return epilogue;
}

Forward::Forward(const Experts& experts, const ForwardArgs& args)
    : args_(args),
      mode_(mode_of(experts)),
      problem_(core::experts_problem(experts, args)),
      weights_(static_cast<const CpuPackedWeights&>(*args.weights)),
      batched_(mode_.format == ActivationFormat::kBatchedExperts),
      layout_(problem_, mode_, args.workspace2),
      executor_(core::executor_of(args.stream)),
      num_threads_(args.stream.handle ? std::clamp(executor_.concurrency(), 1, mode_.max_threads)
                                      : mode_.max_threads),
      key_(problem_.scheme.activations),
      hidden_quantized_(key_ && !experts.descriptor().expects_unquantized_inputs(problem_.scheme)),
      compute_(compute_of(problem_.scheme, problem_.dtype)),
      operands_{GemmRows(problem_.scheme, weights_.gemm1(), compute_, isa_),
                GemmRows(problem_.scheme, weights_.gemm2(), compute_, isa_)},
      activation_(mode_.unfused
                      ? Epilogue{}
                      : epilogue_of(weights_.info().activation, problem_.dtype, key_.has_value())) {
  if (problem_.num_tokens == 0) return;
  gemm1_rows_ = static_cast<std::byte*>(args.workspace13);
  x_rows_ = problem_.num_tokens * (batched_ ? problem_.num_local_experts : 1);
  x_bytes_ = row_bytes(args.hidden_states);
  output_bytes_ = row_bytes(args.fused_output);
  a_bytes_ = operands_[0].row_bytes();
  gemm1_bytes_ = weights_.gemm2().k * (key_ ? 4 : element_bytes(compute_));
  if (mode_.unfused) gemm1_bytes_ = weights_.gemm1().padded_columns() * 4;
  gemm2_bytes_ = weights_.gemm2().padded_columns() * 4;
  per_expert_ = quantizes_here() && key_->global_scale;
  const auto codes = static_cast<int>(weights_.gemm1().shape.format.codes);
  const bool contiguous = isa_.contiguous_rows[codes][static_cast<int>(compute_)];
  permute_ = !batched_ && (contiguous || per_expert_);
  const bool same_type = (problem_.dtype == DType::kF32) == (compute_ == Compute::kF32);
  // Rows that end before the tile does need zeros behind them, which the caller's memory lacks.
  const bool whole_tiles = problem_.hidden == weights_.gemm1().k;
  direct_ = !key_ && !permute_ && same_type && whole_tiles && x_bytes_ == a_bytes_ &&
            !operands_[0].has_initial();
  a_ = direct_ ? args.hidden_states.as<const std::byte>() : layout_.gemm2_rows;
  index_rows();
  a_rows_ = permute_ ? num_rows() : x_rows_;
}

/// Numbers the rows of all experts. In the batched format row i of expert e is number
/// expert_offsets[e] + i, without gaps.
void Forward::index_rows() {
  if (batched_) {
    auto* offsets = reinterpret_cast<std::int32_t*>(layout_.index);
    offsets[0] = 0;
    for (std::int64_t e = 0; e < problem_.num_local_experts; ++e) {
      offsets[e + 1] = offsets[e] + args_.expert_num_tokens.as<const std::int32_t>()[e];
    }
    expert_offsets_ = offsets;
    return;
  }
  const RoutingData routing =
      build_routing_data(args_.topk_ids, args_.expert_map, problem_.num_local_experts,
                         layout_.index, layout_.index_bytes);
  expert_offsets_ = routing.expert_offsets.as<const std::int32_t>();
  slots_ = routing.permuted_to_slot.as<const std::int32_t>();
  slot_to_permuted_ = routing.slot_to_permuted.as<const std::int32_t>();
}

/// The local expert of a row, numbered as the grouped GEMM has it.
std::int64_t Forward::expert_of(std::int64_t row) const {
  const std::int32_t* end = expert_offsets_ + problem_.num_local_experts + 1;
  return std::upper_bound(expert_offsets_, end, row) - expert_offsets_ - 1;
}

/// Makes the rows that GEMM 1 reads: hidden states converted or quantized, padded, in the order of
/// the tokens or permuted.
void Forward::prepare_rows() const {
  if (permute_ && !per_expert_) return prepare_permuted_rows();
  const auto* counts = batched_ ? args_.expert_num_tokens.as<const std::int32_t>() : nullptr;
  for_rows(a_rows_, preparing_work(), [&](std::int64_t row, const TaskScratch& scratch) {
    const bool behind = counts && row % problem_.num_tokens >= counts[row / problem_.num_tokens];
    const bool unread = !permute_ && args_.row_addresses && !args_.row_addresses[row];
    if (!behind && !unread) prepare_row(row, scratch);
  });
}

/// Each token's row is made once, and copied to the places of its other experts.
void Forward::prepare_permuted_rows() const {
  for_rows(x_rows_, preparing_work(), [&](std::int64_t token, const TaskScratch& scratch) {
    const std::int32_t* rows = slot_to_permuted_ + token * problem_.topk;
    std::int64_t made = -1;
    for (std::int64_t i = 0; i < problem_.topk; ++i) {
      if (rows[i] < 0) continue;
      if (made < 0) {
        made = rows[i];
        prepare_row(made, scratch);
      } else {
        operands_[0].copy_row(layout_.gemm2_rows, layout_.row_floats[0], a_rows_, made, rows[i]);
      }
    }
  });
}

void Forward::prepare_row(std::int64_t row, const TaskScratch& scratch) const {
  const std::int64_t source = permute_ ? slots_[row] / problem_.topk : row;
  const auto* x = args_.row_addresses
                      ? args_.row_addresses[source]
                      : args_.hidden_states.as<const std::byte>() + source * x_bytes_;
  std::byte* target = layout_.gemm2_rows + row * a_bytes_;
  const GemmRows& operands = operands_[0];
  if (!key_) {
    isa_.convert[static_cast<int>(compute_)](x, rounding_of(problem_.dtype), problem_.hidden,
                                             weights_.gemm1().k, target);
    operands.set_initial(target, layout_.row_floats[0], a_rows_, row);
    return;
  }
  const auto* codes = reinterpret_cast<const std::uint8_t*>(x);
  const void* scales = nullptr;
  float row_scale = 1;
  if (hidden_quantized_) {
    // Rows of several ranks each bring the one scale of their rank.
    const bool one_scale = per_tensor(*key_) && args_.hidden_scales.size(0) == 1;
    const std::int64_t per_row = one_scale ? 0 : core::scales_per_row(*key_, problem_.hidden);
    scales = args_.hidden_scales.as<const std::byte>() + bytes(*key_->scale, source * per_row);
    if (per_tensor(*key_)) row_scale = *static_cast<const float*>(scales);
  } else {
    if (key_->global_scale) {
      row_scale = weights_.input_scale1(batched_ ? row / problem_.num_tokens : expert_of(row));
    }
    isa_.convert[static_cast<int>(Compute::kF32)](x, rounding_of(problem_.dtype), problem_.hidden,
                                                  problem_.hidden, scratch.row());
    isa_.quantize_row(scratch.row(), problem_.hidden, *key_, row_scale, scratch.codes(),
                      scratch.scales());
    codes = scratch.codes();
    scales = scratch.scales();
  }
  operands.expand(codes, scales, row_scale, target, layout_.row_floats[0], a_rows_, row);
}

TileJob Forward::job(const WorkTile& work, bool first) const {
  const PackedGemm& gemm = first ? weights_.gemm1() : weights_.gemm2();
  const std::int64_t row = expert_offsets_[work.expert] + work.first_row;
  const auto of_tile = [&](const float* columns) {
    return columns ? columns + work.first_tile * kTileColumns : nullptr;
  };
  TileJob job;
  job.tiles = first ? weights_.tile1(work.expert, work.first_tile)
                    : weights_.tile2(work.expert, work.first_tile);
  job.tile_bytes = gemm.tile_bytes;
  job.num_tiles = work.tiles;
  job.k = gemm.k;
  job.format = gemm.shape.format;
  job.num_rows = work.rows;
  job.batch_invariant = mode_.batch_invariant;
  job.side_by_side = prefers_side_by_side(processor());
  if (first) {
    const std::int64_t batched_row = work.expert * problem_.num_tokens + work.first_row;
    const std::int64_t first_row = batched_ ? batched_row : permute_ ? row : 0;
    job.rows = a_ + first_row * a_bytes_;
    job.row_bytes = a_bytes_;
    job.row_addresses = direct_ ? args_.row_addresses : nullptr;
    job.slots = slots_ && !permute_ ? slots_ + row : nullptr;
    job.topk = problem_.topk;
    job.row_scales = operands_[0].scales(layout_.row_floats[0], a_rows_, first_row);
    job.column_scales = of_tile(weights_.column_scales1(work.expert));
    job.bias = of_tile(weights_.bias1(work.expert));
    job.epilogue = &activation_;
    const std::int64_t columns = activation_.gated ? kTileColumns / 2 : kTileColumns;
    const std::int64_t element = key_ || mode_.unfused ? 4 : element_bytes(compute_);
    job.output = gemm1_rows_ + row * gemm1_bytes_ + work.first_tile * columns * element;
    job.output_bytes = gemm1_bytes_;
  } else {
    job.rows = gemm1_rows_ + row * gemm1_bytes_;
    job.row_bytes = gemm1_bytes_;
    job.row_scales = operands_[1].scales(layout_.row_floats[1], num_rows(), row);
    job.column_scales = of_tile(weights_.column_scales2(work.expert));
    job.bias = of_tile(weights_.bias2(work.expert));
    job.epilogue = &store_;
    job.output = layout_.gemm2_rows + row * gemm2_bytes_ + work.first_tile * kStepBytes;
    job.output_bytes = gemm2_bytes_;
  }
  return job;
}

/// Turns activated rows into what GEMM 2 reads, in place.
void Forward::finish_activated_rows() const {
  if (!key_ && !operands_[1].has_initial()) return;
  const float tensor_scale = activated_scale();
  for_rows(num_rows(), num_rows() * problem_.intermediate * kQuantizeWork,
           [&](std::int64_t row, const TaskScratch& scratch) {
             activated_row(row, tensor_scale, scratch);
           });
}

/// The scale that all activated rows share, if there is one.
float Forward::activated_scale() const {
  if (!key_ || !per_tensor(*key_) || !key_->dynamic) return weights_.info().a2_scale.value_or(1);
  std::atomic<float> largest{0};
  for_rows(num_rows(), num_rows() * problem_.intermediate,
           [&](std::int64_t row, const TaskScratch&) {
             const auto* values = reinterpret_cast<const float*>(gemm1_rows_ + row * gemm1_bytes_);
             core::raise(largest, core::amax(values, problem_.intermediate));
           });
  return core::tensor_scale(largest);
}

void Forward::activated_row(std::int64_t row, float tensor_scale,
                            const TaskScratch& scratch) const {
  std::byte* target = gemm1_rows_ + row * gemm1_bytes_;
  float* floats = layout_.row_floats[1];
  if (!key_) return operands_[1].set_initial(target, floats, num_rows(), row);
  float scale = tensor_scale;
  if (key_->global_scale) scale = weights_.input_scale2(expert_of(row));
  isa_.quantize_row(reinterpret_cast<const float*>(target), problem_.intermediate, *key_, scale,
                    scratch.codes(), scratch.scales());
  operands_[1].expand(scratch.codes(), scratch.scales(), scale, target, floats, num_rows(), row);
}

/// Writes up to kReduceColumns columns of an output row: the weighted sum of a token's rows, or in
/// the batched format one row, which is zero behind the expert's last.
void Forward::reduce(std::int64_t row, std::int64_t first_column) const {
  ReduceJob job;
  job.rows = layout_.gemm2_rows;
  job.row_bytes = gemm2_bytes_;
  job.begin = first_column;
  job.end = std::min(problem_.hidden, first_column + kReduceColumns);
  job.output = args_.fused_output.as<std::byte>() + row * output_bytes_;
  job.dtype = rounding_of(problem_.output_dtype);
  job.accumulate = args_.accumulate && !batched_;
  std::int32_t batched_row = -1;
  if (batched_) {
    const std::int64_t expert = row / problem_.num_tokens;
    const std::int64_t candidate = expert_offsets_[expert] + row % problem_.num_tokens;
    if (candidate < expert_offsets_[expert + 1]) {
      batched_row = static_cast<std::int32_t>(candidate);
    }
    job.indices = &batched_row;
    job.num_indices = 1;
  } else {
    job.indices = slot_to_permuted_ + row * problem_.topk;
    job.num_indices = problem_.topk;
    if (!mode_.router_weight_on_input) {
      job.weights = args_.topk_weights.as<const float>() + row * problem_.topk;
    }
  }
  isa_.reduce(job);
}

/// One of the two grouped GEMMs.
void Forward::multiply(bool first) const {
  const PackedGemm& packed = first ? weights_.gemm1() : weights_.gemm2();
  const auto kernel =
      isa_.multiply[static_cast<int>(packed.shape.format.codes)][static_cast<int>(compute_)];
  GroupedGemm gemm(packed, expert_offsets_, problem_.num_local_experts,
                   layout_.work_offsets[first ? 0 : 1]);
  core::run_tasks(executor_, num_threads_, [&](int task) {
    const TaskScratch scratch(layout_, problem_, task);
    gemm.run(kernel, scratch.panels(), [&](const WorkTile& work) { return job(work, first); });
  });
}

void Forward::run() {
  if (problem_.num_tokens == 0) return;
  if (!direct_) prepare_rows();
  multiply(true);
  if (mode_.unfused) unfused_activation();
  finish_activated_rows();
  multiply(false);
  if (mode_.unfused) unfused_output();
  const std::int64_t blocks = core::ceil_div(problem_.hidden, kReduceColumns);
  core::Completing executor(executor_);
  for_rows(
      executor, x_rows_ * blocks, x_rows_ * problem_.topk * problem_.hidden,
      [&](std::int64_t i, const TaskScratch&) { reduce(i / blocks, i % blocks * kReduceColumns); });
}

}  // namespace fusedmoe::cpu
