// The reference's activations against values computed by hand (with 30 digits), and their limits.
#include "reference/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace fusedmoe::reference::reference_activation_test {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double run(Activation kind, double gate, double up, const ActivationParams& params = {}) {
  return activate(resolve(kind, params), gate, up);
}

// The doubles of the implementation carry a few roundings.
constexpr double kTolerance = 1e-15;

void expect_close(double actual, double expected) {
  EXPECT_NEAR(actual, expected, kTolerance * std::abs(expected));
}

TEST(ReferenceActivationTest, Silu) {
  expect_close(run(Activation::kSilu, 1.5, 2), 2.452723428580930979);
  expect_close(run(Activation::kSilu, -3, 0.5), -0.07113880976635017132);
  expect_close(run(Activation::kSilu, 1, -1), -0.7310585786300048793);
  EXPECT_EQ(run(Activation::kSilu, 0, 5), 0);
  EXPECT_EQ(run(Activation::kSilu, -1000, 1), 0);
  EXPECT_EQ(run(Activation::kSilu, 1000, 1), 1000);
}

TEST(ReferenceActivationTest, SiluClampsTheGateFromAboveAndUpOnBothSides) {
  const ActivationParams limit{.limit = 1.5F};
  expect_close(run(Activation::kSilu, 9, 1, limit), 2.452723428580930979 / 2);
  expect_close(run(Activation::kSilu, 9, -7, limit), -1.5 * 2.452723428580930979 / 2);
  expect_close(run(Activation::kSilu, -3, 7, limit), 3 * -0.07113880976635017132);
}

TEST(ReferenceActivationTest, GeluIsTheExactErf) {
  expect_close(run(Activation::kGelu, 1, 2), 2 * 0.8413447460685429486);
  expect_close(run(Activation::kGelu, -0.5, 2), 2 * -0.1542687693629934482);
  expect_close(run(Activation::kGeluNoMul, 2.5, kNan), 2.484475836685559662);
}

TEST(ReferenceActivationTest, GeluTanh) {
  expect_close(run(Activation::kGeluTanh, 1, 2), 2 * 0.8411919906082767048);
  expect_close(run(Activation::kGeluTanh, -0.5, 2), 2 * -0.1542859901748560780);
  expect_close(run(Activation::kGeluTanhNoMul, 2.5, kNan), 2.484915733910001418);
}

TEST(ReferenceActivationTest, SwigluOai) {
  // alpha is the fp32 number nearest to 1.702.
  expect_close(run(Activation::kSwigluOai, 2, 0.5), 2.903487938813994581);
  expect_close(run(Activation::kSwigluOai, 9, -8), -41.99971876986308342);
}

TEST(ReferenceActivationTest, SwigluOaiUninterleave) {
  const ActivationParams params{.alpha = 1.5F, .beta = 0.5F, .limit = 1.0F};
  expect_close(run(Activation::kSwigluOaiUninterleave, 1, 0.25, params), 0.6131808571452327447);
  expect_close(run(Activation::kSwigluOaiUninterleave, 4, 0.25, params), 0.6131808571452327447);
  expect_close(run(Activation::kSwigluOaiUninterleave, 1, -3, params),
               -0.5 / 0.75 * 0.6131808571452327447);
}

TEST(ReferenceActivationTest, SwigluStepClampsAfterTheSilu) {
  expect_close(run(Activation::kSwigluStep, 8, -9), -49);
  expect_close(run(Activation::kSwigluStep, 3, 2), 2 * 2.857722380467299657);
}

TEST(ReferenceActivationTest, Situ) {
  expect_close(run(Activation::kSitu, 1, 2, {.situ_beta = 1.5F}), 1.278145415027552960);
  expect_close(run(Activation::kSitu, 1, 2, {.situ_beta = 1.5F, .situ_linear_beta = 0.5F}),
               0.3193220406410459297);
}

TEST(ReferenceActivationTest, NonGatedOnesIgnoreUp) {
  expect_close(run(Activation::kSiluNoMul, 3, kNan), 2.857722380467299657);
  EXPECT_EQ(run(Activation::kRelu2NoMul, 1.5, kNan), 2.25);
  EXPECT_EQ(run(Activation::kRelu2NoMul, -1.5, kNan), 0);
}

TEST(ReferenceActivationTest, NanStaysNan) {
  for (int i = 0; i <= static_cast<int>(Activation::kRelu2NoMul); ++i) {
    const auto kind = static_cast<Activation>(i);
    ActivationParams params;
    if (kind == Activation::kSitu) params.situ_beta = 1.0F;
    EXPECT_TRUE(std::isnan(run(kind, kNan, 1, params))) << name(kind);
    EXPECT_EQ(std::isnan(run(kind, 1, kNan, params)), is_gated(kind)) << name(kind);
  }
}

}  // namespace fusedmoe::reference::reference_activation_test
