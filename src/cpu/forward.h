// One forward of the CPU experts: permute -> GEMM 1 + activation -> (quantize) -> GEMM 2 ->
// weighted sum. Each step is one call of the executor, which returns when the step is done.
#pragma once

#include <cstdint>

#include "core/parallel.h"
#include "cpu/gemm_rows.h"
#include "cpu/grouped_gemm.h"
#include "cpu/pack.h"
#include "cpu/workspace_layout.h"
#include "fusedmoe/experts.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::cpu {

/// The layer's dtype and activation as the kernels know them.
Epilogue::Rounding rounding_of(DType dtype);
Epilogue epilogue_of(const ResolvedActivation& activation, DType dtype, bool store_f32);

class Forward {
 public:
  Forward(const Experts& experts, const ForwardArgs& args);
  void run();

 private:
  using WorkTile = GroupedGemm::WorkTile;

  /// Calls function(row, scratch) for every row in [0, rows), on all threads if so much work is
  /// worth waking them; a unit of it is the conversion of one element.
  template <typename Function>
  void for_rows(std::int64_t rows, std::int64_t work, const Function& function) const {
    for_rows(executor_, rows, work, function);
  }
  template <typename Function>
  void for_rows(Executor& executor, std::int64_t rows, std::int64_t work,
                const Function& function) const {
    constexpr std::int64_t kWorthwhile = 16384;  // a few microseconds of one thread
    const int num_tasks = work >= kWorthwhile ? num_threads_ : 1;
    core::run_tasks(executor, num_tasks, [&](int task) {
      const TaskScratch scratch(layout_, problem_, task);
      const std::int64_t end = rows * (task + 1) / num_tasks;
      for (std::int64_t row = rows * task / num_tasks; row < end; ++row) function(row, scratch);
    });
  }
  void index_rows();
  void prepare_rows() const;
  void prepare_permuted_rows() const;
  std::int64_t preparing_work() const {
    return a_rows_ * problem_.hidden * (quantizes_here() ? kQuantizeWork : 1);
  }
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
  const GemmRows operands_[2];
  const Epilogue activation_;
  const Epilogue store_;

  std::byte* gemm1_rows_ = nullptr;  // workspace 13

  // Rows: the caller's (x), what GEMM 1 reads (a), and the outputs of the GEMMs.
  std::int64_t x_rows_ = 0, x_bytes_ = 0, a_rows_ = 0, a_bytes_ = 0;
  std::int64_t gemm1_bytes_ = 0, gemm2_bytes_ = 0, output_bytes_ = 0;
  bool permute_ = false;     // a has the rows of x in the order of the grouped GEMM
  bool per_expert_ = false;  // and each expert's are quantized by a scale of its own
  bool direct_ = false;      // GEMM 1 reads x itself
  const std::byte* a_ = nullptr;

  const std::int32_t* expert_offsets_ = nullptr;
  const std::int32_t* slots_ = nullptr;             // row -> slot; standard format
  const std::int32_t* slot_to_permuted_ = nullptr;  // standard format
};

}  // namespace fusedmoe::cpu
