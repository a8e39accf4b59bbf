// RouterConfig: validation and names. And the router's second half: logits (num_tokens,
// num_choices)
// -> top-k ids and weights, fp32.
//
// One token at a time: score, add the correction bias, drop the losing groups, choose, weight.
// Choosing is a partial sort of 64-bit keys that hold score and index, so ties need no second
// thought. Checked against src/reference/router.cpp. The same on every
// processor.
#include "moe/router.h"

#include <algorithm>
#include <array>
#include <bit>
#include <bitset>
#include <cmath>
#include <functional>
#include <limits>

#include "core/check.h"
#include "core/parallel.h"
#include "fusedmoe/quant.h"
#include "moe/check_args.h"

namespace fusedmoe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::size_t kMaxExperts = RouterConfig::kMaxExperts;

bool selects_on_logits(ScoringFunc scoring) {
  return scoring == ScoringFunc::kTopkSoftmax || scoring == ScoringFunc::kTopkSigmoid ||
         scoring == ScoringFunc::kLogits || scoring == ScoringFunc::kSparsemixer;
}

/// Larger for a higher score, then for a lower index. -0 counts as 0.
std::uint64_t sort_key(float score, std::int64_t index) {
  const auto bits = std::bit_cast<std::uint32_t>(score + 0.0f);
  const std::uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return std::uint64_t{ordered} << 32 | (0xffffffffu - static_cast<std::uint32_t>(index));
}

std::int32_t index_of(std::uint64_t key) {
  return static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(key));
}

float sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

/// Routes one token. Holds its scores; about 50 KB, for the stack of the thread that uses it.
class TokenRouter {
 public:
  TokenRouter(const RouterConfig& config, const float* bias) : config_(config), bias_(bias) {}

  void route(const float* logits, std::int32_t* ids, float* weights) {
    compute_scores(logits);
    const std::int64_t num_candidates = collect_candidates();
    keep_best(num_candidates, config_.topk);
    for (std::int64_t j = 0; j < config_.topk; ++j) {
      ids[j] = index_of(keys_[j]);
      weights[j] = scores_[ids[j]];
    }
    if (config_.scoring == ScoringFunc::kSparsemixer) weigh_near_experts(weights);
    compute_weights(weights);
  }

 private:
  void compute_scores(const float* logits) {
    const std::int64_t count = config_.num_choices();
    switch (config_.scoring) {
      case ScoringFunc::kSoftmax:
        softmax(logits, count, scores_.data());
        break;
      case ScoringFunc::kSigmoid:
        for (std::int64_t e = 0; e < count; ++e) scores_[e] = sigmoid(logits[e]);
        break;
      case ScoringFunc::kSqrtSoftplus:
        for (std::int64_t e = 0; e < count; ++e) {
          const float l = logits[e];
          scores_[e] = std::sqrt(std::max(l, 0.0f) + std::log1p(std::exp(-std::abs(l))));
        }
        break;
      case ScoringFunc::kTopkSoftmax:
      case ScoringFunc::kTopkSigmoid:
      case ScoringFunc::kLogits:
      case ScoringFunc::kSparsemixer:
        std::copy(logits, logits + count, scores_.begin());
        break;
    }
    const float substitute = selects_on_logits(config_.scoring) ? -kInfinity : 0;
    for (std::int64_t e = 0; e < count; ++e) {
      if (!std::isfinite(scores_[e])) scores_[e] = substitute;
    }
  }

  static void softmax(const float* logits, std::int64_t count, float* out) {
    const float largest = *std::max_element(logits, logits + count);
    double sum = 0;  // so that thousands of experts cost no accuracy
    for (std::int64_t i = 0; i < count; ++i) {
      out[i] = std::exp(logits[i] - largest);
      sum += out[i];
    }
    for (std::int64_t i = 0; i < count; ++i) out[i] /= static_cast<float>(sum);
  }

