// Quantization schemes as values, and devices: names and their parsers.
#include <gtest/gtest.h>

#include <string>

#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::quant_test {

TEST(QuantTest, NamedSchemesParseBack) {
  for (const NamedScheme& named : named_schemes()) {
    EXPECT_EQ(parse_scheme(named.name), named.scheme) << named.name;
    EXPECT_EQ(name(named.scheme), named.name);
  }
  EXPECT_EQ(parse_scheme("bf16"), schemes::unquantized(DType::kBF16));
}

TEST(QuantTest, Mxfp4IsE2m1InBlocksOf32WithE8m0Scales) {
  const QuantScheme scheme = schemes::mxfp4_w4a16();
  EXPECT_EQ(scheme.weights.value, DType::kE2M1);
  EXPECT_EQ(scheme.weights.scale, DType::kE8M0);
  EXPECT_EQ(scheme.weights.group, (GroupShape{1, 32}));
  EXPECT_TRUE(scheme.weights.quantized());
  EXPECT_FALSE(scheme.activations);
}

TEST(QuantTest, ScaleRuleIsPartOfTheName) {
  const QuantScheme even = parse_scheme("mxfp4:even");
  EXPECT_EQ(even.activations->scale_rule, MxScaleRule::kEven);
  EXPECT_TRUE(parse_scheme("int8_w8a8:full").activations->full_range);
  EXPECT_EQ(name(parse_scheme("int8_w8a8:full")), "int8_w8a8:full");
  EXPECT_EQ(name(parse_scheme("q4_k+q6_k")), "q4_k+q6_k");
  EXPECT_EQ(name(even), "mxfp4:even");
  EXPECT_EQ(parse_scheme("mxfp4:ocp"), parse_scheme("mxfp4"));
  EXPECT_THROW(parse_scheme("mxfp4:up"), Error);
  EXPECT_THROW(parse_scheme("mxfp4_w4a16:even"), Error);
}

TEST(QuantTest, AtMostTwoSchemesAreJoined) {
  EXPECT_EQ(parse_scheme("f16+f16"), parse_scheme("f16"));
  EXPECT_THROW(parse_scheme("f16+f16+int8_g32"), Error);
  EXPECT_THROW(parse_scheme("f16+int8_g32+f16"), Error);
}

TEST(QuantTest, UnnamedSchemeIsDescribed) {
  QuantScheme scheme;
  scheme.weights.value = DType::kE4M3;
  scheme.weights.scale = DType::kF32;
  scheme.weights.group = {128, 64};
  const std::string text = name(scheme);
  EXPECT_NE(text.find("e4m3"), std::string::npos) << text;
  EXPECT_NE(text.find("(128, 64)"), std::string::npos) << text;
}

TEST(QuantTest, UnknownNameListsTheKnownOnes) {
  try {
    parse_scheme("fp3");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.was(), "\"fp3\"");
    EXPECT_NE(error.must_be().find("mxfp4_w4a16"), std::string::npos);
  }
}

TEST(QuantTest, UnquantizedTakesFloatTypesOnly) {
  EXPECT_THROW(schemes::unquantized(DType::kE4M3), Error);
  EXPECT_THROW(schemes::unquantized(DType::kI32), Error);
}

TEST(DeviceTest, ParsesWhatItPrints) {
  EXPECT_EQ(to_string(parse_device("cpu")), "cpu");
  EXPECT_EQ(to_string(parse_device("cuda")), "cuda:0");
  EXPECT_EQ(to_string(parse_device("cuda:3")), "cuda:3");
  for (const char* bad : {"", "gpu", "cuda:", "cuda:-1", "cuda:1x", "cuda:99999999999", "CPU"}) {
    EXPECT_THROW(parse_device(bad), Error) << bad;
  }
}

TEST(DeviceTest, CudaSummaryHasALinePerDeviceOrSaysWhyThereIsNone) {
  const std::string summary = cuda_device_summary();
  const std::string begin = cuda_device_count() == 0 ? "none: " : "cuda:0 ";
  EXPECT_EQ(summary.substr(0, begin.size()), begin);
}

TEST(DeviceTest, ZeroThreadsRestoresTheDefault) {
  const int otherwise = num_threads();
  EXPECT_GE(otherwise, 1);
  set_num_threads(3);
  EXPECT_EQ(num_threads(), 3);
  EXPECT_THROW(set_num_threads(-1), Error);
  EXPECT_EQ(num_threads(), 3);
  set_num_threads(0);
  EXPECT_EQ(num_threads(), otherwise);
}

}  // namespace fusedmoe::quant_test
