// RouterConfig: validation and names.
#include <cmath>

#include "core/check.h"
#include "fusedmoe/router.h"

namespace fusedmoe {

void RouterConfig::validate() const {
  FUSEDMOE_CHECK(num_experts >= 1 && num_experts <= kMaxExperts, "router.num_experts",
                 core::to_string(num_experts), core::format("in [1, {}]", kMaxExperts));
  FUSEDMOE_CHECK(num_zero_experts >= 0 && num_zero_experts <= kMaxExperts - num_experts,
                 "router.num_zero_experts", core::to_string(num_zero_experts),
                 core::format("in [0, {}]", kMaxExperts - num_experts));
  FUSEDMOE_CHECK(topk >= 1 && topk <= num_choices(), "router.topk", core::to_string(topk),
                 core::format("in [1, {}], the number of experts", num_choices()));
  FUSEDMOE_CHECK(!name(scoring).empty(), "router.scoring",
                 core::to_string(static_cast<int>(scoring)), "a ScoringFunc");
  FUSEDMOE_CHECK(std::isfinite(routed_scaling_factor), "router.routed_scaling_factor",
                 core::to_string(routed_scaling_factor), "finite");
  FUSEDMOE_CHECK(std::isfinite(renormalize_epsilon) && renormalize_epsilon >= 0,
                 "router.renormalize_epsilon", core::to_string(renormalize_epsilon),
                 "finite and not negative");
  if (apply_router_weight_on_input && topk != 1) {
    throw Error::conflict("router.apply_router_weight_on_input", core::format("topk {}", topk),
                          "one row cannot have several weights");
  }
  FUSEDMOE_CHECK(std::isfinite(sparsemixer_jitter) && sparsemixer_jitter >= 0,
                 "router.sparsemixer_jitter", core::to_string(sparsemixer_jitter),
                 "finite and not negative");
  FUSEDMOE_CHECK(scoring != ScoringFunc::kSparsemixer || num_expert_group == 0,
                 "router.num_expert_group", core::to_string(num_expert_group), "0 for sparsemixer");
  FUSEDMOE_CHECK(num_expert_group >= 0, "router.num_expert_group",
                 core::to_string(num_expert_group), "0 (no groups) or more");
  if (num_expert_group == 0) return;
  FUSEDMOE_CHECK(num_choices() % num_expert_group == 0, "router.num_expert_group",
                 core::to_string(num_expert_group),
                 core::format("a divisor of {}, the number of experts", num_choices()));
  FUSEDMOE_CHECK(topk_group >= 1 && topk_group <= num_expert_group, "router.topk_group",
                 core::to_string(topk_group),
                 core::format("in [1, num_expert_group = {}]", num_expert_group));
  const std::int64_t candidates = topk_group * (num_choices() / num_expert_group);
  FUSEDMOE_CHECK(topk <= candidates, "router.topk", core::to_string(topk),
                 core::format("at most {}, the experts in {} of {} groups", candidates, topk_group,
                              num_expert_group));
}

RoutingMethod routing_method(const RouterConfig& config) {
  if (config.num_zero_experts > 0) return RoutingMethod::kNone;
  return config.custom ? RoutingMethod::kCustom : RoutingMethod::kRouter;
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
    case ScoringFunc::kSparsemixer:
      return "sparsemixer";
  }
  return {};
}

}  // namespace fusedmoe
