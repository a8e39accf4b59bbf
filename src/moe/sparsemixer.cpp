#include "moe/sparsemixer.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fusedmoe {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Choice {
  std::int32_t id;
  float weight;
};

/// The best of the experts but `excluded`; -1 excludes none.
Choice choose(const float* logits, std::int64_t count, std::int32_t excluded, float jitter) {
  const auto logit = [&](std::int64_t e) {
    return e != excluded && std::isfinite(logits[e]) ? logits[e] : kNothing;
  };
  std::int32_t best = excluded == 0 ? 1 : 0;
  for (std::int32_t e = 0; e < count; ++e) {
    if (logit(e) > logit(best)) best = e;
  }
  const float largest = logit(best);
  if (largest == kNothing) return {best, 0};
  double sum = 0;
  for (std::int64_t e = 0; e < count; ++e) {
    const float x = logit(e);
    if (x == kNothing || (largest - x) / std::max(std::abs(x), largest) > 2 * jitter) continue;
    sum += std::exp(x - largest);
  }
  return {best, static_cast<float>(1 / sum)};
}

}  // namespace

CustomRouting sparsemixer(float jitter) {
  return [jitter](const TensorView& logits, const TensorView& ids, const TensorView& weights) {
    const std::int64_t count = logits.size(1), topk = ids.size(1);
    for (std::int64_t token = 0; token < logits.size(0); ++token) {
      const float* row = logits.as<const float>() + token * logits.stride(0);
      std::int32_t excluded = -1;
      for (std::int64_t j = 0; j < topk; ++j) {
        const Choice choice = choose(row, count, excluded, jitter);
        ids.as<std::int32_t>()[token * topk + j] = choice.id;
        weights.as<float>()[token * topk + j] = choice.weight;
        excluded = choice.id;
      }
    }
  };
}

}  // namespace fusedmoe
