// permute -> GEMM 1 + activation -> GEMM 2 -> weighted sum, in one parallel region with a barrier
// between the steps.
//
// Workspace 13: the activation's output (rows, padded intermediate). Workspace 2: index structures,
// one scratch panel per thread, and the converted hidden states, later GEMM 2's output (rows,
// padded hidden) f32 over them. The output is written last, from workspace 2 only.
#include "cpu/experts.h"

#include <omp.h>

#include <algorithm>

#include "core/check.h"
#include "cpu/grouped_gemm.h"
#include "cpu/pack.h"
#include "fusedmoe/routing_data.h"

namespace fusedmoe::cpu {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

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

/// Where things lie in workspace 2; a function of the problem alone.
struct Layout {
  std::int64_t rows;  // upper bound of (token, expert) pairs
  std::size_t index_bytes, task_bytes, scratch_bytes, gemm2_bytes;

  Layout(const ProblemSize& problem, ActivationFormat format)
      : rows(problem.num_tokens *
             (format == ActivationFormat::kStandard ? problem.topk : problem.num_local_experts)),
        index_bytes(
            pad(routing_data_bytes(problem.num_tokens, problem.topk, problem.num_local_experts))),
        task_bytes(
            pad(static_cast<std::size_t>(problem.num_local_experts + 1) * sizeof(std::int64_t))),
        scratch_bytes(pad(kScratchBytes) * static_cast<std::size_t>(num_threads())),
        gemm2_bytes(pad(static_cast<std::size_t>(std::max(rows, problem.num_tokens) *
                                                 round_up(problem.hidden, kTileColumns) * 4))) {}

  std::size_t total() const { return index_bytes + 2 * task_bytes + scratch_bytes + gemm2_bytes; }
  static std::size_t pad(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
};

class CpuExperts final : public ModularExperts {
 public:
  explicit CpuExperts(ActivationFormat format) : format_(format) {}

  std::string_view name() const override { return batched() ? "cpu_batched" : "cpu"; }
  ActivationFormat activation_format() const override { return format_; }
  WeightAndReduce weight_and_reduce() const override {
    return batched() ? WeightAndReduce::kDelegate : WeightAndReduce::kNoOp;
  }
  Support supports(const MoeConfig& config) const override;
  WorkspacePlan plan(const ProblemSize& problem) const override;
  std::shared_ptr<const PackedWeights> pack(const ExpertWeights& weights,
                                            const PackProgress& progress) const override;
  void apply(const ExpertsArgs& args) const override;

 private:
  bool batched() const { return format_ == ActivationFormat::kBatchedExperts; }

  ActivationFormat format_;
};

Support CpuExperts::supports(const MoeConfig& config) const {
  if (!config.device.is_cpu()) {
    return Support::no(Reason::kDevice, "runs on cpu, not on " + to_string(config.device));
  }
  if (config.dtype != DType::kBF16 && config.dtype != DType::kF16 && config.dtype != DType::kF32) {
    return Support::no(Reason::kDType, fmt::format("dtype {} is none of f32, bf16, f16",
                                                   fusedmoe::name(config.dtype)));
  }
  try {
    format_of(config.scheme);
  } catch (const Error& error) {
    return Support::no(Reason::kQuantScheme,
                       fmt::format("scheme {}; has {}", error.was(), error.must_be()));
  }
  try {
    resolve(config.activation, config.activation_params);
  } catch (const Error& error) {
    return Support::no(Reason::kActivation, error.what());
  }
  return Support::yes();
}

WorkspacePlan CpuExperts::plan(const ProblemSize& problem) const {
  const Layout layout(problem, format_);
  WorkspacePlan plan;
  plan.workspace13_bytes =
      static_cast<std::size_t>(layout.rows * round_up(problem.intermediate, kTileColumns) * 4);
  plan.workspace2_bytes = layout.total();
  plan.output_shape = batched()
                          ? Shape{problem.num_local_experts, problem.num_tokens, problem.hidden}
                          : Shape{problem.num_tokens, problem.hidden};
  plan.output_dtype = problem.dtype;
  return plan;
}

std::shared_ptr<const PackedWeights> CpuExperts::pack(const ExpertWeights& weights,
                                                      const PackProgress& progress) const {
  weights.validate();
  PackedWeights::Info info;
  info.implementation = name();
  info.scheme = weights.scheme;
  info.num_experts = weights.num_experts();
  info.hidden = weights.hidden;
  info.intermediate = weights.intermediate;
  info.activation = resolve(weights.activation, weights.activation_params);
  info.has_bias = weights.has_bias();
  return std::make_shared<CpuPackedWeights>(std::move(info), weights, progress);
}

Epilogue epilogue_of(const ResolvedActivation& activation, DType dtype) {
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
  return epilogue;
}

/// One apply(): where everything lies, and the steps as functions of a thread.
class Forward {
 public:
  Forward(const ExpertsArgs& args, const CpuPackedWeights& weights, bool batched);
  void run();

