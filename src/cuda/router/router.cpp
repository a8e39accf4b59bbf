// The router and the bit matrix on a CUDA device: checks of the arguments, and how many blocks
// share the work.
#include "cuda/router/router.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "cuda/device/properties.h"
#include "cuda/router/kernels.h"
#include "moe/check_args.h"

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

void check_operand(const TensorView& view, const char* argument, const Shape& shape,
                   Stream stream) {
  core::check_activation_dtype(view, argument);
  core::check_tensor(view, argument, view.dtype(), shape);
  check_on_device(view, argument, stream);
}

/// One row of a matrix whose rows may have a stride, or the view itself, for check_operand().
TensorView first_row(const TensorView& view) {
  return view.defined() && view.rank() == 2 && view.size(0) > 1 && view.stride(0) >= view.size(1)
             ? view.slice(0, 0, 1)
             : view;
}

}  // namespace

RouteParams check_route(const RouterConfig& config, const TensorView& logits,
                        const TensorView& bias, const Routing& out, const TensorView& load,
                        Stream stream) {
  config.validate();
  const std::int64_t num_choices = config.num_choices();
  core::check_custom_routing(config, stream.device);
  FUSEDMOE_CHECK_SUPPORTED(num_choices <= kMaxRouterExperts, kShape, "router.num_experts",
                           core::to_string(num_choices),
                           core::format("at most {} on a CUDA device", kMaxRouterExperts));
  FUSEDMOE_CHECK_SUPPORTED(config.topk <= kMaxRouterTopk, kShape, "router.topk",
                           core::to_string(config.topk),
                           core::format("at most {} on a CUDA device", kMaxRouterTopk));
  check_operand(logits, "router_logits", {-1, num_choices}, stream);
  const std::int64_t num_tokens = logits.size(0);
  core::check_tensor(out.topk_ids, "topk_ids", DType::kI32, {num_tokens, config.topk});
  core::check_tensor(out.topk_weights, "topk_weights", DType::kF32, {num_tokens, config.topk});
  if (bias) core::check_tensor(bias, "score_correction_bias", DType::kF32, {num_choices});
  if (load) core::check_tensor(load, "expert_load", DType::kI32, {num_choices});
  check_on_device(bias, "score_correction_bias", stream);
  check_on_device(out.topk_ids, "topk_ids", stream);
  check_on_device(out.topk_weights, "topk_weights", stream);
  check_on_device(load, "expert_load", stream);
  core::check_apart(out.topk_ids, "topk_ids", out.topk_weights, "topk_weights");
  core::check_apart(out.topk_ids, "topk_ids", logits, "router_logits");
  core::check_apart(out.topk_weights, "topk_weights", logits, "router_logits");
  if (load) {
    core::check_apart(load, "expert_load", logits, "router_logits");
    core::check_apart(load, "expert_load", out.topk_ids, "topk_ids");
    core::check_apart(load, "expert_load", out.topk_weights, "topk_weights");
  }
  const bool drops_groups = config.num_expert_group > config.topk_group;
  return {.logits = {logits.data(), logits.dtype()},
          .bias = bias ? bias.as<const float>() : nullptr,
          .ids = out.topk_ids.as<std::int32_t>(),
          .weights = out.topk_weights.as<float>(),
          .counts = load ? load.as<std::int32_t>() : nullptr,
          .num_tokens = num_tokens,
          .num_experts = static_cast<int>(num_choices),
          .topk = static_cast<int>(config.topk),
          .num_groups = drops_groups ? static_cast<int>(config.num_expert_group) : 0,
          .topk_group = static_cast<int>(config.topk_group),
          .scoring = config.scoring,
          .sparsemixer_jitter = config.sparsemixer_jitter,
          .renormalize = config.renormalize,
          .renormalize_epsilon = config.renormalize_epsilon,
          .scaling_factor = config.routed_scaling_factor};
}

