// One forward of the CPU experts: permute -> GEMM 1 + activation -> (quantize) -> GEMM 2 ->
// weighted sum, in one parallel region with a barrier between the steps.
//
// Workspace 13: the activation's output (rows, padded intermediate); unfused first GEMM 1's. Both
// f32 where they are quantized afterwards or unfused. Workspace 2: index structures, scratch memory
// of each thread, what belongs to rows beside their elements, rows of the layer's dtype for hooks,
// and the hidden states as GEMM 1 reads them, later GEMM 2's output (rows, padded hidden) f32 over
// them. The output is written last, from workspace 2 only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>

#include "cpu/grouped_gemm.h"
#include "cpu/operand_rows.h"
#include "cpu/pack.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cpu {

/// How experts run.
struct ForwardMode {
  ActivationFormat format = ActivationFormat::kStandard;
  bool unfused = false;  ///< with injection points; standard format
};
inline ForwardMode mode_of(const MoeConfig& config) {
  return {config.activation_format, config.hooks};
}

/// Where things lie in the workspaces: a function of the problem and the number of threads.
struct WorkspaceLayout {
  std::int64_t rows;  // upper bound of (token, expert) pairs
  int threads;
  std::size_t index_bytes;
  std::byte* index = nullptr;          // routing data, or expert offsets
  std::int64_t* task_offsets[2] = {};  // of GEMM 1 and 2
  std::byte* scratch = nullptr;        // scratch_bytes for each thread
  std::size_t scratch_bytes = 0;
  float* row_floats[2] = {};  // beside the rows of GEMM 1 and 2
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
  using Task = GroupedGemm::Task;
  class ThreadScratch;

  void index_rows();
  void prepare_rows(const ThreadScratch& scratch) const;
  void prepare_row(std::int64_t row, const ThreadScratch& scratch) const;
  TileJob job(const Task& task, bool first) const;
  void activated_rows(float tensor_scale, const ThreadScratch& scratch) const;
  void activated_row(std::int64_t row, float tensor_scale, const ThreadScratch& scratch) const;
  void unfused_activation(const ThreadScratch& scratch) const;
  void unfused_output(const ThreadScratch& scratch) const;
  void call_hook(const std::function<void(const HookArgs&)> ExpertsHooks::*hook,
                 const TensorView& input, const TensorView& output) const;
  void to_layer_dtype(const float* source, std::int64_t count, std::byte* target) const;
  void reduce(std::int64_t row, std::int64_t first_column) const;
  std::int64_t num_rows() const { return expert_offsets_[problem_.num_local_experts]; }
  std::int64_t expert_of(std::int64_t row) const;
  bool quantizes_here() const { return key_ && !hidden_quantized_; }

  static constexpr std::int64_t kReduceColumns = 512;

  const ForwardArgs& args_;
  const ForwardMode mode_;
  const ProblemSize problem_;
  const CpuPackedWeights& weights_;
  const bool batched_;
  const WorkspaceLayout layout_;
  const Kernels& isa_ = kernels();
  const std::optional<QuantKey> key_;  // of the activations
  const bool hidden_quantized_;
  const Compute compute_;
  const OperandRows operands_[2];
  const Epilogue activation_;
  const Epilogue store_;

  mutable std::exception_ptr hook_failure_;  // of the first hook that threw

  std::byte* gemm1_rows_ = nullptr;  // workspace 13

  // Rows: of the caller (x), as GEMM 1 reads them (a), and the outputs of the GEMMs.
  std::int64_t x_rows_ = 0, x_bytes_ = 0, a_rows_ = 0, a_bytes_ = 0;
  std::int64_t gemm1_bytes_ = 0, gemm2_bytes_ = 0, output_bytes_ = 0;
  bool permute_ = false;  // a is x in the order of the grouped GEMM
  bool direct_ = false;   // a is x itself
  const std::byte* a_ = nullptr;

  const std::int32_t* expert_offsets_ = nullptr;
  const std::int32_t* slots_ = nullptr;             // row -> slot; standard format
  const std::int32_t* slot_to_permuted_ = nullptr;  // standard format
};

}  // namespace fusedmoe::cpu