 private:
  using Task = GroupedGemm::Task;

  static ProblemSize problem_of(const ExpertsArgs& args, const PackedWeights::Info& info,
                                bool batched);
  void index_rows();
  void convert_rows() const;
  TileJob job1(const Task& task) const;
  TileJob job2(const Task& task) const;
  void reduce(std::int64_t row, std::int64_t first_column) const;

  static constexpr std::int64_t kReduceColumns = 512;

  const ExpertsArgs& args_;
  const CpuPackedWeights& weights_;
  const bool batched_;
  const ProblemSize problem_;
  const Layout layout_;
  const Kernels& isa_ = kernels();
  const Compute compute_;
  const Epilogue activation_;
  const Epilogue store_;

  // Workspace.
  std::byte* index_memory_;
  std::int64_t* task_offsets_;
  std::byte* scratch_;
  std::byte* gemm1_rows_;
  std::byte* gemm2_rows_;

  // Rows: of the caller (x), as GEMM 1 reads them (a), and the outputs of the GEMMs.
  std::int64_t x_rows_, x_bytes_, a_bytes_, gemm1_bytes_, gemm2_bytes_;
  bool permute_;  // a is x in the order of the grouped GEMM
  bool direct_;   // a is x itself
  const std::byte* a_;

  const std::int32_t* expert_offsets_ = nullptr;
  const std::int32_t* slots_ = nullptr;             // row -> slot; standard format
  const std::int32_t* slot_to_permuted_ = nullptr;  // standard format
};

ProblemSize Forward::problem_of(const ExpertsArgs& args, const PackedWeights::Info& info,
                                bool batched) {
  ProblemSize problem;
  problem.num_tokens = args.hidden_states.size(batched ? 1 : 0);
  problem.topk = batched ? 1 : args.topk_ids.size(1);
  problem.num_local_experts = info.num_experts;
  problem.hidden = info.hidden;
  problem.intermediate = info.intermediate;
  problem.dtype = args.hidden_states.dtype();
  return problem;
}

Forward::Forward(const ExpertsArgs& args, const CpuPackedWeights& weights, bool batched)
    : args_(args),
      weights_(weights),
      batched_(batched),
      problem_(problem_of(args, weights.info(), batched)),
      layout_(problem_, batched ? ActivationFormat::kBatchedExperts : ActivationFormat::kStandard),
      compute_(compute_of(weights.format(), problem_.dtype)),
      activation_(epilogue_of(weights.info().activation, problem_.dtype)) {
  index_memory_ = static_cast<std::byte*>(args.workspace2);
  task_offsets_ = reinterpret_cast<std::int64_t*>(index_memory_ + layout_.index_bytes);
  scratch_ = index_memory_ + layout_.index_bytes + 2 * layout_.task_bytes;
  gemm1_rows_ = static_cast<std::byte*>(args.workspace13);
  gemm2_rows_ = scratch_ + layout_.scratch_bytes;

  x_rows_ = problem_.num_tokens * (batched ? problem_.num_local_experts : 1);
  x_bytes_ = problem_.hidden * bytes(problem_.dtype, 1);
  a_bytes_ = weights.gemm1().k * element_bytes(compute_);
  gemm1_bytes_ = weights.gemm2().k * element_bytes(compute_);
  gemm2_bytes_ = weights.gemm2().padded_columns() * 4;
  permute_ = isa_.contiguous_rows && compute_ == Compute::kBF16 && !batched;
  const bool same_type = (problem_.dtype == DType::kF32) == (compute_ == Compute::kF32);
  direct_ = !permute_ && same_type && x_bytes_ == a_bytes_;
  a_ = direct_ ? args.hidden_states.as<const std::byte>() : gemm2_rows_;
  index_rows();
}

/// Rows of each expert. In the batched format they are compacted: row i of expert e is
/// expert_offsets[e] + i.
void Forward::index_rows() {
  if (batched_) {
    auto* offsets = reinterpret_cast<std::int32_t*>(index_memory_);
    offsets[0] = 0;
    for (std::int64_t e = 0; e < problem_.num_local_experts; ++e) {
      offsets[e + 1] = offsets[e] + args_.expert_num_tokens.as<const std::int32_t>()[e];
    }
    expert_offsets_ = offsets;
    return;
  }
  const RoutingData routing =
      build_routing_data(args_.topk_ids, args_.expert_map, problem_.num_local_experts,
                         index_memory_, layout_.index_bytes);
  expert_offsets_ = routing.expert_offsets.as<const std::int32_t>();
  slots_ = routing.permuted_to_slot.as<const std::int32_t>();
  slot_to_permuted_ = routing.slot_to_permuted.as<const std::int32_t>();
}

/// Hidden states as GEMM 1 reads them: converted and padded token by token, or permuted.
void Forward::convert_rows() const {
  const auto convert = isa_.convert[static_cast<int>(compute_)];
  const std::int64_t rows = permute_ ? expert_offsets_[problem_.num_local_experts] : x_rows_;
#pragma omp for schedule(static)
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t source = permute_ ? slots_[row] / problem_.topk : row;
    convert(args_.hidden_states.as<const std::byte>() + source * x_bytes_,
            rounding_of(problem_.dtype), problem_.hidden, weights_.gemm1().k,
            gemm2_rows_ + row * a_bytes_);
  }
}

TileJob Forward::job1(const Task& task) const {
  const PackedGemm& gemm = weights_.gemm1();
  const std::int64_t first = expert_offsets_[task.expert] + task.first_row;
  const std::int64_t batched_row = task.expert * problem_.num_tokens + task.first_row;
  const std::int64_t columns = activation_.gated ? kTileColumns / 2 : kTileColumns;
  const float* bias = weights_.bias1(task.expert);
  TileJob job;
  job.tiles = weights_.tiles1(task.expert) + task.first_tile * gemm.tile_bytes;
  job.tile_bytes = gemm.tile_bytes;
  job.num_tiles = task.tiles;
  job.k = gemm.k;
  job.rows = a_ + (batched_ ? batched_row : permute_ ? first : 0) * a_bytes_;
  job.row_bytes = a_bytes_;
  job.slots = slots_ && !permute_ ? slots_ + first : nullptr;
  job.topk = problem_.topk;
  job.num_rows = task.rows;
  job.bias = bias ? bias + task.first_tile * kTileColumns : nullptr;
  job.epilogue = &activation_;
  job.output =
      gemm1_rows_ + first * gemm1_bytes_ + task.first_tile * columns * element_bytes(compute_);
  job.output_bytes = gemm1_bytes_;
  return job;
}

TileJob Forward::job2(const Task& task) const {
  const PackedGemm& gemm = weights_.gemm2();
  const std::int64_t first = expert_offsets_[task.expert] + task.first_row;
  const float* bias = weights_.bias2(task.expert);
  TileJob job;
  job.tiles = weights_.tiles2(task.expert) + task.first_tile * gemm.tile_bytes;
  job.tile_bytes = gemm.tile_bytes;
  job.num_tiles = task.tiles;
  job.k = gemm.k;
  job.rows = gemm1_rows_ + first * gemm1_bytes_;
  job.row_bytes = gemm1_bytes_;
  job.num_rows = task.rows;
  job.bias = bias ? bias + task.first_tile * kTileColumns : nullptr;
  job.epilogue = &store_;
  job.output = gemm2_rows_ + first * gemm2_bytes_ + task.first_tile * kStepBytes;
  job.output_bytes = gemm2_bytes_;
  return job;
}

/// The weighted sum of a token's rows, or one row of the batched format (zero behind the last).
void Forward::reduce(std::int64_t row, std::int64_t first_column) const {
  ReduceJob job;
  job.rows = gemm2_rows_;
  job.row_bytes = gemm2_bytes_;
  job.begin = first_column;
  job.end = std::min(problem_.hidden, first_column + kReduceColumns);
  job.output = args_.output.as<std::byte>() + row * x_bytes_;
  job.dtype = rounding_of(problem_.dtype);
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
    if (!args_.router_weight_on_input) {
      job.weights = args_.topk_weights.as<const float>() + row * problem_.topk;
    }
  }
  isa_.reduce(job);
}

