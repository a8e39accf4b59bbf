#include "reference/unfused.h"

#include "core/workspace.h"
#include "reference/matrix.h"

namespace fusedmoe::reference {

UnfusedRows::UnfusedRows(const ProblemSize& problem, void* memory, const ForwardArgs& args)
    : problem_(problem), origins_(args.origins), stream_(args.stream) {
  core::WorkspaceCutter cutter(memory);
  const std::int64_t slots = Shape({problem.num_tokens, problem.topk}).numel();
  const auto take = [&](DType dtype, const Shape& shape) {
    return cutter.take(static_cast<std::size_t>(fusedmoe::bytes(dtype, shape.numel())));
  };
  gemm1_ = take(problem.dtype, {slots, 2, problem.intermediate});
  activated_ = take(problem.dtype, {slots, problem.intermediate});
  gemm2_ = take(problem.dtype, {slots, problem.hidden});
  expert_offsets_ = static_cast<std::int32_t*>(take(DType::kI32, {problem.num_local_experts + 1}));
  permuted_to_slot_ = static_cast<std::int32_t*>(take(DType::kI32, {slots}));
  bytes_ = cutter.used();
}

void UnfusedRows::set_order(const std::int64_t* slots, const std::int64_t* offsets) {
  for (std::int64_t e = 0; e <= problem_.num_local_experts; ++e) {
    expert_offsets_[e] = static_cast<std::int32_t>(offsets[e]);
  }
  rows_ = offsets[problem_.num_local_experts];
  for (std::int64_t r = 0; r < rows_; ++r) {
    permuted_to_slot_[r] = static_cast<std::int32_t>(slots[r]);
  }
}

TensorView UnfusedRows::step(const Hook& hook, const TensorView& input, void* memory,
                             SlotRows rows) {
  const TensorView output(memory, problem_.dtype, {rows_, rows.width});
  for (std::int64_t r = 0; r < rows_; ++r) {
    const double* from = rows.data + permuted_to_slot_[r] * rows.stride;
    for (std::int64_t i = 0; i < rows.width; ++i) {
      store(memory, problem_.dtype, r * rows.width + i, from[i]);
    }
  }
  if (hook) {
    HookArgs args;
    args.input = input;
    args.output = output;
    args.expert_offsets =
        TensorView(expert_offsets_, DType::kI32, {problem_.num_local_experts + 1});
    args.permuted_to_slot = TensorView(permuted_to_slot_, DType::kI32, {rows_});
    args.topk = problem_.topk;
    args.origins = origins_;
    args.stream = stream_;
    hook(args);
  }
  for (std::int64_t r = 0; r < rows_; ++r) {
    double* to = rows.data + permuted_to_slot_[r] * rows.stride;
    for (std::int64_t i = 0; i < rows.width; ++i) {
      to[i] = load(memory, problem_.dtype, r * rows.width + i);
    }
  }
  return output;
}

void UnfusedRows::after_gemm1(const ExpertsHooks& hooks, const TensorView& hidden_states,
                              SlotRows rows) {
  gemm1_output_ = step(hooks.after_gemm1, hidden_states, gemm1_, rows);
}

void UnfusedRows::after_activation(const ExpertsHooks& hooks, SlotRows rows) {
  activation_output_ = step(hooks.after_activation, gemm1_output_, activated_, rows);
}

void UnfusedRows::after_gemm2(const ExpertsHooks& hooks, SlotRows rows) {
  step(hooks.after_gemm2, activation_output_, gemm2_, rows);
}

}  // namespace fusedmoe::reference