// A few tokens go to one block, which needs no cleared histogram. More tokens spread over the
// multiprocessors first, then over the warps of a block.
RouteLaunch route_launch_of(const RouteParams& params, Device device) {
  constexpr std::int64_t kSharedBytes = 48 * 1024;
  constexpr std::int64_t kSingleBlockTokens = 32, kMaxWarps = 8, kBlocksOfMultiprocessor = 8;
  const std::int64_t multiprocessors = multiprocessor_count(device);
  const std::int64_t num_tokens = params.num_tokens;
  const std::int64_t count_bytes = params.counts ? std::int64_t{4} * params.num_experts : 0;
  const std::int64_t warp_bytes = std::int64_t{4} * (params.num_experts + params.num_groups);
  const std::int64_t fitting_warps = (kSharedBytes - count_bytes) / warp_bytes;
  const bool single_block = params.counts && num_tokens <= kSingleBlockTokens;
  const std::int64_t wanted_warps =
      single_block ? num_tokens
                   : std::min((num_tokens + multiprocessors - 1) / multiprocessors, kMaxWarps);
  const std::int64_t warps = std::clamp<std::int64_t>(wanted_warps, 1, fitting_warps);
  const std::int64_t blocks = single_block ? 1
                                           : std::min((num_tokens + warps - 1) / warps,
                                                      kBlocksOfMultiprocessor * multiprocessors);
  return {blocks, warps, count_bytes + warps * warp_bytes};
}

void route(const RouterConfig& config, const TensorView& logits, const TensorView& correction_bias,
           const Routing& out, const TensorView& expert_load, Stream stream) {
  const RouteParams params = check_route(config, logits, correction_bias, out, expert_load, stream);
  if (params.num_tokens == 0) return;
  launch_route(params, route_launch_of(params, stream.device), stream);
  if (params.scoring == ScoringFunc::kSparsemixer) launch_near_weights(params, stream);
}

LogitsParams check_router_logits(const TensorView& weight, const TensorView& bias,
                                 const TensorView& x, const TensorView& logits, Stream stream) {
  check_operand(weight, "router.weight", {-1, -1}, stream);
  const std::int64_t num_experts = weight.size(0), hidden = weight.size(1);
  FUSEDMOE_CHECK_FAULT(std::max(num_experts, hidden) <= std::numeric_limits<int>::max() / 2, kShape,
                       "router.weight", core::describe(weight),
                       "of less than 2^30 rows and columns");
  check_operand(first_row(x), "hidden_states", {-1, hidden}, stream);
  const std::int64_t num_tokens = x.size(0), x_stride = num_tokens > 1 ? x.stride(0) : hidden;
  FUSEDMOE_CHECK_FAULT(x_stride < 1 << 26, kLayout, "hidden_states",
                       core::format("rows {} apart", x_stride),
                       "of rows less than 2^26 elements apart");
  if (bias) check_operand(bias, "router.bias", {num_experts}, stream);
  core::check_tensor(logits, "router_logits", DType::kF32, {num_tokens, num_experts});
  check_on_device(logits, "router_logits", stream);
  core::check_apart(logits, "router_logits", x, "hidden_states");
  LogitsParams params{.x = {x.data(), x.dtype()},
                      .weight = {weight.data(), weight.dtype()},
                      .bias = {},
                      .logits = logits.as<float>(),
                      .num_tokens = num_tokens,
                      .num_experts = static_cast<int>(num_experts),
                      .hidden = static_cast<int>(hidden),
                      .x_stride = static_cast<unsigned>(x_stride)};
  if (bias) params.bias = {bias.data(), bias.dtype()};
  return params;
}

void router_logits(const TensorView& weight, const TensorView& bias, const TensorView& x,
                   const TensorView& logits, Stream stream) {
  const LogitsParams params = check_router_logits(weight, bias, x, logits, stream);
  if (params.num_tokens > 0 && params.num_experts > 0) launch_router_logits(params, stream);
}

}  // namespace fusedmoe::cuda
