// route() against the sorting oracle in double, and its defined behaviour on ties, NaN and
// infinity.
#include "fusedmoe/router.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "fusedmoe/tensor.h"
#include "reference/router.h"
#include "router_cases.h"
#include "testing/cases.h"

namespace fusedmoe::router_test {

using testing::kScorings;
using testing::make_router;
using testing::Random;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Routed {
  Tensor ids, weights;
  std::int64_t topk;

  std::int32_t id(std::int64_t token, std::int64_t slot) const {
    return ids.as<std::int32_t>()[token * topk + slot];
  }
  float weight(std::int64_t token, std::int64_t slot) const {
    return weights.as<float>()[token * topk + slot];
  }
  std::vector<std::int32_t> row(std::int64_t token) const {
    return {ids.as<std::int32_t>() + token * topk, ids.as<std::int32_t>() + (token + 1) * topk};
  }
  std::vector<float> row_weights(std::int64_t token) const {
    return {weights.as<float>() + token * topk, weights.as<float>() + (token + 1) * topk};
  }
};

Routed run(const RouterConfig& config, const std::vector<float>& logits,
           const std::vector<float>& bias = {}) {
  const std::int64_t num_tokens = std::ssize(logits) / config.num_experts;
  Routed routed{Tensor::empty({num_tokens, config.topk}, DType::kI32),
                Tensor::empty({num_tokens, config.topk}, DType::kF32), config.topk};
  testing::poison(routed.ids);
  testing::poison(routed.weights);
  const TensorView bias_view =
      bias.empty() ? TensorView() : TensorView(bias.data(), DType::kF32, {std::ssize(bias)});
  route(config, TensorView(logits.data(), DType::kF32, {num_tokens, config.num_experts}), bias_view,
        {routed.ids, routed.weights});
  return routed;
}

std::vector<float> random_logits(std::int64_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> logits(static_cast<std::size_t>(count));
  for (float& logit : logits) logit = static_cast<float>(2 * random.normal());
  return logits;
}

/// Multiples of 1/4 from a few values, so that most rows have ties, and none is nearly one.
std::vector<float> grid_logits(std::int64_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> logits(static_cast<std::size_t>(count));
  for (float& logit : logits) logit = static_cast<float>(random.below(25) - 12) / 4;
  return logits;
}

reference::RoutedToken oracle(const RouterConfig& config, const std::vector<float>& logits,
                              std::int64_t token, const std::vector<float>& bias) {
  const auto* row = logits.data() + token * config.num_experts;
  const std::vector<double> wide(row, row + config.num_experts);
  return reference::route_token(config, wide, bias);
}

// exp() of a rounded argument of up to 16 and three roundings after it: 1e-6. Where a sum of
// weights of both signs divides (raw logits), cancellation amplifies the same error.
void expect_matches_oracle(const RouterConfig& config, const std::vector<float>& logits,
                           const std::vector<float>& bias, bool exact_ids) {
  const Routed routed = run(config, logits, bias);
  for (std::int64_t t = 0; t < std::ssize(logits) / config.num_experts; ++t) {
    const reference::RoutedToken expected = oracle(config, logits, t, bias);
    for (std::int64_t j = 0; j < config.topk; ++j) {
      const std::int32_t id = routed.id(t, j), expected_id = expected.ids[j];
      ASSERT_TRUE(id >= 0 && id < config.num_experts) << id;
      if (exact_ids) {
        ASSERT_EQ(id, expected_id) << "token " << t << " slot " << j;
      } else {
        // Scores that agree to fp32 accuracy may come in either order.
        const double score = expected.choice[expected_id];
        ASSERT_NEAR(expected.choice[id], score, 1e-6 * std::max(1e-3, std::abs(score)))
            << "token " << t << " slot " << j;
      }
      const double weight = expected.weights[j];
      ASSERT_NEAR(routed.weight(t, j), weight, 1e-6 * std::abs(weight) + 1e-12)
          << "token " << t << " slot " << j;
    }
    const auto row = routed.row(t);
    ASSERT_EQ(std::set(row.begin(), row.end()).size(), row.size()) << "token " << t;
  }
}

std::vector<std::int64_t> topks(std::int64_t num_experts) {
  std::set<std::int64_t> result{num_experts};
  for (std::int64_t k : {1, 2, 4, 8}) {
    if (k < num_experts) result.insert(k);
  }
  return {result.begin(), result.end()};
}

std::string describe(const RouterConfig& config) {
  return std::string(name(config.scoring)) + " E " + std::to_string(config.num_experts) + " k " +
         std::to_string(config.topk) + " renormalize " + std::to_string(config.renormalize) +
         " groups " + std::to_string(config.topk_group) + "/" +
         std::to_string(config.num_expert_group);
}

class RouterSizesTest : public ::testing::TestWithParam<std::int64_t> {
 protected:
  std::int64_t num_tokens() const { return GetParam() > 256 ? 2 : 9; }

