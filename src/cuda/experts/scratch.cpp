#include "cuda/experts/scratch.h"

#include "cuda/mlp/fused_mlp.h"

#include "core/ceil_div.h"
#include "core/workspace.h"
#include "moe/problem_size.h"

namespace fusedmoe::cuda {

Variant variant_of(const MoeConfig& config) {
  if (config.activation_format == ActivationFormat::kBatchedExperts) return Variant::kBatched;
  if (config.hooks) return Variant::kUnfused;
  return config.batch_invariant ? Variant::kBatchInvariant : Variant::kStandard;
}

QuantizedRows Scratch::take_codes(core::WorkspaceCutter& cutter, const RowFormat& format,
                                  const QuantKey& key, std::int64_t columns) {
  constexpr std::int64_t kAlignment = 16;  // of tensor copies
  QuantizedRows result;
  result.pitch = core::round_up(columns, kAlignment);
  const DType code = format.fp8_as_f16() ? DType::kF16 : DType::kE4M3;
  result.codes = cutter.take(
      static_cast<std::size_t>(fusedmoe::bytes(code, Shape({rows, result.pitch}).numel())));
  std::int64_t scales = rows;
  if (!key.dynamic) return result;
  if (key.group.cols > 0) {
    result.scale_pitch = core::round_up(rows, kAlignment / std::int64_t{sizeof(float)});
    scales = Shape({core::ceil_div(columns, key.group.cols), result.scale_pitch}).numel();
  }
  result.scales = static_cast<float*>(cutter.take(static_cast<std::size_t>(4 * scales)));
  return result;
}

Scratch::Scratch(const ProblemSize& problem, const RowFormat& format, Variant variant,
                 const KernelConfig& config, void* block) {
  const bool batched = variant == Variant::kBatched, unfused = variant == Variant::kUnfused;
  const std::int64_t experts = problem.num_local_experts;
  core::WorkspaceCutter cutter(block);
  rows = batched ? problem.num_tokens * experts : core::most_expert_rows(problem);
  activated_pitch = core::round_up(problem.intermediate, kPitchUnit);
  const auto take_rows = [&](std::int64_t pitch, DType dtype) {
    return cutter.take(
        static_cast<std::size_t>(fusedmoe::bytes(dtype, Shape({rows, pitch}).numel())));
  };
  std::int64_t num_words = num_counters(config.tile, rows, experts);
  if (format.joins_groups(config.tile)) {
    group_counters = static_cast<int>(num_words);
    num_words += num_group_counters(config.tile, rows, experts, problem.intermediate);
  }
  const std::int64_t arrival_words = batched ? 0 : RowArrivals::words(rows);
  num_zeroed = num_words + arrival_words + 2;
  counters = static_cast<std::int32_t*>(cutter.take(4 * static_cast<std::size_t>(num_zeroed)));
  arrivals = counters + num_words;
  amax = reinterpret_cast<std::uint32_t*>(arrivals + arrival_words);
  if (!batched) {
    const DType rows_dtype = config.rows_f32 ? DType::kF32 : problem.dtype;
    routing = cutter.take(routing_data_bytes(problem.num_tokens, problem.topk, experts));
    rows_out = take_rows(config.splits * problem.hidden, rows_dtype);
  }
  const std::optional<QuantKey>& key = problem.scheme.activations;
  if (format.has_coded_rows()) {
    hidden = take_codes(cutter, format, *key, problem.hidden);
    quantized = take_codes(cutter, format, *key, problem.intermediate);
  } else if (!batched || key) {
    permuted = take_rows(problem.hidden, problem.dtype);
  }
  if (unfused) gate_up = take_rows(2 * problem.intermediate, problem.dtype);
  // The kernel of one token stores no codes.
  if (!format.stores_codes() || problem.num_tokens == 1) {
    activated = take_rows(activated_pitch, problem.dtype);
  }
  if (unfused && key && !format.has_coded_rows()) {
    quantized.codes = take_rows(activated_pitch, problem.dtype);
  }
  bytes = cutter.used();
}

}  // namespace fusedmoe::cuda
