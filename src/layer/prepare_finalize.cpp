// The two PrepareAndFinalize of one rank: "no_ep" (standard format) and "batched".
//
// Both weight and quantize the rows of the caller, once per token; "batched" then copies them to
// their experts. Both are stateless; what finalize must know of prepare lies in the workspace.
#include "fusedmoe/prepare_finalize.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/experts_args.h"
#include "core/workspace.h"
#include "fusedmoe/quantize.h"
#include "layer/element.h"
#include "layer/weight_and_reduce.h"

namespace fusedmoe {
namespace {

using layer::dispatch_element;
using layer::kParallelElements;
using layer::local_expert;

// What holds for every PrepareAndFinalize of one CPU rank.
Support supports_one_rank(const MoeConfig& config) {
  if (!config.device.is_cpu()) {
    return Support::no(Reason::kDevice,
                       fmt::format("{}: this build has no CUDA kernels", to_string(config.device)));
  }
  if (!core::is_activation_dtype(config.dtype)) {
    return Support::no(Reason::kDType,
                       fmt::format("{}: hidden states are f32, bf16 or f16", name(config.dtype)));
  }
  if (config.batch_invariant && batch_dependent(config.scheme)) {
    return Support::no(
        Reason::kBatchInvariance,
        fmt::format("{}: one activation scale for all rows of a batch", name(config.scheme)));
  }
  const ParallelConfig& parallel = config.parallel;
  if (parallel.dp_size != 1 || parallel.ep_size != 1) {
    return Support::no(Reason::kParallelConfig,
                       fmt::format("dp_size {}, ep_size {}: tokens stay on their rank",
                                   parallel.dp_size, parallel.ep_size));
  }
  if (config.apply_router_weight_on_input && config.topk != 1) {
    return Support::no(Reason::kRouterWeightOnInput,
                       fmt::format("topk {}: only for topk = 1", config.topk));
  }
  return Support::yes();
}

void check_preparation(const PrepareArgs& args) {
  if (args.preparation.apply_router_weight_on_input) {
    const std::int64_t topk = args.topk_ids.size(1);
    FUSEDMOE_CHECK(topk == 1, "apply_router_weight_on_input", fmt::format("set with topk {}", topk),
                   "set with topk = 1 only");
  }
  const std::optional<QuantKey>& key = args.preparation.quant;
  FUSEDMOE_CHECK(!key || key->dynamic || args.preparation.scale, "preparation.scale", "none",
                 "that of the static activations");
}

// target = rnd(source * rnd(weight)) in the dtype of the hidden states.
template <typename Element>
void weight_rows(const PrepareArgs& args, const TensorView& weighted) {
  using Storage = typename Element::Storage;
  const std::int64_t num_tokens = weighted.size(0), hidden = weighted.size(1);
  const auto* weights = args.topk_weights.as<const float>();
  const auto* source = args.hidden_states.as<const Storage>();
  auto* target = weighted.as<Storage>();
#pragma omp parallel for schedule(static) \
    num_threads(num_threads()) if (num_tokens * hidden >= kParallelElements)
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const float weight = Element::load(Element::store(weights[token]));
    for (std::int64_t i = token * hidden; i < (token + 1) * hidden; ++i) {
      target[i] = Element::store(Element::load(source[i]) * weight);
    }
  }
}

std::size_t workspace_bytes_of(DType dtype, const Shape& shape) {
  return static_cast<std::size_t>(bytes(dtype, shape.numel()));
}

// The caller's rows as they travel: weighted and quantized where that is asked for. The same views
// in the workspace when sizes are computed and when the work is done.
class Rows {
 public:
  Rows(core::WorkspaceCutter& cutter, const ProblemSize& problem, const Preparation& preparation,
       Device device)
      : preparation_(preparation), values_dtype_(problem.dtype) {
    const Shape shape{problem.num_tokens, problem.hidden};
    const auto take = [&](DType dtype, const Shape& extents) {
      void* data = cutter.take(workspace_bytes_of(dtype, extents));
      return data ? TensorView(data, dtype, extents, device) : TensorView();
    };
    if (preparation.apply_router_weight_on_input) weighted_ = take(problem.dtype, shape);
    values_shape_ = shape;
    if (!preparation.quant) return;
    const QuantizedShape quantized =
        quantized_shape(*preparation.quant, problem.num_tokens, problem.hidden);
    values_dtype_ = quantized.values_dtype;
    values_shape_ = quantized.values;
    scales_dtype_ = quantized.scales_dtype;
    scales_shape_ = quantized.scales;
    values_ = take(values_dtype_, values_shape_);
    scales_ = take(scales_dtype_, scales_shape_);
  }

  // Columns of the values, and of the scales where each row has its own (else 0).
  DType values_dtype() const { return values_dtype_; }
  DType scales_dtype() const { return scales_dtype_; }
  std::int64_t value_columns() const { return values_shape_[1]; }
  std::int64_t scale_columns() const {
    return preparation_.quant && preparation_.quant->group.rows == 1 ? scales_shape_[1] : 0;
  }

