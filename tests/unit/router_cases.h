// What the tests of the router share: configurations, random tensors, and checks that hold on every
// device.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "error_text.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/router.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace fusedmoe::testing {

inline constexpr std::array kScorings = {ScoringFunc::kSoftmax,      ScoringFunc::kSigmoid,
                                         ScoringFunc::kSqrtSoftplus, ScoringFunc::kTopkSoftmax,
                                         ScoringFunc::kTopkSigmoid,  ScoringFunc::kLogits,
                                         ScoringFunc::kSparsemixer};

inline RouterConfig make_router(std::int64_t num_experts, std::int64_t topk, ScoringFunc scoring,
                                bool renormalize = false) {
  RouterConfig config;
  config.num_experts = num_experts;
  config.topk = topk;
  config.scoring = scoring;
  config.renormalize = renormalize;
  config.sparsemixer_jitter = 0.2F;  // so that some experts are near and others are not
  return config;
}

inline Tensor normal_tensor(const Shape& shape, DType dtype, std::uint64_t seed) {
  Random random(seed);
  Tensor tensor = Tensor::empty(shape, dtype);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    store_f32(tensor.data(), dtype, i, static_cast<float>(random.normal()));
  }
  return tensor;
}

/// run(weights, x) returns the logits.
template <typename Run>
void expect_nan_stays_in_its_token(const Run& run) {
  const RouterWeights weights{normal_tensor({9, 40}, DType::kF32, 10), {}, {}};
  const Tensor x = normal_tensor({5, 40}, DType::kF32, 11);
  const Tensor clean = run(weights, x);
  x.as<float>()[2 * 40 + 39] = std::nanf("");
  const Tensor logits = run(weights, x);
  for (std::int64_t i = 0; i < 45; ++i) {
    if (i / 9 == 2) {
      EXPECT_TRUE(std::isnan(logits.as<float>()[i]));
    } else {
      EXPECT_EQ(logits.as<float>()[i], clean.as<float>()[i]);
    }
  }
}

}  // namespace fusedmoe::testing