  /// What experts are chosen and ordered by. A NaN (of the bias) loses against everything.
  float choice(std::int64_t expert) const {
    const float score = bias_ ? scores_[expert] + bias_[expert] : scores_[expert];
    return std::isnan(score) ? -kInfinity : score;
  }

  /// Fills keys_ with the experts of the groups kept; returns how many.
  std::int64_t collect_candidates() {
    const std::int64_t num_groups = config_.num_expert_group;
    if (num_groups == 0) {
      for (std::int64_t e = 0; e < config_.num_choices(); ++e) keys_[e] = sort_key(choice(e), e);
      return config_.num_choices();
    }
    const std::int64_t group_size = config_.num_choices() / num_groups;
    for (std::int64_t g = 0; g < num_groups; ++g) {
      keys_[g] = sort_key(group_score(g * group_size, group_size), g);
    }
    std::nth_element(keys_.begin(), keys_.begin() + (config_.topk_group - 1),
                     keys_.begin() + num_groups, std::greater<>());
    std::bitset<kMaxExperts> kept;
    for (std::int64_t i = 0; i < config_.topk_group; ++i) kept.set(index_of(keys_[i]));
    std::int64_t count = 0;
    for (std::int64_t g = 0; g < num_groups; ++g) {
      if (!kept.test(g)) continue;
      for (std::int64_t e = g * group_size; e < (g + 1) * group_size; ++e) {
        keys_[count++] = sort_key(choice(e), e);
      }
    }
    return count;
  }

  float group_score(std::int64_t first, std::int64_t size) const {
    float best = -kInfinity, second = -kInfinity;
    for (std::int64_t e = first; e < first + size; ++e) {
      const float score = choice(e);
      if (score > best) {
        second = best;
        best = score;
      } else if (score > second) {
        second = score;
      }
    }
    if (!bias_ || size == 1) return best;
    const float sum = best + second;
    return std::isnan(sum) ? -kInfinity : sum;
  }

  void keep_best(std::int64_t count, std::int64_t topk) {
    std::partial_sort(keys_.begin(), keys_.begin() + topk, keys_.begin() + count, std::greater<>());
  }

  /// kSparsemixer: from the logits of the chosen experts to their weights, in place. keys_ holds
  /// all experts, first the chosen ones in their order.
  void weigh_near_experts(float* weights) const {
    for (std::int64_t j = 0; j < config_.topk; ++j) {
      const float largest = weights[j];
      double sum = 0;
      for (std::int64_t i = j; i < config_.num_choices(); ++i) {
        const float x = scores_[index_of(keys_[i])];
        if (x == -kInfinity) continue;
        const float distance = (largest - x) / std::max(std::abs(x), largest);
        if (!(distance > 2 * config_.sparsemixer_jitter)) sum += std::exp(x - largest);
      }
      weights[j] = largest == -kInfinity ? 0 : static_cast<float>(1 / sum);
    }
  }

  /// From the scores of the chosen experts to their weights, in place.
  void compute_weights(float* weights) const {
    const std::int64_t topk = config_.topk;
    switch (config_.scoring) {
      case ScoringFunc::kTopkSoftmax:
        if (*std::max_element(weights, weights + topk) == -kInfinity) {
          std::fill(weights, weights + topk, 0.0f);
        } else {
          softmax(weights, topk, weights);
        }
        break;
      case ScoringFunc::kTopkSigmoid:
        for (std::int64_t j = 0; j < topk; ++j) weights[j] = sigmoid(weights[j]);
        break;
      case ScoringFunc::kLogits:
        std::replace(weights, weights + topk, -kInfinity, 0.0f);
        break;
      case ScoringFunc::kSoftmax:
      case ScoringFunc::kSigmoid:
      case ScoringFunc::kSqrtSoftplus:
      case ScoringFunc::kSparsemixer:
        break;
    }
    if (config_.renormalize) {
      double sum = 0;
      for (std::int64_t j = 0; j < topk; ++j) sum += weights[j];
      const auto divisor = static_cast<float>(sum + config_.renormalize_epsilon);
      for (std::int64_t j = 0; j < topk; ++j) weights[j] /= divisor;
    }
    if (config_.routed_scaling_factor != 1) {
      for (std::int64_t j = 0; j < topk; ++j) weights[j] *= config_.routed_scaling_factor;
    }
  }

