// permute -> GEMM 1 + activation -> GEMM 2 -> weighted sum, in one parallel region with a barrier
// between the steps. Work is cut into (expert, group of tiles, block of rows) tasks that threads
// claim from a counter, so one token and 8192 tokens both use every core; the bits do not depend
// on who runs a task (cpu/multiply.h).
//
// Workspace 13: the activation's output (rows, padded intermediate). Workspace 2: index structures,
// one scratch panel per thread, and the converted hidden states, later GEMM 2's output (rows,
// padded hidden) f32 over them. The output is written last, from workspace 2 only.
#include "cpu/experts.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "core/check.h"
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

/// One grouped GEMM as tasks.
struct Phase {
  const PackedGemm* gemm = nullptr;
  const std::int32_t* expert_offsets = nullptr;
  std::int64_t* task_offsets = nullptr;  // (num_experts + 1)
  std::int64_t num_experts = 0;
  Format format{};
  std::atomic<std::int64_t> next{0};

  std::int64_t num_rows(std::int64_t expert) const {
    return expert_offsets[expert + 1] - expert_offsets[expert];
  }
  /// Few rows are bound by memory: several streams side by side, see stream_tiles.
  std::int64_t tiles_per_task(std::int64_t rows) const {
    return format == Format::kMxfp4 && rows <= 2 ? kMaxTiles / rows : 1;
  }
  std::int64_t tile_groups(std::int64_t rows) const {
    const std::int64_t tiles = tiles_per_task(rows);
    return (gemm->num_tiles + tiles - 1) / tiles;
  }
  void plan() {
    task_offsets[0] = 0;
    for (std::int64_t e = 0; e < num_experts; ++e) {
      const std::int64_t rows = num_rows(e);
      const std::int64_t tasks =
          rows == 0 ? 0 : tile_groups(rows) * ((rows + kMaxRows - 1) / kMaxRows);
      task_offsets[e + 1] = task_offsets[e] + tasks;
    }
  }
};

struct Task {
  std::int64_t expert, first_tile, first_row, rows;
  int tiles;
};

Task task_at(const Phase& phase, std::int64_t index) {
  const std::int64_t* begin = phase.task_offsets;
  const std::int64_t expert =
      std::upper_bound(begin, begin + phase.num_experts + 1, index) - begin - 1;
  const std::int64_t rows = phase.num_rows(expert);
  const std::int64_t tiles = phase.tiles_per_task(rows);
  // Row blocks of one tile follow each other, so that its stream is still in the cache.
  const std::int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;
  const std::int64_t local = index - phase.task_offsets[expert];
  const std::int64_t block = local % blocks;
  Task task;
  task.expert = expert;
  task.first_tile = local / blocks * tiles;
  task.tiles = static_cast<int>(std::min(tiles, phase.gemm->num_tiles - task.first_tile));
  task.first_row = rows * block / blocks;
  task.rows = rows * (block + 1) / blocks - task.first_row;
  return task;
}

/// Claims tasks until none is left. `job_of(task)` describes one; `stream_of(task)` is where its
/// weights start. A thread with many rows a task claims one ahead to prefetch its weights.
template <class JobOf, class StreamOf>
void run_phase(Phase& phase, void (*multiply)(const TileJob&), std::byte* scratch, JobOf job_of,
               StreamOf stream_of) {
  const std::int64_t total = phase.task_offsets[phase.num_experts];
  std::int64_t current = phase.next.fetch_add(1);
  while (current < total) {
    const Task task = task_at(phase, current);
    TileJob job = job_of(task);
    job.scratch = scratch;
    constexpr std::int64_t kComputeBoundRows = 5;
    const bool ahead = task.rows >= kComputeBoundRows;
    std::int64_t next = ahead ? phase.next.fetch_add(1) : total;
    if (next < total) {
      const Task following = task_at(phase, next);
      if (following.first_row == 0) {
        job.prefetch = stream_of(following);
        job.prefetch_bytes = following.tiles * phase.gemm->tile_bytes;
      }
    }
    multiply(job);
    current = ahead ? next : phase.next.fetch_add(1);
  }
}

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

