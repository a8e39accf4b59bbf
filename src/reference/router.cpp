#include "reference/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "reference/activation.h"
#include "reference/matrix.h"

namespace fusedmoe::reference {
namespace {

constexpr double kNeverChosen = -std::numeric_limits<double>::infinity();

bool selects_on_logits(const RouterConfig& config) {
  return config.scoring == ScoringFunc::kTopkSoftmax ||
         config.scoring == ScoringFunc::kTopkSigmoid || config.scoring == ScoringFunc::kLogits ||
         config.scoring == ScoringFunc::kSparsemixer;
}

std::vector<double> softmax(const std::vector<double>& x) {
  const double largest = *std::max_element(x.begin(), x.end());
  std::vector<double> result;
  result.reserve(x.size());
  for (double value : x) result.push_back(std::exp(value - largest));
  const double sum = std::accumulate(result.begin(), result.end(), 0.0);
  for (double& value : result) value /= sum;
  return result;
}

std::vector<double> scores_of(const RouterConfig& config, std::span<const double> logits) {
  std::vector<double> scores(logits.begin(), logits.end());
  if (config.scoring == ScoringFunc::kSoftmax) scores = softmax(scores);
  for (double& score : scores) {
    if (config.scoring == ScoringFunc::kSigmoid) score = sigmoid(score);
    if (config.scoring == ScoringFunc::kSqrtSoftplus) {
      // log(1 + exp(x)) = x + log(1 + exp(-x)), the form that cannot overflow for large x.
      score =
          std::sqrt(score > 0 ? score + std::log1p(std::exp(-score)) : std::log1p(std::exp(score)));
    }
    if (!std::isfinite(score)) score = selects_on_logits(config) ? kNeverChosen : 0;
  }
  return scores;
}

/// Indices by descending score, then ascending index.
std::vector<std::int32_t> sorted_indices(const std::vector<double>& scores) {
  std::vector<std::int32_t> indices(scores.size());
  std::iota(indices.begin(), indices.end(), 0);
  std::stable_sort(indices.begin(), indices.end(),
                   [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });
  return indices;
}

/// True for the experts of the best topk_group groups; everywhere without groups.
std::vector<bool> candidates(const RouterConfig& config, const std::vector<double>& choice,
                             bool has_bias) {
  if (config.num_expert_group == 0) return std::vector<bool>(choice.size(), true);
  const std::int64_t size = config.num_choices() / config.num_expert_group;
  std::vector<double> group_scores;
  for (std::int64_t g = 0; g < config.num_expert_group; ++g) {
    std::vector<double> group(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    std::sort(group.rbegin(), group.rend());
    group_scores.push_back(has_bias && size > 1 ? group[0] + group[1] : group[0]);
  }
  std::vector<bool> result(choice.size(), false);
  const std::vector<std::int32_t> order = sorted_indices(group_scores);
  for (std::int64_t i = 0; i < config.topk_group; ++i) {
    for (std::int64_t e = order[i] * size; e < (order[i] + 1) * size; ++e) result[e] = true;
  }
  return result;
}

/// The softmax of a chosen logit over those near it, without the ones chosen before.
std::vector<double> near_weights(const RouterConfig& config, std::vector<double> logits,
                                 const std::vector<std::int32_t>& ids) {
  std::vector<double> weights;
  for (const std::int32_t id : ids) {
    const double largest = logits[id];
    double sum = 0;
    for (const double x : logits) {
      const double distance = (largest - x) / std::max(std::abs(x), largest);
      if (std::isfinite(x) && !(distance > 2 * config.sparsemixer_jitter)) {
        sum += std::exp(x - largest);
      }
    }
    weights.push_back(std::isfinite(largest) ? 1 / sum : 0);
    logits[id] = kNeverChosen;
  }
  return weights;
}

std::vector<double> weights_of(const RouterConfig& config, std::vector<double> chosen) {
  if (config.scoring == ScoringFunc::kTopkSoftmax) {
    const bool none = *std::max_element(chosen.begin(), chosen.end()) == kNeverChosen;
    chosen = none ? std::vector<double>(chosen.size(), 0) : softmax(chosen);
  }
  double sum = 0;
  for (double& weight : chosen) {
    if (config.scoring == ScoringFunc::kTopkSigmoid) weight = sigmoid(weight);
    if (weight == kNeverChosen) weight = 0;
    sum += weight;
  }
  for (double& weight : chosen) {
    if (config.renormalize) weight /= sum + config.renormalize_epsilon;
    weight *= config.routed_scaling_factor;
  }
  return chosen;
}

}  // namespace

double router_logit(const RouterWeights& weights, const TensorView& x, std::int64_t token,
                    std::int64_t expert) {
  WeightMatrix matrix;
  matrix.values = weights.weight;
  matrix.bias = weights.bias;
  QuantKey key;
  key.value = weights.weight.dtype();
  double sum = 0;
  for (std::int64_t i = 0; i < x.size(1); ++i) {
    sum += load(x.data(), x.dtype(), token * x.stride(0) + i * x.stride(1)) *
           element(matrix, key, expert, i);
  }
  return sum + bias(matrix, expert);
}

std::vector<double> router_logits(const RouterWeights& weights, const TensorView& x,
                                  std::int64_t token) {
  std::vector<double> logits;
  for (std::int64_t e = 0; e < weights.weight.size(0); ++e) {
    logits.push_back(router_logit(weights, x, token, e));
  }
  return logits;
}

RoutedToken route_token(const RouterConfig& config, std::span<const double> logits,
                        std::span<const float> correction_bias) {
  const std::vector<double> scores = scores_of(config, logits);
  RoutedToken result;
  result.choice = scores;
  for (std::size_t e = 0; e < correction_bias.size(); ++e) result.choice[e] += correction_bias[e];
  const std::vector<bool> candidate = candidates(config, result.choice, !correction_bias.empty());
  std::vector<double> chosen;
  for (std::int32_t e : sorted_indices(result.choice)) {
    if (!candidate[e] || std::ssize(result.ids) == config.topk) continue;
    result.ids.push_back(e);
    chosen.push_back(scores[e]);
  }
  if (config.scoring == ScoringFunc::kSparsemixer) {
    chosen = near_weights(config, scores, result.ids);
  }
  result.weights = weights_of(config, chosen);
  return result;
}

}  // namespace fusedmoe::reference
