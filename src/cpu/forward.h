// One forward of the CPU experts: permute -> GEMM 1 + activation -> (quantize) -> GEMM 2 ->
// weighted sum. Each step is one call of the executor, which returns when the step is done.
//
// Workspace 13 holds the activated rows, (rows, padded intermediate); unfused experts first store
// GEMM 1's output there. Rows are f32 if they are quantized afterwards or if hooks see them.
// Workspace 2 holds the routing data, scratch memory of each task, the scales of the rows, copies
// of the rows in the layer's dtype for hooks, and one more buffer: first the hidden states as GEMM
// 1 reads them, then GEMM 2's output, (rows, padded hidden) f32. The weighted sum reads workspace 2
// only, as the output may share memory with workspace 13.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/grouped_gemm.h"
#include "cpu/operand_rows.h"
#include "cpu/pack.h"
#include "fusedmoe/experts.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::cpu {

/// How experts run.
struct ForwardMode {
  ActivationFormat format = ActivationFormat::kStandard;
  bool unfused = false;  ///< with injection points; standard format
  bool router_weight_on_input = false;
  /// Tasks of a step; fewer if the stream's executor runs fewer at a time. Fixed, so that
  /// workspaces have room for all of them whatever set_num_threads() says when a forward starts.
  int max_threads = 1;
};
inline ForwardMode mode_of(const Experts& experts) {
  const MoeConfig& config = experts.config();
  return {config.activation_format, config.hooks, config.apply_router_weight_on_input,
          experts.context().num_threads};
}

/// Where things lie in the workspaces: a function of the problem and the mode.
struct WorkspaceLayout {
  std::int64_t rows;  // upper bound of (token, expert) pairs
  std::size_t index_bytes;
  std::byte* index = nullptr;          // routing data, or expert offsets
  std::int64_t* work_offsets[2] = {};  // GroupedGemm's, of GEMM 1 and 2
  std::byte* scratch = nullptr;        // scratch_bytes for each task
  std::size_t scratch_bytes = 0;
  float* row_floats[2] = {};  // OperandRows's, of the rows of GEMM 1 and 2
  void* hook_rows[2] = {};    // (rows, 2 I) or (rows, hidden), and (rows, I), of the layer's dtype
  std::byte* gemm2_rows = nullptr;
  std::size_t bytes13 = 0, bytes2 = 0;

  WorkspaceLayout(const ProblemSize& problem, ForwardMode mode, void* workspace2 = nullptr);
};

class Forward {
 public:
  Forward(const Experts& experts, const ForwardArgs& args);
  void run();

 private:
  using WorkTile = GroupedGemm::WorkTile;
  class TaskScratch;

  /// Calls function(row, scratch) for every row in [0, rows), on all threads if so much work is
  /// worth waking them; a unit of it is the conversion of one element.
  template <typename Function>
  void for_rows(std::int64_t rows, std::int64_t work, const Function& function) const;
  void index_rows();
  void prepare_rows() const;
  void prepare_row(std::int64_t row, const TaskScratch& scratch) const;
  void multiply(bool first) const;
  TileJob job(const WorkTile& work, bool first) const;
  void finish_activated_rows() const;
  float activated_scale() const;
  void activated_row(std::int64_t row, float tensor_scale, const TaskScratch& scratch) const;
  void unfused_activation() const;
  void unfused_output() const;
  void call_hook(const std::function<void(const HookArgs&)> ExpertsHooks::*hook,
                 const TensorView& input, const TensorView& output) const;
  void to_layer_dtype(const float* source, std::int64_t count, std::byte* target) const;
  void reduce(std::int64_t row, std::int64_t first_column) const;
  std::int64_t num_rows() const { return expert_offsets_[problem_.num_local_experts]; }
  std::int64_t expert_of(std::int64_t row) const;
  bool quantizes_here() const { return key_ && !hidden_quantized_; }

  static constexpr std::int64_t kReduceColumns = 512;
  static constexpr std::int64_t kQuantizeWork = 4;  // of one element

  const ForwardArgs& args_;
  const ForwardMode mode_;
  const ProblemSize problem_;
  const CpuPackedWeights& weights_;
  const bool batched_;
  const WorkspaceLayout layout_;
  const Kernels& isa_ = kernels();
  Executor& executor_;
  const int num_threads_;              // read once
  const std::optional<QuantKey> key_;  // of the activations
  const bool hidden_quantized_;
  const Compute compute_;
  const OperandRows operands_[2];
  const Epilogue activation_;
  const Epilogue store_;

  std::byte* gemm1_rows_ = nullptr;  // workspace 13

  // Rows: the caller's (x), what GEMM 1 reads (a), and the outputs of the GEMMs.
  std::int64_t x_rows_ = 0, x_bytes_ = 0, a_rows_ = 0, a_bytes_ = 0;
  std::int64_t gemm1_bytes_ = 0, gemm2_bytes_ = 0, output_bytes_ = 0;
  bool permute_ = false;  // a has the rows of x in the order of the grouped GEMM
  bool direct_ = false;   // GEMM 1 reads x itself
  const std::byte* a_ = nullptr;

  const std::int32_t* expert_offsets_ = nullptr;
  const std::int32_t* slots_ = nullptr;             // row -> slot; standard format
  const std::int32_t* slot_to_permuted_ = nullptr;  // standard format
};

}  // namespace fusedmoe::cpu