void CpuExperts::apply(const ExpertsArgs& args) const {
  const auto& weights = static_cast<const CpuPackedWeights&>(*args.weights);
  const PackedGemm& gemm1 = weights.gemm1();
  const PackedGemm& gemm2 = weights.gemm2();
  const TensorView& x = args.hidden_states;
  const DType dtype = x.dtype();
  const Epilogue::Rounding rounding = rounding_of(dtype);
  const Compute compute = compute_of(weights.format(), dtype);
  const Kernels& isa = kernels();
  const auto multiply = isa.multiply[static_cast<int>(weights.format())][static_cast<int>(compute)];

  ProblemSize problem;
  problem.num_tokens = x.size(batched() ? 1 : 0);
  problem.topk = batched() ? 1 : args.topk_ids.size(1);
  problem.num_local_experts = weights.info().num_experts;
  problem.hidden = weights.info().hidden;
  problem.intermediate = weights.info().intermediate;
  problem.dtype = dtype;
  const Layout layout(problem, format_);
  auto* memory = static_cast<std::byte*>(args.workspace2);
  std::byte* index_memory = memory;
  auto* tasks1 = reinterpret_cast<std::int64_t*>(index_memory + layout.index_bytes);
  auto* tasks2 = tasks1 + layout.task_bytes / sizeof(std::int64_t);
  std::byte* scratch = index_memory + layout.index_bytes + 2 * layout.task_bytes;
  std::byte* gemm2_rows = scratch + layout.scratch_bytes;
  auto* gemm1_rows = static_cast<std::byte*>(args.workspace13);

  // Rows of each expert. In the batched format they are compacted: row i of expert e is
  // expert_offsets[e] + i.
  const std::int32_t* expert_offsets;
  const std::int32_t* slots = nullptr;
  const std::int32_t* slot_to_permuted = nullptr;
  if (batched()) {
    auto* offsets = reinterpret_cast<std::int32_t*>(index_memory);
    offsets[0] = 0;
    for (std::int64_t e = 0; e < problem.num_local_experts; ++e) {
      offsets[e + 1] = offsets[e] + args.expert_num_tokens.as<const std::int32_t>()[e];
    }
    expert_offsets = offsets;
  } else {
    const RoutingData routing =
        build_routing_data(args.topk_ids, args.expert_map, problem.num_local_experts, index_memory,
                           layout.index_bytes);
    expert_offsets = routing.expert_offsets.as<const std::int32_t>();
    slots = routing.permuted_to_slot.as<const std::int32_t>();
    slot_to_permuted = routing.slot_to_permuted.as<const std::int32_t>();
  }

  // Hidden states as the GEMM reads them: as they are where type and padding fit, converted token
  // by token, or permuted to the rows of the grouped GEMM.
  const std::int64_t x_rows =
      batched() ? problem.num_local_experts * problem.num_tokens : problem.num_tokens;
  const std::int64_t x_bytes = problem.hidden * bytes(dtype, 1);
  const std::int64_t a_bytes = gemm1.k * element_bytes(compute);
  const bool permute = isa.contiguous_rows && compute == Compute::kBF16 && !batched();
  const bool direct = !permute && x_bytes == a_bytes &&
                      (rounding == Epilogue::Rounding::kNone) == (compute == Compute::kF32);
  const std::byte* a = direct ? x.as<const std::byte>() : gemm2_rows;
  const std::int64_t gemm1_row_bytes = gemm2.k * element_bytes(compute);
  const std::int64_t gemm2_row_bytes = gemm2.padded_columns() * 4;

  const Epilogue activation = epilogue_of(weights.info().activation, dtype);
  const Epilogue store;
  Phase phase1, phase2;
  phase1.gemm = &gemm1;
  phase1.task_offsets = tasks1;
  phase2.gemm = &gemm2;
  phase2.task_offsets = tasks2;
  for (Phase* phase : {&phase1, &phase2}) {
    phase->expert_offsets = expert_offsets;
    phase->num_experts = problem.num_local_experts;
    phase->format = weights.format();
    phase->plan();
  }

  const auto stream1 = [&](const Task& task) {
    return weights.tiles1(task.expert) + task.first_tile * gemm1.tile_bytes;
  };
  const auto job1 = [&](const Task& task) {
    TileJob job;
    const std::int64_t first = expert_offsets[task.expert] + task.first_row;
    const std::int64_t columns = activation.gated ? kTileColumns / 2 : kTileColumns;
    job.tiles = stream1(task);
    job.tile_bytes = gemm1.tile_bytes;
    job.num_tiles = task.tiles;
    job.k = gemm1.k;
    const std::int64_t batched_row = task.expert * problem.num_tokens + task.first_row;
    job.rows = a + (batched() ? batched_row : permute ? first : 0) * a_bytes;
    job.row_bytes = a_bytes;
    job.slots = slots && !permute ? slots + first : nullptr;
    job.topk = problem.topk;
    job.num_rows = task.rows;
    const float* bias = weights.bias1(task.expert);
    job.bias = bias ? bias + task.first_tile * kTileColumns : nullptr;
    job.epilogue = &activation;
    job.output =
        gemm1_rows + first * gemm1_row_bytes + task.first_tile * columns * element_bytes(compute);
    job.output_bytes = gemm1_row_bytes;
    return job;
  };
  const auto stream2 = [&](const Task& task) {
    return weights.tiles2(task.expert) + task.first_tile * gemm2.tile_bytes;
  };
  const auto job2 = [&](const Task& task) {
    TileJob job;
    const std::int64_t first = expert_offsets[task.expert] + task.first_row;
    job.tiles = stream2(task);
    job.tile_bytes = gemm2.tile_bytes;
    job.num_tiles = task.tiles;
    job.k = gemm2.k;
    job.rows = gemm1_rows + first * gemm1_row_bytes;
    job.row_bytes = gemm1_row_bytes;
    job.num_rows = task.rows;
    const float* bias = weights.bias2(task.expert);
    job.bias = bias ? bias + task.first_tile * kTileColumns : nullptr;
    job.epilogue = &store;
    job.output = gemm2_rows + first * gemm2_row_bytes + task.first_tile * kStepBytes;
    job.output_bytes = gemm2_row_bytes;
    return job;
  };

  // The weighted sum, a token (or batched row) and 512 columns at a time.
  constexpr std::int64_t kReduceColumns = 512;
  const std::int64_t column_blocks = (problem.hidden + kReduceColumns - 1) / kReduceColumns;
  const auto reduce = [&](std::int64_t row, std::int64_t block) {
    ReduceJob job;
    job.rows = gemm2_rows;
    job.row_bytes = gemm2_row_bytes;
    job.begin = block * kReduceColumns;
    job.end = std::min(problem.hidden, job.begin + kReduceColumns);
    job.output = args.output.as<std::byte>() + row * x_bytes;
    job.dtype = rounding;
    std::int32_t batched_row = -1;
    if (batched()) {
      const std::int64_t expert = row / problem.num_tokens, i = row % problem.num_tokens;
      if (i < phase2.num_rows(expert)) {
        batched_row = static_cast<std::int32_t>(expert_offsets[expert] + i);
      }
      job.indices = &batched_row;
      job.num_indices = 1;
    } else {
      job.indices = slot_to_permuted + row * problem.topk;
      job.weights = args.router_weight_on_input
                        ? nullptr
                        : args.topk_weights.as<const float>() + row * problem.topk;
      job.num_indices = problem.topk;
    }
    isa.reduce(job);
  };

#pragma omp parallel num_threads(num_threads())
  {
    std::byte* own_scratch =
        scratch + static_cast<std::size_t>(omp_get_thread_num()) * Layout::pad(kScratchBytes);
    if (!direct) {
      const std::int64_t a_rows = permute ? expert_offsets[problem.num_local_experts] : x_rows;
#pragma omp for schedule(static)
      for (std::int64_t row = 0; row < a_rows; ++row) {
        const std::int64_t source = permute ? slots[row] / problem.topk : row;
        isa.convert[static_cast<int>(compute)](x.as<const std::byte>() + source * x_bytes, rounding,
                                               problem.hidden, gemm1.k, gemm2_rows + row * a_bytes);
      }
    }
    run_phase(phase1, multiply, own_scratch, job1, stream1);
#pragma omp barrier
    run_phase(phase2, multiply, own_scratch, job2, stream2);
#pragma omp barrier
#pragma omp for schedule(static) collapse(2) nowait
    for (std::int64_t row = 0; row < x_rows; ++row) {
      for (std::int64_t block = 0; block < column_blocks; ++block) reduce(row, block);
    }
  }
}

}  // namespace

std::shared_ptr<const ModularExperts> make_experts(ActivationFormat format) {
  return std::make_shared<CpuExperts>(format);
}

}  // namespace fusedmoe::cpu
