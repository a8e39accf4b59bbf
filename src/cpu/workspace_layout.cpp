#include "cpu/workspace_layout.h"

#include "core/numa.h"
#include "core/workspace.h"
#include "cpu/grouped_gemm.h"
#include "fusedmoe/router.h"
#include "moe/problem_size.h"

namespace fusedmoe::cpu {

using core::round_up;

namespace {

/// Upper bound of GemmRows::floats_per_row() for all weights of the scheme.
std::int64_t floats_per_row(const QuantScheme& scheme, std::int64_t padded_k) {
  const bool symmetric = scheme.weights.symmetric && scheme.down_weights().symmetric;
  if (!scheme.activations && symmetric) return 0;
  return 1 + padded_k / TileFormat::kMinGroup + padded_k / kGroup;
}

}  // namespace

WorkspaceLayout::WorkspaceLayout(const ProblemSize& problem, ForwardMode mode, void* workspace2)
    : rows(mode.format == ActivationFormat::kStandard
               ? core::most_expert_rows(problem)
               : problem.num_tokens * problem.num_local_experts),
      index_bytes(routing_data_bytes(problem.num_tokens, problem.topk, problem.num_local_experts)) {
  const auto size = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  const std::int64_t hidden = round_up(problem.hidden, kTileColumns);
  const std::int64_t intermediate = round_up(problem.intermediate, kTileColumns);
  const std::int64_t most_rows = std::max(rows, problem.num_tokens);
  // A row in fp32, its codes of up to 16 bits and its scales.
  const std::int64_t row_scratch = 7 * std::max(hidden, intermediate);
  const bool quantized = problem.scheme.activations.has_value();
  scratch_bytes = core::round_up_workspace(kScratchBytes +
                                           (quantized || mode.unfused ? 2 * size(row_scratch) : 0));

  core::WorkspaceCutter cutter(workspace2);
  index = static_cast<std::byte*>(cutter.take(index_bytes));
  const std::size_t most_parts = std::max<std::size_t>(core::numa_nodes().size(), 1);
  for (auto& offsets : work_offsets) {
    offsets = static_cast<std::int64_t*>(
        cutter.take(most_parts * size(problem.num_local_experts + 1) * sizeof(std::int64_t)));
  }
  scratch = static_cast<std::byte*>(cutter.take(scratch_bytes * size(mode.max_threads)));
  for (int i = 0; i < 2; ++i) {
    const std::int64_t floats = floats_per_row(problem.scheme, i == 0 ? hidden : intermediate);
    row_floats[i] = static_cast<float*>(cutter.take(size(most_rows * floats) * sizeof(float)));
  }
  if (mode.unfused) {
    const std::int64_t widest = std::max(2 * problem.intermediate, problem.hidden);
    hook_rows[0] = cutter.take(size(bytes(problem.dtype, rows * widest)));
    hook_rows[1] = cutter.take(size(bytes(problem.dtype, rows * problem.intermediate)));
  }
  gemm2_rows = static_cast<std::byte*>(cutter.take(size(most_rows * hidden * 4)));
  bytes2 = cutter.used();
  bytes13 = size(rows * intermediate * 4 * (mode.unfused ? 2 : 1));
}

}  // namespace fusedmoe::cpu
