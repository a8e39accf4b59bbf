// The router and the bit matrix on a CUDA device: checks of the arguments, and how many blocks
// share the work.
#include "cuda/router/router.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "cuda/router/bitmatrix.h"
#include "cuda/router/kernels.h"

namespace fusedmoe::cuda {
namespace {

/// An undefined view passes.
void check_on_device(const TensorView& view, const char* argument, Stream stream) {
  if (!view) return;
  FUSEDMOE_CHECK_FAULT(
      view.device() == stream.device && !view.device().is_cpu(), kDevice, argument,
      "on " + to_string(view.device()),
      core::format("on the CUDA device of the stream, which is on {}", to_string(stream.device)));
  const auto alignment = static_cast<std::uintptr_t>(bytes(view.dtype(), 1));
  FUSEDMOE_CHECK_FAULT(reinterpret_cast<std::uintptr_t>(view.data()) % alignment == 0, kAlignment,
                       argument, "misaligned", core::format("{}-byte aligned", alignment));
}

void check_route(const RouterConfig& config, const TensorView& logits, const TensorView& bias,
                 const Routing& out, const TensorView& counts, Stream stream) {
  config.validate();
  FUSEDMOE_CHECK_SUPPORTED(!config.custom, kDevice, "router.custom", "set",
                           "unset: it runs on the CPU alone");
  FUSEDMOE_CHECK_SUPPORTED(config.num_experts <= kMaxRouterExperts, kShape, "router.num_experts",
                           core::to_string(config.num_experts),
                           core::format("at most {} on a CUDA device", kMaxRouterExperts));
  FUSEDMOE_CHECK_SUPPORTED(config.topk <= kMaxRouterTopk, kShape, "router.topk",
                           core::to_string(config.topk),
                           core::format("at most {} on a CUDA device", kMaxRouterTopk));
  core::check_tensor(logits, "router_logits", DType::kF32, {-1, config.num_experts});
  const std::int64_t num_tokens = logits.size(0);
  core::check_tensor(out.topk_ids, "topk_ids", DType::kI32, {num_tokens, config.topk});
  core::check_tensor(out.topk_weights, "topk_weights", DType::kF32, {num_tokens, config.topk});
  if (bias) core::check_tensor(bias, "score_correction_bias", DType::kF32, {config.num_experts});
  if (counts) core::check_tensor(counts, "expert_num_tokens", DType::kI32, {config.num_experts});
  check_on_device(logits, "router_logits", stream);
  check_on_device(bias, "score_correction_bias", stream);
  check_on_device(out.topk_ids, "topk_ids", stream);
  check_on_device(out.topk_weights, "topk_weights", stream);
  check_on_device(counts, "expert_num_tokens", stream);
  FUSEDMOE_CHECK_FAULT(
      !core::overlap(out.topk_ids, out.topk_weights) && !core::overlap(out.topk_ids, logits) &&
          !core::overlap(out.topk_weights, logits),
      kOverlap, "topk_ids", "overlapping memory", "apart from topk_weights and the logits");
  if (!counts) return;
  FUSEDMOE_CHECK_FAULT(!core::overlap(counts, logits) && !core::overlap(counts, out.topk_ids) &&
                           !core::overlap(counts, out.topk_weights),
                       kOverlap, "expert_num_tokens", "overlapping memory", "in memory of its own");
}

void check_operand(const TensorView& view, const char* argument, const Shape& shape,
                   Stream stream) {
  const bool is_float =
      view.dtype() == DType::kF32 || view.dtype() == DType::kBF16 || view.dtype() == DType::kF16;
  FUSEDMOE_CHECK(view.defined() && is_float, argument, core::describe(view), "f32, bf16 or f16");
  core::check_tensor(view, argument, view.dtype(), shape);
  check_on_device(view, argument, stream);
}

}  // namespace

// A few tokens go to one block, which needs no cleared histogram. More tokens spread over the
// multiprocessors first (132 of them), then over the warps of a block.
RouteLaunch plan_route(const RouteParams& params) {
  constexpr std::int64_t kSharedBytes = 48 * 1024;
  constexpr std::int64_t kSingleBlockTokens = 32, kMultiprocessors = 132;
  constexpr std::int64_t kMaxWarps = 8, kMaxBlocks = 8 * kMultiprocessors;
  const std::int64_t num_tokens = params.num_tokens;
  const std::int64_t count_bytes = params.counts ? std::int64_t{4} * params.num_experts : 0;
  const std::int64_t warp_bytes = std::int64_t{4} * (params.num_experts + params.num_groups);
  const std::int64_t fitting_warps = (kSharedBytes - count_bytes) / warp_bytes;
  const bool single_block = params.counts && num_tokens <= kSingleBlockTokens;
  const std::int64_t wanted_warps =
      single_block ? num_tokens
                   : std::min((num_tokens + kMultiprocessors - 1) / kMultiprocessors, kMaxWarps);
  const std::int64_t warps = std::clamp<std::int64_t>(wanted_warps, 1, fitting_warps);
  const std::int64_t blocks =
      single_block ? 1 : std::min((num_tokens + warps - 1) / warps, kMaxBlocks);
  return {blocks, warps, count_bytes + warps * warp_bytes};
}

void route(const RouterConfig& config, const TensorView& logits, const TensorView& correction_bias,
           const Routing& out, const TensorView& expert_num_tokens, Stream stream) {
  check_route(config, logits, correction_bias, out, expert_num_tokens, stream);
  const std::int64_t num_tokens = logits.size(0);
  if (num_tokens == 0 && !expert_num_tokens) return;
  const bool drops_groups = config.num_expert_group > config.topk_group;
  RouteParams params{.logits = logits.as<const float>(),
                     .ids = out.topk_ids.as<std::int32_t>(),
                     .weights = out.topk_weights.as<float>(),
                     .num_tokens = num_tokens,
                     .num_experts = static_cast<int>(config.num_experts),
                     .topk = static_cast<int>(config.topk),
                     .num_groups = drops_groups ? static_cast<int>(config.num_expert_group) : 0,
                     .topk_group = static_cast<int>(config.topk_group),
                     .scoring = config.scoring,
                     .renormalize = config.renormalize,
                     .scaling_factor = config.routed_scaling_factor};
  if (correction_bias) params.bias = correction_bias.as<const float>();
  if (expert_num_tokens) params.counts = expert_num_tokens.as<std::int32_t>();
  launch_route(params, plan_route(params), stream);
}

void router_logits(const TensorView& weight, const TensorView& bias, const TensorView& x,
                   const TensorView& logits, Stream stream) {
  check_operand(weight, "router.weight", {-1, -1}, stream);
  const std::int64_t num_experts = weight.size(0), hidden = weight.size(1);
  FUSEDMOE_CHECK_FAULT(std::max(num_experts, hidden) <= std::numeric_limits<int>::max() / 2, kShape,
                       "router.weight", core::describe(weight),
                       "of less than 2^30 rows and columns");
  check_operand(x, "hidden_states", {-1, hidden}, stream);
  const std::int64_t num_tokens = x.size(0);
  if (bias) check_operand(bias, "router.bias", {num_experts}, stream);
  core::check_tensor(logits, "router_logits", DType::kF32, {num_tokens, num_experts});
  check_on_device(logits, "router_logits", stream);
  FUSEDMOE_CHECK_FAULT(!core::overlap(x, logits), kOverlap, "router_logits",
                       "overlapping hidden_states", "in memory of its own");
  if (num_tokens == 0 || num_experts == 0) return;
  LogitsParams params{.x = {x.data(), x.dtype()},
                      .weight = {weight.data(), weight.dtype()},
                      .logits = logits.as<float>(),
                      .num_tokens = num_tokens,
                      .num_experts = static_cast<int>(num_experts),
                      .hidden = static_cast<int>(hidden)};
  if (bias) params.bias = {bias.data(), bias.dtype()};
  launch_router_logits(params, stream);
}

void build_bitmatrix(const TensorView& topk_ids, const TensorView& expert_map,
                     std::int64_t num_local_experts, const TensorView& bitmatrix, Stream stream) {
  core::check_tensor(topk_ids, "topk_ids", DType::kI32, {-1, -1});
  if (expert_map) core::check_tensor(expert_map, "expert_map", DType::kI32, {-1});
  FUSEDMOE_CHECK(
      num_local_experts >= 1 && num_local_experts < std::numeric_limits<std::int32_t>::max(),
      "num_local_experts", core::to_string(num_local_experts), "in [1, 2^31 - 1)");
  const std::int64_t num_tokens = topk_ids.size(0), num_words = (num_local_experts + 31) / 32;
  core::check_tensor(bitmatrix, "bitmatrix", DType::kI32, {num_tokens, num_words});
  check_on_device(topk_ids, "topk_ids", stream);
  check_on_device(expert_map, "expert_map", stream);
  check_on_device(bitmatrix, "bitmatrix", stream);
  FUSEDMOE_CHECK_FAULT(!core::overlap(bitmatrix, topk_ids), kOverlap, "bitmatrix",
                       "overlapping topk_ids", "in memory of its own");
  if (num_tokens == 0) return;
  const BitmatrixParams params{.ids = topk_ids.as<const std::int32_t>(),
                               .local_expert = {expert_map, num_local_experts},
                               .bits = bitmatrix.as<std::uint32_t>(),
                               .num_tokens = num_tokens,
                               .num_words = num_words,
                               .topk = topk_ids.size(1)};
  launch_bitmatrix(params, stream);
}

}  // namespace fusedmoe::cuda