void Forward::run() {
  const auto multiply =
      isa_.multiply[static_cast<int>(weights_.format())][static_cast<int>(compute_)];
  GroupedGemm gemm1(weights_.gemm1(), weights_.format(), expert_offsets_,
                    problem_.num_local_experts, task_offsets_);
  GroupedGemm gemm2(weights_.gemm2(), weights_.format(), expert_offsets_,
                    problem_.num_local_experts,
                    task_offsets_ + layout_.task_bytes / sizeof(std::int64_t));
#pragma omp parallel num_threads(num_threads())
  {
    std::byte* scratch =
        scratch_ + static_cast<std::size_t>(omp_get_thread_num()) * Layout::pad(kScratchBytes);
    if (!direct_) convert_rows();
    gemm1.run(multiply, scratch, [this](const Task& task) { return job1(task); });
#pragma omp barrier
    gemm2.run(multiply, scratch, [this](const Task& task) { return job2(task); });
#pragma omp barrier
#pragma omp for schedule(static) collapse(2) nowait
    for (std::int64_t row = 0; row < x_rows_; ++row) {
      for (std::int64_t column = 0; column < problem_.hidden; column += kReduceColumns) {
        reduce(row, column);
      }
    }
  }
}

void CpuExperts::apply(const ExpertsArgs& args) const {
  Forward(args, static_cast<const CpuPackedWeights&>(*args.weights), batched()).run();
}

}  // namespace

std::shared_ptr<const ModularExperts> make_experts(ActivationFormat format) {
  return std::make_shared<CpuExperts>(format);
}

}  // namespace fusedmoe::cpu
