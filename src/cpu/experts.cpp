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
#include "core/experts_args.h"
#include "core/workspace.h"
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

/// Where things lie in workspace 2: a function of the problem and the number of threads.
struct Layout {
  std::int64_t rows;  // upper bound of (token, expert) pairs
  int threads = num_threads();
  std::size_t index_bytes;
  std::byte* index = nullptr;          // routing data, or expert offsets
  std::int64_t* task_offsets[2] = {};  // of GEMM 1 and 2
  std::byte* scratch = nullptr;        // kScratchBytes for each thread
  std::byte* gemm2_rows = nullptr;
  std::size_t total = 0;

  Layout(const ProblemSize& problem, ActivationFormat format, void* memory = nullptr)
      : rows(problem.num_tokens *
             (format == ActivationFormat::kStandard ? problem.topk : problem.num_local_experts)),
        index_bytes(
            routing_data_bytes(problem.num_tokens, problem.topk, problem.num_local_experts)) {
    static_assert(kScratchBytes % core::kWorkspaceGranularity == 0);
    core::WorkspaceCutter cutter(memory);
    const auto task_bytes =
        static_cast<std::size_t>(problem.num_local_experts + 1) * sizeof(std::int64_t);
    const std::int64_t gemm2_row_bytes = round_up(problem.hidden, kTileColumns) * 4;
    index = static_cast<std::byte*>(cutter.take(index_bytes));
    for (auto& offsets : task_offsets)
      offsets = static_cast<std::int64_t*>(cutter.take(task_bytes));
    scratch =
        static_cast<std::byte*>(cutter.take(kScratchBytes * static_cast<std::size_t>(threads)));
    gemm2_rows = static_cast<std::byte*>(cutter.take(
        static_cast<std::size_t>(std::max(rows, problem.num_tokens) * gemm2_row_bytes)));
    total = cutter.used();
  }
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
  std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                      const PackProgress& progress) const override;
  void apply(const ExpertsArgs& args) const override;

 private:
  bool batched() const { return format_ == ActivationFormat::kBatchedExperts; }

  ActivationFormat format_;
};

Support CpuExperts::supports(const MoeConfig& config) const {
  return core::supports_on_cpu(config, format_, has_format(config.scheme),
                               "f32, bf16, mxfp4_w4a16");
}

WorkspacePlan CpuExperts::plan(const ProblemSize& problem) const {
  const Layout layout(problem, format_);
  WorkspacePlan plan;
  plan.workspace13_bytes =
      static_cast<std::size_t>(layout.rows * round_up(problem.intermediate, kTileColumns) * 4);
  plan.workspace2_bytes = layout.total;
  plan.output_shape = batched()
                          ? Shape{problem.num_local_experts, problem.num_tokens, problem.hidden}
                          : Shape{problem.num_tokens, problem.hidden};
  plan.output_dtype = problem.dtype;
  return plan;
}

std::shared_ptr<PackedWeights> CpuExperts::pack(const ExpertWeights& weights,
                                                const PackProgress& progress) const {
  return std::make_shared<CpuPackedWeights>(core::make_packed_info(name(), weights), weights,
                                            progress);
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
  Forward(const ModularExperts& experts, const ExpertsArgs& args);
  void run();

 private:
  using Task = GroupedGemm::Task;

  void index_rows();
  void convert_rows() const;
  TileJob job1(const Task& task) const;
  TileJob job2(const Task& task) const;
  void reduce(std::int64_t row, std::int64_t first_column) const;

  static constexpr std::int64_t kReduceColumns = 512;

  const ExpertsArgs& args_;
  const ProblemSize problem_;
  const CpuPackedWeights& weights_;
  const bool batched_;
  const Layout layout_;
  const Kernels& isa_ = kernels();
  const Compute compute_;
  const Epilogue activation_;
  const Epilogue store_;

  std::byte* gemm1_rows_ = nullptr;  // workspace 13

  // Rows: of the caller (x), as GEMM 1 reads them (a), and the outputs of the GEMMs.
  std::int64_t x_rows_ = 0, x_bytes_ = 0, a_bytes_ = 0, gemm1_bytes_ = 0, gemm2_bytes_ = 0;
  bool permute_ = false;  // a is x in the order of the grouped GEMM
  bool direct_ = false;   // a is x itself
  const std::byte* a_ = nullptr;

  const std::int32_t* expert_offsets_ = nullptr;
  const std::int32_t* slots_ = nullptr;             // row -> slot; standard format
  const std::int32_t* slot_to_permuted_ = nullptr;  // standard format
};