  Prepared run(const PrepareArgs& args) const {
    check_preparation(args);
    Prepared prepared;
    prepared.hidden_states = args.hidden_states;
    if (preparation_.apply_router_weight_on_input) {
      dispatch_element(args.hidden_states.dtype(),
                       [&](auto element) { weight_rows<decltype(element)>(args, weighted_); });
      prepared.hidden_states = weighted_;
    }
    if (!preparation_.quant) return prepared;
    if (prepared.hidden_states.size(0) > 0) {
      quantize(prepared.hidden_states, *preparation_.quant, values_, scales_, preparation_.scale);
    }
    prepared.hidden_states = values_;
    prepared.hidden_scales = scales_;
    return prepared;
  }

 private:
  const Preparation& preparation_;
  DType values_dtype_, scales_dtype_ = DType::kF32;
  Shape values_shape_, scales_shape_;
  TensorView weighted_, values_, scales_;
};

ProblemSize problem_of(const PrepareArgs& args) {
  ProblemSize problem;
  problem.num_tokens = args.hidden_states.size(0);
  problem.topk = args.topk_ids ? args.topk_ids.size(1) : 0;
  problem.num_local_experts = args.num_local_experts;
  problem.hidden = args.hidden_states.size(1);
  problem.dtype = args.hidden_states.dtype();
  return problem;
}

class NoEp final : public PrepareAndFinalize {
 public:
  std::string_view name() const override { return "no_ep"; }
  ActivationFormat activation_format() const override { return ActivationFormat::kStandard; }
  Support supports(const MoeConfig& config) const override { return supports_one_rank(config); }
  // Knows no other rank: with tensor parallelism a reduction must follow.
  bool output_is_reduced() const override { return false; }
  bool accepts(WeightAndReduce kind) const override {
    return kind != WeightAndReduce::kNaiveBatched;
  }

  std::size_t workspace_bytes(const ProblemSize& caller,
                              const Preparation& preparation) const override {
    core::WorkspaceCutter cutter(nullptr);
    const Rows rows(cutter, caller, preparation, {});
    return cutter.used();
  }

  Prepared prepare(const PrepareArgs& args) const override {
    core::WorkspaceCutter cutter(args.workspace);
    const Rows rows(cutter, problem_of(args), args.preparation, args.hidden_states.device());
    return rows.run(args);
  }

  void finalize(const FinalizeArgs& args) const override {
    FUSEDMOE_CHECK(accepts(args.weight_and_reduce), "weight_and_reduce",
                   std::string(fusedmoe::name(args.weight_and_reduce)),
                   "no_op, contiguous or delegate");
    if (args.weight_and_reduce == WeightAndReduce::kNoOp) {
      layer::copy_reduced(args);
    } else {
      layer::reduce_contiguous(args);
    }
  }
};

// What finalize must know: rows per expert, and the row of each slot inside its expert (meaningless
// for slots without a local expert). First in the workspace.
struct Assignment {
  std::int32_t* expert_num_tokens;  // (num_local_experts)
  std::int32_t* slot_rows;          // (num_tokens * topk)

  Assignment(core::WorkspaceCutter& cutter, std::int64_t num_tokens, std::int64_t topk,
             std::int64_t num_local_experts) {
    const auto part = [&](const Shape& shape) {
      return static_cast<std::int32_t*>(cutter.take(workspace_bytes_of(DType::kI32, shape)));
    };
    expert_num_tokens = part({num_local_experts});
    slot_rows = part({num_tokens, topk});
  }
};

// All that prepare needs: the assignment, the rows before and behind the dispatch.
struct BatchedLayout {
  core::WorkspaceCutter cutter;
  Assignment assignment;
  Rows rows;
  Shape values_shape, scales_shape;  // (num_local_experts, capacity, ...)
  void* values;
  void* scales;  // null unless each row has scales of its own

  BatchedLayout(void* workspace, const ProblemSize& problem, const Preparation& preparation,
                Device device)
      : cutter(workspace),
        assignment(cutter, problem.num_tokens, problem.topk, problem.num_local_experts),
        rows(cutter, problem, preparation, device),
        values_shape{problem.num_local_experts, problem.num_tokens, rows.value_columns()},
        scales_shape{problem.num_local_experts, problem.num_tokens, rows.scale_columns()} {
    values = cutter.take(workspace_bytes_of(rows.values_dtype(), values_shape));
    scales = cutter.take(workspace_bytes_of(rows.scales_dtype(), scales_shape));
  }
};

class Batched final : public PrepareAndFinalize {
 public:
  std::string_view name() const override { return "batched"; }
  ActivationFormat activation_format() const override { return ActivationFormat::kBatchedExperts; }
  Support supports(const MoeConfig& config) const override { return supports_one_rank(config); }
  // Knows no other rank: with tensor parallelism a reduction must follow.
  bool output_is_reduced() const override { return false; }
  bool accepts(WeightAndReduce kind) const override {
    return kind == WeightAndReduce::kNaiveBatched || kind == WeightAndReduce::kDelegate;
  }

