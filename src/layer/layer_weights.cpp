#include "layer/layer_weights.h"

#include <algorithm>

#include "core/check.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "layer/checks.h"
#include "moe/experts_args.h"

namespace fusedmoe {

std::int64_t LayerWeights::hidden() const {
  const bool wider = latent && latent->down && latent->down.rank() == 2;
  return wider ? latent->down.size(1) : experts.hidden;
}

}  // namespace fusedmoe

namespace fusedmoe::layer {
namespace {

void check_parameter(const Tensor& tensor, const char* name, const Shape& shape) {
  FUSEDMOE_CHECK_FAULT(
      tensor.defined() && core::is_activation_dtype(tensor.dtype()) && tensor.shape() == shape,
      kDType, name, core::describe(tensor), core::format("f32, bf16 or f16 {}", to_string(shape)));
}

void check_router_weights(const LayerWeights& weights) {
  const std::int64_t num_choices = weights.router.num_choices();
  const RouterWeights& router = weights.router_weights;
  if (router.weight) {
    check_parameter(router.weight, "router_weights.weight", {num_choices, weights.hidden()});
  }
  if (router.bias) check_parameter(router.bias, "router_weights.bias", {num_choices});
  if (router.score_correction_bias) {
    core::check_tensor(router.score_correction_bias, "router_weights.score_correction_bias",
                       DType::kF32, {num_choices});
  }
}

void check_latent(const LayerWeights& weights) {
  const auto& [down, up] = *weights.latent;
  const std::int64_t width = weights.experts.hidden;
  check_parameter(down, "latent.down", {width, down && down.rank() == 2 ? down.size(1) : -1});
  check_parameter(up, "latent.up", {down.size(1), width});
}

MoeConfig shared_config(const ExpertWeights& experts, const LayerOptions& options) {
  MoeConfig config = moe_config(experts, 1, options.dtype, options.device);
  config.batch_invariant = options.batch_invariant;
  return config;
}

}  // namespace

Tensor own(const Tensor& tensor, Device device) {
  if (!tensor) return {};
  const Tensor host = to_device(tensor, {});
  const Tensor result = Tensor::empty(tensor.shape(), tensor.dtype());
  if (tensor.dtype() == DType::kI32) {
    copy(host, result, {});
  } else {
    convert(host, result);
  }
  return to_device(result, device);
}

void check_weights(const LayerWeights& weights, bool reads_scales) {
  weights.router.validate();
  core::check_weights(weights.experts, reads_scales);
  if (weights.latent) check_latent(weights);
  const std::int64_t num_experts = weights.router.num_experts, hidden = weights.hidden();
  if (weights.expert_map) {
    core::check_tensor(weights.expert_map, "expert_map", DType::kI32, {num_experts});
    layer::check_expert_map(to_device(weights.expert_map, {}), weights.experts.num_experts());
  } else {
    FUSEDMOE_CHECK(
        weights.experts.num_experts() == num_experts, "experts",
        core::format("{} experts", weights.experts.num_experts()),
        core::format("{}, as router.num_experts, or given with an expert_map", num_experts));
  }
  check_router_weights(weights);
  if (!weights.shared_experts) return;
  const SharedExperts& shared = *weights.shared_experts;
  shared.weights.validate();
  FUSEDMOE_CHECK(shared.weights.num_experts() == 1 && shared.weights.hidden == hidden,
                 "shared_experts",
                 core::format("{} experts of hidden size {}", shared.weights.num_experts(),
                              shared.weights.hidden),
                 core::format("1 expert of hidden size {}", hidden));
  if (shared.gate) check_parameter(shared.gate, "shared_experts.gate", {1, hidden});
}

std::vector<InputScale> static_input_scales(ExpertWeights& weights) {
  const std::optional<QuantKey>& key = weights.scheme.activations;
  if (!key || key->dynamic || key->group != GroupShape{-1, -1}) return {};
  std::vector<InputScale> scales;
  for (ExpertMatrices& expert : weights.experts) {
    scales.push_back({&expert.gate.input_scale, 0});
    if (expert.up.values) scales.push_back({&expert.up.input_scale, 0});
    scales.push_back({&expert.down.input_scale, 1});
  }
  return scales;
}

void set_input_scales(ExpertWeights& weights, const std::array<float, 2>& scales) {
  const Tensor host = Tensor::empty({2, 1}, DType::kF32);
  std::copy(scales.begin(), scales.end(), host.as<float>());
  const Tensor there = to_device(host, weights.device());
  weights.owners.push_back(there.owner());
  for (const auto& [scale, gemm] : static_input_scales(weights)) *scale = there.select(0, gemm);
}

MoeConfig layer_config(const LayerWeights& weights, const LayerOptions& options) {
  MoeConfig config =
      moe_config(weights.experts, weights.router.topk, options.dtype, options.device);
  config.num_experts = weights.router.num_experts;
  config.has_expert_map = weights.expert_map.defined();
  config.apply_router_weight_on_input = weights.router.apply_router_weight_on_input;
  // Experts between projections do not see what the router sees.
  if (weights.router_weights.weight && !weights.latent) {
    config.routing_method = routing_method(weights.router);
  }
  config.batch_invariant = options.batch_invariant;
  config.hooks = options.hooks;
  config.parallel = options.parallel;
  config.combine = options.ranks.combine.value_or(CombineMode::kPerRank);
  config.dispatch_dtype = options.ranks.dispatch_dtype;
  return config;
}

namespace {

/// select(), whose refusals of a scheme begin with what says it.
Selection select_for(const ExpertWeights& weights, std::string_view whose, const MoeConfig& config,
                     std::string_view require) {
  try {
    return select(config, require);
  } catch (const Error& error) {
    if (error.reason() != Reason::kQuantScheme || weights.scheme_source.empty()) throw;
    throw Error::unsupported(Reason::kQuantScheme, weights.scheme_source,
                             core::format("{} gives the {} a scheme that is not served here: {}",
                                          weights.scheme_source, whose, error.what()));
  }
}

}  // namespace

Selection select_routed(const LayerWeights& weights, const LayerOptions& options) {
  MoeConfig config = layer_config(weights, options);
  if (options.plan.empty()) {
    // Only some transports bring the router logits that monolithic experts need: so choose as for
    // those. The selection then stays modular, as the layer makes monolithic experts beside it.
    config.monolithic = options.monolithic && options.parallel.needs_dispatch();
    Selection selection = select_for(weights.experts, "experts", config, options.require);
    selection.config.monolithic = false;
    return selection;
  }
  if (!options.require.empty()) {
    throw Error::conflict("options.require", "options.plan", "the plan says what runs");
  }
  const Plan plan = Plan::parse(options.plan);
  FUSEDMOE_CHECK(
      plan.shared_experts.empty() == !weights.shared_experts, "plan.shared_experts",
      core::format("\"{}\"", plan.shared_experts),
      weights.shared_experts ? "set: the layer has shared experts" : "absent: the layer has none");
  return select(config, plan);
}

Selection select_shared(const ExpertWeights& weights, const LayerOptions& options,
                        const Selection& routed) {
  const MoeConfig config = shared_config(weights, options);
  if (!options.plan.empty()) {
    const Plan plan = Plan::parse(options.plan);
    FUSEDMOE_CHECK(plan.shared_scheme == name(config.scheme), "plan.shared_scheme",
                   core::format("\"{}\"", plan.shared_scheme),
                   core::format("\"{}\", that of the weights", name(config.scheme)));
    return select(config, plan.shared_experts);
  }
  return select_for(
      weights, "shared experts", config,
      options.require.empty() ? std::string() : core::format("{}+no_ep", routed.experts->name()));
}

}  // namespace fusedmoe::layer