Forward::Forward(const ModularExperts& experts, const ExpertsArgs& args)
    : args_(args),
      problem_(core::check_experts_args(experts, args)),
      weights_(static_cast<const CpuPackedWeights&>(*args.weights)),
      batched_(experts.activation_format() == ActivationFormat::kBatchedExperts),
      layout_(problem_, experts.activation_format(), args.workspace2),
      compute_(compute_of(weights_.format(), problem_.dtype)),
      activation_(epilogue_of(weights_.info().activation, problem_.dtype)) {
  if (problem_.num_tokens == 0) return;
  gemm1_rows_ = static_cast<std::byte*>(args.workspace13);
  x_rows_ = problem_.num_tokens * (batched_ ? problem_.num_local_experts : 1);
  x_bytes_ = problem_.hidden * bytes(problem_.dtype, 1);
  a_bytes_ = weights_.gemm1().k * element_bytes(compute_);
  gemm1_bytes_ = weights_.gemm2().k * element_bytes(compute_);
  gemm2_bytes_ = weights_.gemm2().padded_columns() * 4;
  permute_ = isa_.contiguous_rows && compute_ == Compute::kBF16 && !batched_;
  const bool same_type = (problem_.dtype == DType::kF32) == (compute_ == Compute::kF32);
  direct_ = !permute_ && same_type && x_bytes_ == a_bytes_;
  a_ = direct_ ? args.hidden_states.as<const std::byte>() : layout_.gemm2_rows;
  index_rows();
}

/// Rows of each expert. In the batched format they are compacted: row i of expert e is
/// expert_offsets[e] + i.
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

/// Hidden states as GEMM 1 reads them: converted and padded token by token, or permuted.
void Forward::convert_rows() const {
  const auto convert = isa_.convert[static_cast<int>(compute_)];
  const std::int64_t rows = permute_ ? expert_offsets_[problem_.num_local_experts] : x_rows_;
#pragma omp for schedule(static)
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t source = permute_ ? slots_[row] / problem_.topk : row;
    convert(args_.hidden_states.as<const std::byte>() + source * x_bytes_,
            rounding_of(problem_.dtype), problem_.hidden, weights_.gemm1().k,
            layout_.gemm2_rows + row * a_bytes_);
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
  job.output = layout_.gemm2_rows + first * gemm2_bytes_ + task.first_tile * kStepBytes;
  job.output_bytes = gemm2_bytes_;
  return job;
}

/// The weighted sum of a token's rows, or one row of the batched format (zero behind the last).
void Forward::reduce(std::int64_t row, std::int64_t first_column) const {
  ReduceJob job;
  job.rows = layout_.gemm2_rows;
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
  if (problem_.num_tokens == 0) return;
  const auto multiply =
      isa_.multiply[static_cast<int>(weights_.format())][static_cast<int>(compute_)];
  const std::int64_t num_experts = problem_.num_local_experts;
  GroupedGemm gemm1(weights_.gemm1(), expert_offsets_, num_experts, layout_.task_offsets[0]);
  GroupedGemm gemm2(weights_.gemm2(), expert_offsets_, num_experts, layout_.task_offsets[1]);
#pragma omp parallel num_threads(layout_.threads)
  {
    std::byte* scratch =
        layout_.scratch + static_cast<std::size_t>(omp_get_thread_num()) * kScratchBytes;
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
  Forward(*this, args).run();
}

}  // namespace

std::shared_ptr<const ModularExperts> make_experts(ActivationFormat format) {
  return std::make_shared<CpuExperts>(format);
}

}  // namespace fusedmoe::cpu