  /// Every scoring and k, normalized or not, with a scale.
  std::vector<RouterConfig> configs() const {
    std::vector<RouterConfig> result;
    for (ScoringFunc scoring : kScorings) {
      for (std::int64_t topk : topks(GetParam())) {
        for (bool renormalize : {false, true}) {
          // A sum of logits may be nearly 0, and is then no divisor to compare by.
          if (renormalize && scoring == ScoringFunc::kLogits) continue;
          RouterConfig config = make_router(GetParam(), topk, scoring, renormalize);
          config.routed_scaling_factor = renormalize ? 2.5F : 1.0F;
          result.push_back(config);
        }
      }
    }
    return result;
  }
};

TEST_P(RouterSizesTest, RandomLogitsMatchTheOracle) {
  for (const RouterConfig& config : configs()) {
    SCOPED_TRACE(describe(config));
    expect_matches_oracle(config, random_logits(num_tokens() * GetParam(), 1), {}, false);
  }
}

TEST_P(RouterSizesTest, TiesMatchTheOracleExactly) {
  for (const RouterConfig& config : configs()) {
    SCOPED_TRACE(describe(config));
    expect_matches_oracle(config, grid_logits(num_tokens() * GetParam(), 2), {}, true);
  }
}

TEST_P(RouterSizesTest, RandomCorrectionBiasMatchesTheOracle) {
  std::vector<float> bias = random_logits(GetParam(), 3);
  for (float& value : bias) value /= 8;
  for (const RouterConfig& config : configs()) {
    SCOPED_TRACE(describe(config));
    const std::vector<float> logits = random_logits(num_tokens() * GetParam(), 4);
    const Routed routed = run(config, logits, bias);
    // Weights are compared by id: two nearly equal choice scores may have different weights.
    for (std::int64_t t = 0; t < num_tokens(); ++t) {
      const reference::RoutedToken expected = oracle(config, logits, t, bias);
      for (std::int64_t j = 0; j < config.topk; ++j) {
        const double score = expected.choice[expected.ids[j]];
        ASSERT_NEAR(expected.choice[routed.id(t, j)], score, 1e-6 * std::max(1.0, std::abs(score)));
        for (std::int64_t i = 0; i < config.topk; ++i) {
          if (expected.ids[i] != routed.id(t, j)) continue;
          const double weight = expected.weights[i];
          ASSERT_NEAR(routed.weight(t, j), weight, 1e-6 * std::abs(weight) + 1e-12);
        }
      }
    }
  }
}

TEST_P(RouterSizesTest, GroupsMatchTheOracle) {
  const std::vector<float> logits = random_logits(num_tokens() * GetParam(), 5);
  const std::vector<float> grid = grid_logits(num_tokens() * GetParam(), 6);
  std::vector<float> bias = random_logits(GetParam(), 7);
  for (float& value : bias) value /= 4;
  for (std::int64_t groups : {1, 2, 4, 8}) {
    if (GetParam() % groups != 0) continue;
    for (std::int64_t kept : std::set<std::int64_t>{1, (groups + 1) / 2, groups}) {
      for (ScoringFunc scoring : {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid}) {
        for (std::int64_t topk : topks(kept * (GetParam() / groups))) {
          RouterConfig config = make_router(GetParam(), topk, scoring, true);
          config.num_expert_group = groups;
          config.topk_group = kept;
          config.routed_scaling_factor = 1.5F;
          SCOPED_TRACE(describe(config));
          expect_matches_oracle(config, logits, {}, false);
          expect_matches_oracle(config, grid, {}, true);
          if (topk > 8) continue;  // far down the order, near ties are certain
          const Routed routed = run(config, logits, bias);
          for (std::int64_t t = 0; t < num_tokens(); ++t) {
            ASSERT_EQ(routed.row(t), oracle(config, logits, t, bias).ids) << "token " << t;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Experts, RouterSizesTest,
                         ::testing::Values(1, 7, 8, 33, 64, 128, 256, 2048));

TEST(RouterTest, TopkSoftmaxByHand) {
  const Routed routed = run(make_router(4, 2, ScoringFunc::kTopkSoftmax), {1, 4, 2, 3});
  EXPECT_EQ(routed.row(0), (std::vector<std::int32_t>{1, 3}));
  EXPECT_FLOAT_EQ(routed.weight(0, 0), 0.7310586F);  // 1 / (1 + exp(-1))
  EXPECT_FLOAT_EQ(routed.weight(0, 1), 0.2689414F);
}

TEST(RouterTest, SoftmaxByHand) {
  // exp of the logits: 1, 2, 4, 1; sum 8.
  const float log2 = std::log(2.0F);
  const std::vector<float> logits = {0, log2, 2 * log2, 0};
  const Routed plain = run(make_router(4, 2, ScoringFunc::kSoftmax), logits);
  EXPECT_EQ(plain.row(0), (std::vector<std::int32_t>{2, 1}));
  EXPECT_FLOAT_EQ(plain.weight(0, 0), 0.5F);
  EXPECT_FLOAT_EQ(plain.weight(0, 1), 0.25F);
  const Routed normalized = run(make_router(4, 2, ScoringFunc::kSoftmax, true), logits);
  EXPECT_FLOAT_EQ(normalized.weight(0, 0), 2.0F / 3);
  EXPECT_FLOAT_EQ(normalized.weight(0, 1), 1.0F / 3);
}

TEST(RouterTest, SparsemixerByHand) {
  RouterConfig config = make_router(5, 2, ScoringFunc::kSparsemixer);
  config.sparsemixer_jitter = 0.25F;  // as near as half of the best
  const Routed routed = run(config, {1, 4, 2, 3, -9});
  EXPECT_EQ(routed.row(0), (std::vector<std::int32_t>{1, 3}));
  EXPECT_FLOAT_EQ(routed.weight(0, 0), 0.66524096F);  // of 4, 3 and 2
  EXPECT_FLOAT_EQ(routed.weight(0, 1), 0.7310586F);   // of 3 and 2
}

TEST(RouterTest, Llama4TopOneIsTheSigmoidOfTheLogit) {
  const Routed routed = run(make_router(3, 1, ScoringFunc::kTopkSigmoid), {-1, 2, 0.5, -3, -2, -4});
  EXPECT_EQ(routed.id(0, 0), 1);
  EXPECT_FLOAT_EQ(routed.weight(0, 0), 0.8807971F);
  EXPECT_EQ(routed.id(1, 0), 1);
  EXPECT_FLOAT_EQ(routed.weight(1, 0), 0.1192029F);
}

TEST(RouterTest, SqrtSoftplusIsStable) {
  const Routed routed = run(make_router(4, 4, ScoringFunc::kSqrtSoftplus), {0, 100, -60, 1e30F});
  EXPECT_EQ(routed.row(0), (std::vector<std::int32_t>{3, 1, 0, 2}));
  EXPECT_FLOAT_EQ(routed.weight(0, 0), 1e15F);
  EXPECT_FLOAT_EQ(routed.weight(0, 1), 10.0F);
  EXPECT_FLOAT_EQ(routed.weight(0, 2), 0.8325546F);      // sqrt(log 2)
  EXPECT_FLOAT_EQ(routed.weight(0, 3), 9.3576230e-14F);  // exp(-30)
}

TEST(RouterTest, CorrectionBiasChoosesButDoesNotWeight) {
  RouterConfig config = make_router(4, 2, ScoringFunc::kSigmoid, true);
  config.routed_scaling_factor = 2;
  // Scores 0.5 each but expert 3; the bias lifts experts 2 and 1.
  const Routed routed = run(config, {0, 0, 0, 4}, {0, 1, 2, 0});
  EXPECT_EQ(routed.row(0), (std::vector<std::int32_t>{2, 1}));
  EXPECT_FLOAT_EQ(routed.weight(0, 0), 1.0F);
  EXPECT_FLOAT_EQ(routed.weight(0, 1), 1.0F);
}

TEST(RouterTest, GroupsWithoutBiasGoByTheirMaximum) {
  RouterConfig config = make_router(8, 2, ScoringFunc::kLogits);
  config.num_expert_group = 4;
  config.topk_group = 2;
  // Maxima 5, 6, 4, 1: groups 0 and 1 stay, although expert 4 beats expert 0.
  const Routed routed = run(config, {1, 5, 6, 2, 4, 4, 1, 0});
  EXPECT_EQ(routed.row(0), (std::vector<std::int32_t>{2, 1}));
  config.topk = 4;
  EXPECT_EQ(run(config, {1, 5, 6, 2, 4, 4, 1, 0}).row(0), (std::vector<std::int32_t>{2, 1, 3, 0}));
}

TEST(RouterTest, GroupsWithBiasGoByTheSumOfTheirTwoBest) {
  RouterConfig config = make_router(9, 3, ScoringFunc::kLogits);
  config.num_expert_group = 3;
  config.topk_group = 1;
  const std::vector<float> bias = {0, 0, 0, 1, 0, 0, 0, 0, 0};
  // Sums of two with the bias: 9 + 1, (5 + 1) + 5, 4 + 4; the third of a group counts nothing.
  const Routed routed = run(config, {9, 1, 0.5, 5, 5, -9, 4, 4, 4}, bias);
  EXPECT_EQ(routed.row(0), (std::vector<std::int32_t>{3, 4, 5}));
  EXPECT_EQ(routed.row_weights(0), (std::vector<float>{5, 5, -9}));
}

TEST(RouterTest, TiesGoToLowestIndex) {
  for (ScoringFunc scoring : kScorings) {
    SCOPED_TRACE(name(scoring));
    const Routed plain = run(make_router(9, 3, scoring), std::vector<float>(9, 0.25F));
    EXPECT_EQ(plain.row(0), (std::vector<std::int32_t>{0, 1, 2}));
    if (scoring == ScoringFunc::kSparsemixer) continue;  // has no groups
    RouterConfig grouped = make_router(8, 3, scoring);
    grouped.num_expert_group = 4;
    grouped.topk_group = 2;
    EXPECT_EQ(run(grouped, {0, 0, 7, 7, 7, 7, 7, 7}).row(0), (std::vector<std::int32_t>{2, 3, 4}));
  }
}

TEST(RouterTest, NegativeZeroTiesWithZero) {
  const Routed routed = run(make_router(3, 2, ScoringFunc::kLogits), {-0.0F, 0.0F, -1});
  EXPECT_EQ(routed.row(0), (std::vector<std::int32_t>{0, 1}));
}

TEST(RouterTest, RowOfNanSelectsTheFirstExpertsWithWeightZero) {
  std::vector<float> logits(3 * 8, 0.0F);
  for (std::size_t e = 0; e < 8; ++e) {
    logits[e] = logits[16 + e] = static_cast<float>(e);
    logits[8 + e] = kNan;
  }
  for (ScoringFunc scoring : kScorings) {
    for (bool renormalize : {false, true}) {
      SCOPED_TRACE(name(scoring));
      RouterConfig config = make_router(8, 3, scoring, renormalize);
      const Routed routed = run(config, logits);
      EXPECT_EQ(routed.row(1), (std::vector<std::int32_t>{0, 1, 2}));
      EXPECT_EQ(routed.row_weights(1), (std::vector<float>{0, 0, 0}));
      EXPECT_EQ(routed.row(0), (std::vector<std::int32_t>{7, 6, 5}));
      EXPECT_EQ(routed.row(2), routed.row(0));
      EXPECT_EQ(routed.row_weights(2), routed.row_weights(0));
      EXPECT_GT(routed.weight(0, 0), 0);
    }
  }
}

TEST(RouterTest, OneNanSpoilsASoftmaxRowButOnlyOneSigmoid) {
  const std::vector<float> logits = {1, kNan, 2, 3};
  const Routed softmax = run(make_router(4, 2, ScoringFunc::kSoftmax), logits);
  EXPECT_EQ(softmax.row(0), (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(softmax.row_weights(0), (std::vector<float>{0, 0}));
  for (ScoringFunc scoring : kScorings) {
    if (scoring == ScoringFunc::kSoftmax) continue;
    EXPECT_EQ(run(make_router(4, 3, scoring), logits).row(0), (std::vector<std::int32_t>{3, 2, 0}));
  }
}

TEST(RouterTest, MinusInfinityMasksAnExpert) {
  const std::vector<float> logits = {-kInf, 1, -kInf, 0};
  for (ScoringFunc scoring : kScorings) {
    SCOPED_TRACE(name(scoring));
    const Routed routed = run(make_router(4, 3, scoring), logits);
    EXPECT_EQ(routed.row(0), (std::vector<std::int32_t>{1, 3, 0}));
    EXPECT_EQ(routed.weight(0, 2), 0);
    EXPECT_TRUE(std::isfinite(routed.weight(0, 0)) && routed.weight(0, 0) > 0);
  }
  const Routed all = run(make_router(4, 2, ScoringFunc::kTopkSoftmax), std::vector(4, -kInf));
  EXPECT_EQ(all.row(0), (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(all.row_weights(0), (std::vector<float>{0, 0}));
}

TEST(RouterTest, InfinityIsOneForSigmoidAndNoScoreForLogits) {
  EXPECT_EQ(run(make_router(3, 1, ScoringFunc::kSigmoid), {0, kInf, 3}).id(0, 0), 1);
  EXPECT_EQ(run(make_router(3, 1, ScoringFunc::kLogits), {0, kInf, 3}).id(0, 0), 2);
  EXPECT_EQ(run(make_router(3, 1, ScoringFunc::kSoftmax), {0, kInf, 3}).weight(0, 0), 0);
}

TEST(RouterTest, WeightsThatSumToZeroRenormalizeToZero) {
  // exp(200) overflows fp32, so all scores are 0 and the divisor is 1e-20.
  const Routed routed =
      run(make_router(3, 2, ScoringFunc::kSigmoid, true), {-200.0F, -200.0F, -200.0F});
  EXPECT_EQ(routed.row_weights(0), (std::vector<float>{0, 0}));
}

TEST(RouterTest, IdsAreDistinctAndInRangeWhateverTheLogits) {
  constexpr std::array kStrange = {kNan,    -kNan, kInf,  -kInf,    0.0F,   -0.0F,
                                   3.4e38F, 1.0F,  -1.0F, -3.4e38F, 1e-45F, 50.0F};
  Random random(8);
  for (ScoringFunc scoring : kScorings) {
    for (std::int64_t groups : {0, 1, 4, 16}) {
      if (groups > 0 && scoring == ScoringFunc::kSparsemixer) continue;
      for (bool has_bias : {false, true}) {
        RouterConfig config = make_router(16, 4, scoring, random.below(2) == 0);
        config.num_expert_group = groups;
        config.topk_group = groups ? std::max<std::int64_t>(groups / 2, 1) : 0;
        std::vector<float> logits(64 * 16), bias(has_bias ? 16 : 0);
        for (float& value : logits) value = kStrange[random.below(kStrange.size())];
        for (float& value : bias) value = kStrange[random.below(kStrange.size())];
        SCOPED_TRACE(describe(config));
        const Routed routed = run(config, logits, bias);
        for (std::int64_t t = 0; t < 64; ++t) {
          const auto row = routed.row(t);
          const std::set<std::int32_t> distinct(row.begin(), row.end());
          ASSERT_EQ(distinct.size(), 4U);
          ASSERT_TRUE(*distinct.begin() >= 0 && *distinct.rbegin() < 16);
          for (float weight : routed.row_weights(t)) ASSERT_FALSE(std::isnan(weight));
        }
      }
    }
  }
}

TEST(RouterTest, GroupsOfNanStayWithTheFirstGroups) {
  RouterConfig config = make_router(8, 2, ScoringFunc::kSigmoid, true);
  config.num_expert_group = 4;
  config.topk_group = 2;
  const Routed nan_row = run(config, std::vector<float>(8, kNan));
  EXPECT_EQ(nan_row.row(0), (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(nan_row.row_weights(0), (std::vector<float>{0, 0}));
  // With raw logits every expert of a NaN group still ranks before those of dropped groups.
  config.scoring = ScoringFunc::kLogits;
  config.topk = 4;
  const Routed routed = run(config, {5, kNan, kNan, kNan, 1, 0, -1, -2});
  EXPECT_EQ(routed.row(0), (std::vector<std::int32_t>{0, 4, 5, 1}));
}

TEST(RouterTest, ARowDoesNotDependOnItsBatch) {
  constexpr std::int64_t kExperts = 128, kTopk = 8;
  const std::vector<float> logits = random_logits(300 * kExperts, 9);
  const RouterConfig config = make_router(kExperts, kTopk, ScoringFunc::kSoftmax, true);
  const Routed together = run(config, logits);
  for (std::int64_t t : {0, 7, 64, 299}) {
    const Routed alone =
        run(config, {logits.begin() + t * kExperts, logits.begin() + (t + 1) * kExperts});
    EXPECT_EQ(alone.row(0), together.row(t));
    EXPECT_EQ(alone.row_weights(0), together.row_weights(t));
  }
}

TEST(RouterTest, NoTokensIsLegal) {
  const Routed routed = run(make_router(8, 2, ScoringFunc::kSoftmax), {});
  EXPECT_EQ(routed.ids.numel(), 0);
}

TEST(RouterTest, CustomRoutingReplacesTheRest) {
  RouterConfig config = make_router(4, 2, ScoringFunc::kSoftmax, true);
  config.custom = [](const TensorView& logits, const TensorView& ids, const TensorView& weights) {
    for (std::int64_t t = 0; t < logits.size(0); ++t) {
      ids.as<std::int32_t>()[2 * t] = 3;
      ids.as<std::int32_t>()[2 * t + 1] = -1;
      weights.as<float>()[2 * t] = logits.as<float>()[4 * t];
      weights.as<float>()[2 * t + 1] = 0;
    }
  };
  const Routed routed = run(config, {7, 1, 2, 3, 8, 1, 2, 3});
  EXPECT_EQ(routed.row(1), (std::vector<std::int32_t>{3, -1}));
  EXPECT_EQ(routed.row_weights(1), (std::vector<float>{8, 0}));
}

}  // namespace fusedmoe::router_test
