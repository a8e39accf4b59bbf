#include "cuda/scratch.h"

#include "core/ceil_div.h"
#include "core/workspace.h"
#include "moe/experts_args.h"

namespace fusedmoe::cuda {

Variant variant_of(const MoeConfig& config) {
  if (config.activation_format == ActivationFormat::kBatchedExperts) return Variant::kBatched;
  if (config.hooks) return Variant::kUnfused;
  return config.batch_invariant ? Variant::kBatchInvariant : Variant::kStandard;
}

Scratch::Scratch(const ProblemSize& problem, Variant variant, const KernelConfig& config,
                 void* block) {
  const bool batched = variant == Variant::kBatched;
  const std::int64_t experts = problem.num_local_experts;
  core::WorkspaceCutter cutter(block);
  rows = problem.num_tokens * (batched ? experts : problem.topk);
  activated_pitch = core::round_up(problem.intermediate, kPitchUnit);
  const auto take_rows = [&](std::int64_t pitch, DType dtype) {
    return cutter.take(
        static_cast<std::size_t>(fusedmoe::bytes(dtype, Shape({rows, pitch}).numel())));
  };
  counters = static_cast<std::int32_t*>(
      cutter.take(4 * static_cast<std::size_t>(num_counters(config.tile, rows, experts))));
  if (!batched) {
    const DType rows_dtype = config.rows_f32 ? DType::kF32 : problem.dtype;
    routing = cutter.take(routing_data_bytes(problem.num_tokens, problem.topk, experts));
    permuted = take_rows(problem.hidden, problem.dtype);
    rows_out = take_rows(config.splits * problem.hidden, rows_dtype);
  }
  if (variant == Variant::kUnfused) gate_up = take_rows(2 * problem.intermediate, problem.dtype);
  activated = take_rows(activated_pitch, problem.dtype);
  bytes = cutter.used();
}

}  // namespace fusedmoe::cuda
