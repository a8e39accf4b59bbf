// Names and parameters of activations; their values are tested with the experts.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::activation_names_test {

constexpr int kCount = 11;

TEST(ActivationNamesTest, EveryActivationHasItsOwnNameAndParsesBack) {
  std::set<std::string_view> names;
  for (int i = 0; i < kCount; ++i) {
    const auto activation = static_cast<Activation>(i);
    EXPECT_TRUE(names.insert(name(activation)).second) << name(activation);
    EXPECT_EQ(parse_activation(name(activation)), activation);
  }
  EXPECT_EQ(parse_activation("gelu_pytorch_tanh"), Activation::kGeluTanh);
}

TEST(ActivationNamesTest, NoMulMeansNotGated) {
  EXPECT_TRUE(is_gated(Activation::kSilu));
  EXPECT_TRUE(is_gated(Activation::kSwigluOai));
  EXPECT_TRUE(is_gated(Activation::kSitu));
  EXPECT_FALSE(is_gated(Activation::kSiluNoMul));
  EXPECT_FALSE(is_gated(Activation::kGeluNoMul));
  EXPECT_FALSE(is_gated(Activation::kGeluTanhNoMul));
  EXPECT_FALSE(is_gated(Activation::kRelu2NoMul));
}

TEST(ActivationNamesTest, UnknownNameListsTheValidOnes) {
  try {
    parse_activation("swish");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "activation");
    EXPECT_EQ(error.was(), "\"swish\"");
    EXPECT_NE(error.must_be().find("swigluoai_uninterleave"), std::string::npos);
  }
}

TEST(ActivationResolveTest, FillsEachActivationsDefaults) {
  const ResolvedActivation oai = resolve(Activation::kSwigluOai, {});
  EXPECT_EQ(oai.alpha, 1.702F);
  EXPECT_EQ(oai.beta, 1);
  EXPECT_EQ(oai.limit, 7);
  const ResolvedActivation step = resolve(Activation::kSwigluStep, {});
  EXPECT_EQ(step.alpha, 1);
  EXPECT_EQ(step.limit, 7);
  const ResolvedActivation silu = resolve(Activation::kSilu, {});
  EXPECT_EQ(silu.kind, Activation::kSilu);
  EXPECT_EQ(silu.alpha, 1);
  EXPECT_EQ(silu.beta, 0);
  EXPECT_EQ(silu.limit, std::numeric_limits<float>::infinity());
}

TEST(ActivationResolveTest, TakesWhatIsGiven) {
  const ResolvedActivation given =
      resolve(Activation::kSwigluOaiUninterleave, {.alpha = 1.5F, .beta = 0.5F, .limit = 3.0F});
  EXPECT_EQ(given.alpha, 1.5F);
  EXPECT_EQ(given.beta, 0.5F);
  EXPECT_EQ(given.limit, 3);
  const ResolvedActivation situ =
      resolve(Activation::kSitu, {.situ_beta = 2.0F, .situ_linear_beta = 4.0F});
  EXPECT_EQ(situ.situ_beta, 2);
  EXPECT_EQ(situ.situ_linear_beta, 4);
}

TEST(ActivationResolveTest, RefusesMissingAndMeaninglessParameters) {
  EXPECT_THROW(resolve(Activation::kSitu, {}), Error);
  EXPECT_THROW(resolve(Activation::kSitu, {.situ_beta = 0.0F}), Error);
  EXPECT_THROW(resolve(Activation::kSilu, {.limit = std::nanf("")}), Error);
  EXPECT_THROW(resolve(Activation::kSilu, {.limit = -1.0F}), Error);
  EXPECT_THROW(resolve(Activation::kSwigluOai, {.alpha = HUGE_VALF}), Error);
  EXPECT_THROW(resolve(Activation::kSwigluOai, {.beta = 0.5F}), Error);
}

TEST(ActivationResolveTest, RefusesParametersThatTheFormulaLacks) {
  EXPECT_THROW(resolve(Activation::kSilu, {.alpha = 1.702F}), Error);
  EXPECT_THROW(resolve(Activation::kGelu, {.limit = 7.0F}), Error);
  EXPECT_THROW(resolve(Activation::kRelu2NoMul, {.limit = 7.0F}), Error);
  EXPECT_THROW(resolve(Activation::kSwigluStep, {.beta = 1.0F}), Error);
  EXPECT_THROW(resolve(Activation::kSwigluOai, {.situ_beta = 1.0F}), Error);
}

}  // namespace fusedmoe::activation_names_test