  std::size_t workspace_bytes(const ProblemSize& caller,
                              const Preparation& preparation) const override {
    return BatchedLayout(nullptr, caller, preparation, {}).cutter.used();
  }

  Prepared prepare(const PrepareArgs& args) const override {
    const Device device = args.hidden_states.device();
    const BatchedLayout layout(args.workspace, problem_of(args), args.preparation, device);
    assign_rows(args, layout.assignment);
    Prepared prepared = layout.rows.run(args);
    prepared.hidden_states = dispatch(
        args, layout.assignment, prepared.hidden_states,
        TensorView(layout.values, layout.rows.values_dtype(), layout.values_shape, device));
    if (layout.rows.scale_columns() > 0) {
      prepared.hidden_scales = dispatch(
          args, layout.assignment, prepared.hidden_scales,
          TensorView(layout.scales, layout.rows.scales_dtype(), layout.scales_shape, device));
    }
    prepared.expert_num_tokens = TensorView(layout.assignment.expert_num_tokens, DType::kI32,
                                            Shape{args.num_local_experts}, device);
    return prepared;
  }

  void finalize(const FinalizeArgs& args) const override {
    FUSEDMOE_CHECK(accepts(args.weight_and_reduce), "weight_and_reduce",
                   std::string(fusedmoe::name(args.weight_and_reduce)),
                   "naive_batched or delegate");
    core::WorkspaceCutter cutter(args.workspace);
    const Assignment assignment(cutter, args.topk_ids.size(0), args.topk_ids.size(1),
                                args.num_local_experts);
    layer::reduce_batched(args, assignment.slot_rows);
  }

 private:
  /// Rows in ascending token order, so a row's place depends on earlier tokens only. Serial: it is
  /// a few operations per slot against a copy of `hidden` elements.
  static void assign_rows(const PrepareArgs& args, const Assignment& assignment) {
    const std::int64_t num_tokens = args.topk_ids.size(0), topk = args.topk_ids.size(1);
    const auto* ids = args.topk_ids.as<const std::int32_t>();
    std::fill_n(assignment.expert_num_tokens, args.num_local_experts, 0);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      const std::int32_t* row = ids + token * topk;
      for (std::int64_t slot = 0; slot < topk; ++slot) {
        const std::int64_t local = local_expert(row[slot], args.expert_map, args.num_local_experts);
        if (local < 0) continue;
        FUSEDMOE_CHECK(std::find(row, row + slot, row[slot]) == row + slot, "topk_ids",
                       fmt::format("expert {} twice for token {}", row[slot], token),
                       "distinct within a token in the batched format");
        assignment.slot_rows[token * topk + slot] = assignment.expert_num_tokens[local]++;
      }
    }
  }

  /// Row of each token (num_tokens, n) to its experts' rows (num_local_experts, capacity, n).
  static TensorView dispatch(const PrepareArgs& args, const Assignment& assignment,
                             const TensorView& from, const TensorView& to) {
    const std::int64_t num_tokens = args.topk_ids.size(0), topk = args.topk_ids.size(1);
    const std::int64_t row_bytes = bytes(from.dtype(), from.size(1)), capacity = to.size(1);
    const auto* ids = args.topk_ids.as<const std::int32_t>();
    const auto* source = from.as<const std::byte>();
    auto* target = to.as<std::byte>();
#pragma omp parallel for schedule(static) \
    num_threads(num_threads()) if (num_tokens * topk * row_bytes >= 2 * kParallelElements)
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      for (std::int64_t flat = token * topk; flat < (token + 1) * topk; ++flat) {
        const std::int64_t local = local_expert(ids[flat], args.expert_map, args.num_local_experts);
        if (local < 0) continue;
        std::memcpy(target + (local * capacity + assignment.slot_rows[flat]) * row_bytes,
                    source + token * row_bytes, static_cast<std::size_t>(row_bytes));
      }
    }
    return to;
  }
};

}  // namespace

Preparation make_preparation(const Experts& experts, const QuantScheme& scheme,
                             bool apply_router_weight_on_input, std::optional<float> a1_scale) {
  Preparation preparation;
  preparation.apply_router_weight_on_input = apply_router_weight_on_input;
  if (scheme.activations && !experts.expects_unquantized_inputs(scheme)) {
    preparation.quant = scheme.activations;
    preparation.scale = a1_scale;
  }
  return preparation;
}

std::shared_ptr<const PrepareAndFinalize> make_no_ep() {
  return std::make_shared<NoEp>();
}

std::shared_ptr<const PrepareAndFinalize> make_batched() {
  return std::make_shared<Batched>();
}

}  // namespace fusedmoe
