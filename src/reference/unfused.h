// What the unfused reference experts add: the results of each step as tensors of the layer's dtype,
// in the order of the grouped GEMM, for callbacks to change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "fusedmoe/experts.h"

namespace fusedmoe::reference {

/// Values of slots in double, `stride` apart, of which the first `width` count.
struct SlotRows {
  double* data;
  std::int64_t stride, width;
};

class UnfusedRows {
 public:
  /// Cut from `memory`; with null only bytes() is meaningful.
  UnfusedRows(const ProblemSize& problem, void* memory, const ForwardArgs& args);
  std::size_t bytes() const { return bytes_; }

  /// Slots of expert 0, of expert 1, ..., and where those of each begin.
  void set_order(const std::int64_t* slots, const std::int64_t* offsets);

  /// Rounds the rows to the layer's dtype, lets the hook change them, and takes them back.
  void after_gemm1(const ExpertsHooks& hooks, const TensorView& hidden_states, SlotRows rows);
  void after_activation(const ExpertsHooks& hooks, SlotRows rows);
  void after_gemm2(const ExpertsHooks& hooks, SlotRows rows);

 private:
  using Hook = std::function<void(const HookArgs&)>;
  TensorView step(const Hook& hook, const TensorView& input, void* memory, SlotRows rows);

  ProblemSize problem_;
  const TokenOrigins origins_;
  const Stream stream_;
  void* gemm1_ = nullptr;
  void* activated_ = nullptr;
  void* gemm2_ = nullptr;
  std::int32_t* expert_offsets_ = nullptr;
  std::int32_t* permuted_to_slot_ = nullptr;
  std::int64_t rows_ = 0;
  std::size_t bytes_ = 0;
  TensorView gemm1_output_, activation_output_;
};

}  // namespace fusedmoe::reference