  const RouterConfig& config_;
  const float* bias_;
  std::array<float, kMaxExperts> scores_;
  std::array<std::uint64_t, kMaxExperts> keys_;
};

void route_custom(const RouterConfig& config, const TensorView& logits, const Routing& out) {
  config.custom(logits, out.topk_ids, out.topk_weights);
  const auto* ids = out.topk_ids.as<const std::int32_t>();
  for (std::int64_t i = 0; i < out.topk_ids.numel(); ++i) {
    if (ids[i] < -1 || ids[i] >= config.num_choices()) {
      throw Error::invalid("router.custom",
                           core::format("router.custom returned the id {} in slot {}: ids are in "
                                        "[-1, {})",
                                        ids[i], i, config.num_choices()));
    }
  }
}

}  // namespace

void core::route(Executor& executor, const RouterConfig& config, const TensorView& logits,
                 const TensorView& correction_bias, const Routing& out) {
  config.validate();
  const bool wide = logits.defined() && logits.dtype() == DType::kF32;
  core::check_activation_dtype(logits, "router_logits");
  FUSEDMOE_CHECK(wide || !config.custom, "router_logits", core::describe(logits),
                 "f32 for a custom routing");
  core::check_tensor(logits, "router_logits", logits.dtype(), {-1, config.num_choices()});
  const std::int64_t num_tokens = logits.size(0);
  core::check_tensor(out.topk_ids, "topk_ids", DType::kI32, {num_tokens, config.topk});
  core::check_tensor(out.topk_weights, "topk_weights", DType::kF32, {num_tokens, config.topk});
  if (correction_bias) {
    core::check_tensor(correction_bias, "score_correction_bias", DType::kF32,
                       {config.num_choices()});
  }
  for (const TensorView& view : {logits, correction_bias, out.topk_ids, out.topk_weights}) {
    FUSEDMOE_CHECK_FAULT(view.device().is_cpu(), kDevice, "router_logits.device",
                         to_string(view.device()), "cpu, as every tensor of route()");
  }
  core::check_apart(out.topk_ids, "topk_ids", out.topk_weights, "topk_weights");
  core::check_apart(out.topk_ids, "topk_ids", logits, "router_logits");
  core::check_apart(out.topk_weights, "topk_weights", logits, "router_logits");
  if (config.custom) {
    route_custom(config, logits, out);
    return;
  }

  const auto* bias = correction_bias ? correction_bias.as<const float>() : nullptr;
  auto* ids = out.topk_ids.as<std::int32_t>();
  auto* weights = out.topk_weights.as<float>();
  // A few thousand scores cost less than waking the threads.
  const bool worthwhile = num_tokens * config.num_choices() >= 8192;
  core::parallel_ranges(
      executor, num_tokens, worthwhile, [&](std::int64_t begin, std::int64_t end) {
        TokenRouter router(config, bias);
        std::array<float, kMaxExperts> widened;
        for (std::int64_t t = begin; t < end; ++t) {
          const std::int64_t first = t * config.num_choices();
          const float* row = wide ? logits.as<const float>() + first : widened.data();
          for (std::int64_t e = 0; !wide && e < config.num_choices(); ++e) {
            widened[static_cast<std::size_t>(e)] =
                load_f32(logits.data(), logits.dtype(), first + e);
          }
          router.route(row, ids + t * config.topk, weights + t * config.topk);
        }
      });
}

void route(const RouterConfig& config, const TensorView& logits, const TensorView& correction_bias,
           const Routing& out) {
  core::route(default_executor(), config, logits, correction_bias, out);
}

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
