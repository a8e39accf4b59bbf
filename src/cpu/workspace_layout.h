// Where the CPU experts keep what lies between the steps of a forward.
//
// Workspace 13 holds the activated rows, (rows, padded intermediate); unfused experts first store
// GEMM 1's output there. Rows are f32 if they are quantized afterwards or if hooks see them.
// Workspace 2 holds the routing data, scratch memory of each task, the scales of the rows, copies
// of the rows in the layer's dtype for hooks, and one more buffer: first the hidden states as GEMM
// 1 reads them, then GEMM 2's output, (rows, padded hidden) f32. The weighted sum reads workspace 2
// only, as the output may share memory with workspace 13.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/ceil_div.h"
#include "cpu/kernels.h"
#include "cpu/tile.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cpu {

/// How experts run.
struct ForwardMode {
  ActivationFormat format = ActivationFormat::kStandard;
  bool unfused = false;  ///< with injection points; standard format
  bool router_weight_on_input = false;
  bool batch_invariant = false;
  /// Tasks of a step; fewer if the stream's executor runs fewer at a time. Fixed, so that
  /// workspaces have room for all of them whatever set_num_threads() says when a forward starts.
  int max_threads = 1;
};
inline ForwardMode mode_of(const Experts& experts) {
  const MoeConfig& config = experts.config();
  return {config.activation_format, config.hooks, config.apply_router_weight_on_input,
          config.batch_invariant, experts.context().num_threads};
}

/// Where things lie in the workspaces: a function of the problem and the mode.
struct WorkspaceLayout {
  std::int64_t rows;  // upper bound of (token, expert) pairs
  std::size_t index_bytes;
  std::byte* index = nullptr;          // routing data, or expert offsets
  std::int64_t* work_offsets[2] = {};  // GroupedGemm's, of GEMM 1 and 2, for all NUMA nodes
  std::byte* scratch = nullptr;        // scratch_bytes for each task
  std::size_t scratch_bytes = 0;
  float* row_floats[2] = {};  // GemmRows's, of the rows of GEMM 1 and 2
  void* hook_rows[2] = {};    // (rows, 2 I) or (rows, hidden), and (rows, I), of the layer's dtype
  std::byte* gemm2_rows = nullptr;
  std::size_t bytes13 = 0, bytes2 = 0;

  WorkspaceLayout(const ProblemSize& problem, ForwardMode mode, void* workspace2 = nullptr);
};

/// Scratch memory of one task, in parts.
class TaskScratch {
 public:
  TaskScratch(const WorkspaceLayout& layout, const ProblemSize& problem, int task)
      : panels_(layout.scratch + static_cast<std::size_t>(task) * layout.scratch_bytes),
        longest_row_(core::round_up(std::max(problem.hidden, problem.intermediate), kTileColumns)) {
  }

  std::byte* panels() const { return panels_; }
  float* row() const { return reinterpret_cast<float*>(panels_ + kScratchBytes); }
  std::uint8_t* codes() const { return reinterpret_cast<std::uint8_t*>(row() + longest_row_); }
  void* scales() const { return codes() + 2 * longest_row_; }

 private:
  std::byte* panels_;
  std::int64_t longest_row_;  // a multiple of kTileColumns
};

}  // namespace fusedmoe::cpu
