// router_logits() against dot products in double, and its independence of the batch.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "fusedmoe/quant.h"
#include "fusedmoe/router.h"
#include "fusedmoe/tensor.h"
#include "reference/router.h"
#include "router_cases.h"
#include "testing/cases.h"

namespace fusedmoe::router_logits_test {

using testing::normal_tensor;

Tensor run(const RouterWeights& weights, const TensorView& x) {
  Tensor logits = Tensor::empty({x.size(0), weights.weight.size(0)}, DType::kF32);
  testing::poison(logits);
  router_logits(weights, x, logits);
  return logits;
}

// Random roundings: each of 16 lanes adds hidden / 16 terms to a partial sum of about sqrt(hidden /
// 16), which gives eps * hidden / 4 at worst over all lanes; the last additions and the bias round
// a few numbers of up to 4 sqrt(hidden).
void expect_near_oracle(const RouterWeights& weights, const TensorView& x) {
  const Tensor logits = run(weights, x);
  const auto hidden = static_cast<double>(x.size(1));
  const double bound = 0x1p-24 * (8 + 8 * std::sqrt(hidden) + hidden / 4);
  for (std::int64_t t = 0; t < x.size(0); ++t) {
    const std::vector<double> expected = reference::router_logits(weights, x, t);
    for (std::size_t e = 0; e < expected.size(); ++e) {
      const double actual = logits.as<float>()[t * std::ssize(expected) + std::int64_t(e)];
      ASSERT_NEAR(actual, expected[e], bound) << "token " << t << " expert " << e;
    }
  }
}

TEST(RouterLogitsTest, EveryShapeMatchesTheOracle) {
  for (std::int64_t hidden : {1, 15, 16, 17, 255, 256, 257, 360, 2880}) {
    for (std::int64_t experts : {1, 2, 3, 7, 8, 9, 33}) {
      for (std::int64_t tokens : {1, 2, 3, 4, 7, 8, 9, 33}) {
        if (hidden > 360 && (tokens > 4 || experts > 9)) continue;
        SCOPED_TRACE(std::to_string(tokens) + " x " + std::to_string(experts) + " x " +
                     std::to_string(hidden));
        const RouterWeights weights{normal_tensor({experts, hidden}, DType::kF32, 1),
                                    normal_tensor({experts}, DType::kF32, 2),
                                    {}};
        expect_near_oracle(weights, normal_tensor({tokens, hidden}, DType::kF32, 3));
      }
    }
  }
}

TEST(RouterLogitsTest, EveryPairOfDtypesMatchesTheOracle) {
  for (DType weight : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (DType x : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(std::string(name(weight)) + " x " + std::string(name(x)));
      const RouterWeights with_bias{
          normal_tensor({13, 300}, weight, 4), normal_tensor({13}, weight, 5), {}};
      expect_near_oracle(with_bias, normal_tensor({6, 300}, x, 6));
      const RouterWeights without{normal_tensor({13, 300}, weight, 4), {}, {}};
      expect_near_oracle(without, normal_tensor({6, 300}, x, 6));
    }
  }
}

TEST(RouterLogitsTest, EveryF16CodeIsWidenedExactly) {
  Tensor codes = Tensor::empty({0x10000, 1}, DType::kF16);
  for (std::int64_t code = 0; code < 0x10000; ++code) {
    codes.as<std::uint16_t>()[code] = static_cast<std::uint16_t>(code);
  }
  const float one = 1;
  const Tensor logits = run({codes, {}, {}}, TensorView(&one, DType::kF32, {1, 1}));
  for (std::int64_t code = 0; code < 0x10000; ++code) {
    const float expected = f16_to_f32(static_cast<std::uint16_t>(code));
    const float actual = logits.as<float>()[code];
    ASSERT_TRUE(actual == expected || (std::isnan(actual) && std::isnan(expected))) << code;
  }
}

TEST(RouterLogitsTest, ATokensLogitsDoNotDependOnItsBatch) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (std::int64_t experts : {5, 32}) {
      const RouterWeights weights{normal_tensor({experts, 723}, DType::kBF16, 7),
                                  normal_tensor({experts}, DType::kBF16, 8),
                                  {}};
      const Tensor x = normal_tensor({64, 723}, dtype, 9);
      const Tensor all = run(weights, x);
      for (std::int64_t tokens : {1, 3, 7, 13}) {
        for (std::int64_t first : {0, 5, 50}) {
          const Tensor some = run(weights, x.slice(0, first, first + tokens));
          EXPECT_EQ(0, std::memcmp(some.data(), all.as<float>() + first * experts,
                                   static_cast<std::size_t>(some.nbytes())));
        }
      }
    }
  }
}

TEST(RouterLogitsTest, ANanTokenLeavesItsNeighboursAlone) {
  testing::expect_nan_stays_in_its_token(run);
}

TEST(RouterLogitsTest, BadArgumentsAreNamed) {
  const Tensor weight = Tensor::zeros({4, 8}, DType::kBF16), x = Tensor::zeros({3, 8}, DType::kF32);
  const Tensor logits = Tensor::zeros({3, 4}, DType::kF32);
  const auto fault = [](const RouterWeights& weights, const TensorView& in, const TensorView& out) {
    try {
      router_logits(weights, in, out);
    } catch (const Error& error) {
      return error.argument();
    }
    return std::string();
  };
  EXPECT_EQ(fault({weight, {}, {}}, x, logits), "");
  EXPECT_EQ(fault({}, x, logits), "router.weight");
  EXPECT_EQ(fault({Tensor::zeros({4, 8}, DType::kI32), {}, {}}, x, logits), "router.weight");
  EXPECT_EQ(fault({Tensor::zeros({4}, DType::kF32), {}, {}}, x, logits), "router.weight");
  EXPECT_EQ(fault({weight, Tensor::zeros({5}, DType::kF32), {}}, x, logits), "router.bias");
  EXPECT_EQ(fault({weight, {}, {}}, Tensor::zeros({3, 7}, DType::kF32), logits), "hidden_states");
  EXPECT_EQ(fault({weight, {}, {}}, {}, logits), "hidden_states");
  EXPECT_EQ(fault({weight, {}, {}}, x.slice(1, 0, 8, 2), logits), "hidden_states");
  EXPECT_EQ(fault({weight, {}, {}}, x, Tensor::zeros({3, 5}, DType::kF32)), "router_logits");
  EXPECT_EQ(fault({weight, {}, {}}, x, x.reshape({24}).slice(0, 0, 12).reshape({3, 4})),
            "router_logits");
}

TEST(RouterLogitsTest, NoTokensIsLegal) {
  const RouterWeights weights{Tensor::zeros({4, 8}, DType::kF32), {}, {}};
  EXPECT_EQ(run(weights, Tensor::empty({0, 8}, DType::kF32)).numel(), 0);
}

}  // namespace fusedmoe::router_logits_test
