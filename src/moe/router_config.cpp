// RouterConfig: validation, names, and the routing method that its flags amount to.
#include <cmath>

#include "core/check.h"
#include "fusedmoe/router.h"

namespace fusedmoe {

void RouterConfig::validate() const {
  FUSEDMOE_CHECK(num_experts >= 1 && num_experts <= kMaxExperts, "router.num_experts",
                 core::to_string(num_experts), core::format("in [1, {}]", kMaxExperts));
  FUSEDMOE_CHECK(topk >= 1 && topk <= num_experts, "router.topk", core::to_string(topk),
                 core::format("in [1, num_experts = {}]", num_experts));
  FUSEDMOE_CHECK(!name(scoring).empty(), "router.scoring",
                 core::to_string(static_cast<int>(scoring)), "a ScoringFunc");
  FUSEDMOE_CHECK(std::isfinite(routed_scaling_factor), "router.routed_scaling_factor",
                 core::to_string(routed_scaling_factor), "finite");
  FUSEDMOE_CHECK(std::isfinite(renormalize_epsilon) && renormalize_epsilon >= 0,
                 "router.renormalize_epsilon", core::to_string(renormalize_epsilon),
                 "finite and not negative");
  FUSEDMOE_CHECK(!apply_router_weight_on_input || topk == 1, "router.apply_router_weight_on_input",
                 core::format("true with topk {}", topk), "false unless topk is 1");
  FUSEDMOE_CHECK(num_expert_group >= 0, "router.num_expert_group",
                 core::to_string(num_expert_group), "0 (no groups) or more");
  if (num_expert_group == 0) return;
  FUSEDMOE_CHECK(num_experts % num_expert_group == 0, "router.num_expert_group",
                 core::to_string(num_expert_group),
                 core::format("a divisor of num_experts = {}", num_experts));
  FUSEDMOE_CHECK(topk_group >= 1 && topk_group <= num_expert_group, "router.topk_group",
                 core::to_string(topk_group),
                 core::format("in [1, num_expert_group = {}]", num_expert_group));
  const std::int64_t candidates = topk_group * (num_experts / num_expert_group);
  FUSEDMOE_CHECK(topk <= candidates, "router.topk", core::to_string(topk),
                 core::format("at most {}, the experts in {} of {} groups", candidates, topk_group,
                              num_expert_group));
}

RoutingMethod routing_method(const RouterConfig& config, bool has_correction_bias) {
  if (config.custom) return RoutingMethod::kCustom;
  const bool grouped = config.num_expert_group > 0;
  const bool renormalize = config.renormalize;
  if (config.scoring == ScoringFunc::kSqrtSoftplus) {
    return renormalize && !grouped ? RoutingMethod::kDeepSeekV4 : RoutingMethod::kUnspecified;
  }
  if (has_correction_bias && config.scoring == ScoringFunc::kSigmoid && renormalize && grouped) {
    return RoutingMethod::kDeepSeekV3;
  }
  if (grouped || config.routed_scaling_factor != 1) return RoutingMethod::kUnspecified;
  if (has_correction_bias) {
    return config.scoring == ScoringFunc::kSigmoid && renormalize ? RoutingMethod::kMiniMax2
                                                                  : RoutingMethod::kUnspecified;
  }
  switch (config.scoring) {
    case ScoringFunc::kSoftmax:
      return renormalize ? RoutingMethod::kRenormalizeNaive : RoutingMethod::kDefault;
    case ScoringFunc::kSigmoid:
      return renormalize ? RoutingMethod::kSigmoidRenorm : RoutingMethod::kSigmoid;
    case ScoringFunc::kTopkSoftmax:
      return RoutingMethod::kRenormalize;
    case ScoringFunc::kTopkSigmoid:
      return config.topk == 1 && !renormalize ? RoutingMethod::kLlama4
                                              : RoutingMethod::kUnspecified;
    case ScoringFunc::kLogits:
      return renormalize ? RoutingMethod::kUnspecified : RoutingMethod::kTopK;
    case ScoringFunc::kSqrtSoftplus:
      break;
  }
  return RoutingMethod::kUnspecified;
}

std::string_view name(ScoringFunc scoring) {
  switch (scoring) {
    case ScoringFunc::kSoftmax:
      return "softmax";
    case ScoringFunc::kSigmoid:
      return "sigmoid";
    case ScoringFunc::kSqrtSoftplus:
      return "sqrtsoftplus";
    case ScoringFunc::kTopkSoftmax:
      return "topk_softmax";
    case ScoringFunc::kTopkSigmoid:
      return "topk_sigmoid";
    case ScoringFunc::kLogits:
      return "logits";
  }
  return {};
}

std::string_view name(RoutingMethod method) {
  switch (method) {
    case RoutingMethod::kDefault:
      return "default";
    case RoutingMethod::kRenormalize:
      return "renormalize";
    case RoutingMethod::kDeepSeekV3:
      return "deepseek_v3";
    case RoutingMethod::kLlama4:
      return "llama4";
    case RoutingMethod::kRenormalizeNaive:
      return "renormalize_naive";
    case RoutingMethod::kTopK:
      return "topk";
    case RoutingMethod::kSigmoidRenorm:
      return "sigmoid_renorm";
    case RoutingMethod::kMiniMax2:
      return "minimax2";
    case RoutingMethod::kSigmoid:
      return "sigmoid";
    case RoutingMethod::kDeepSeekV4:
      return "deepseek_v4";
    case RoutingMethod::kCustom:
      return "custom";
    case RoutingMethod::kUnspecified:
      return "unspecified";
  }
  return {};
}

}  // namespace fusedmoe
