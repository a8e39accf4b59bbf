// Weights of every key: codes against the formulas, round trips, errors within half a step, and the
// merging of two FP8 scales.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "quant/weight_layout.h"
#include "quantize_oracle.h"
#include "testing/cases.h"

namespace fusedmoe::quantize_weights_test {

using testing::Random;

Tensor random_matrix(std::int64_t out, std::int64_t in, std::uint64_t seed,
                     DType dtype = DType::kF32) {
  Random random(seed);
  Tensor result = Tensor::empty({out, in}, dtype);
  for (std::int64_t i = 0; i < result.numel(); ++i) {
    // Rows of different size; now and then a zero.
    const double scale = std::ldexp(1.0, static_cast<int>(i / in % 7) - 5);
    store_f32(result.data(), dtype, i,
              random.below(50) == 0 ? 0 : static_cast<float>(random.normal() * scale));
  }
  return result;
}

/// Every key of weights that a named scheme has, once.
std::vector<NamedScheme> weight_keys() {
  std::vector<NamedScheme> result;
  for (const NamedScheme& entry : named_schemes()) {
    const bool seen = std::any_of(result.begin(), result.end(), [&](const NamedScheme& other) {
      return other.scheme.weights == entry.scheme.weights;
    });
    if (!seen) result.push_back(entry);
  }
  return result;
}

bool same_bytes(const TensorView& a, const TensorView& b) {
  if (a.defined() != b.defined()) return false;
  if (!a) return true;
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.nbytes())) == 0;
}

class EveryKeyTest : public ::testing::TestWithParam<NamedScheme> {};

constexpr std::int64_t kOut = 130, kIn = 362;

TEST_P(EveryKeyTest, StridesAndDTypesDoNotMatter) {
  const QuantKey& key = GetParam().scheme.weights;
  const Tensor f32 = random_matrix(kOut, kIn, 1);
  const Tensor bf16 = Tensor::empty({kOut, kIn}, DType::kBF16);
  convert(f32, bf16);
  convert(bf16, f32);
  const Tensor wide = Tensor::empty({kIn, 2 * kOut}, DType::kBF16);
  const TensorView strided = wide.transpose(0, 1).slice(0, 1, 2 * kOut, 2);
  for (std::int64_t r = 0; r < kOut; ++r) {
    for (std::int64_t c = 0; c < kIn; ++c) {
      strided.as<std::uint16_t>()[r * strided.stride(0) + c * strided.stride(1)] =
          bf16.as<std::uint16_t>()[r * kIn + c];
    }
  }
  const QuantizedMatrix expected = quantize_weights(f32, key);
  for (const TensorView& source : {TensorView(bf16), strided}) {
    const QuantizedMatrix actual = quantize_weights(source, key);
    EXPECT_TRUE(same_bytes(actual.values, expected.values));
    EXPECT_TRUE(same_bytes(actual.scales, expected.scales));
    EXPECT_TRUE(same_bytes(actual.zero_points, expected.zero_points));
    EXPECT_TRUE(same_bytes(actual.global_scale, expected.global_scale));
  }
  core::check_matrix(expected.view(), key, "matrix", kOut, kIn);
}

TEST_P(EveryKeyTest, QuantizingTheDecodedValuesChangesNothing) {
  const QuantKey& key = GetParam().scheme.weights;
  const Tensor once =
      dequantize_weights(quantize_weights(random_matrix(kOut, kIn, 2), key).view(), key, kIn);
  const Tensor twice = dequantize_weights(quantize_weights(once, key).view(), key, kIn);
  // Scales that follow from the largest value: it decodes to itself within the rounding of
  // code * scale (and of e4m3 scales, where they are rounded), so the second scale may differ in
  // the last places. Power-of-two scales and what needs none are exact.
  const bool exact = !key.quantized() || (key.scale == DType::kE8M0 && key.value == DType::kE2M1);
  double worst = 0;
  for (std::int64_t i = 0; i < once.numel(); ++i) {
    const double a = once.as<float>()[i], b = twice.as<float>()[i];
    worst = std::max(worst, std::abs(a - b) / std::max(std::abs(a), 1e-6));
  }
  if (exact) {
    EXPECT_EQ(worst, 0);
  } else if (key.value == DType::kE4M3 && key.scale == DType::kF32) {
    EXPECT_LE(worst, 1e-6);
  }
}

/// Half of the step between codes around `value` in units of the scale.
double half_step(const QuantKey& key, double code) {
  const double m = std::abs(code);
  switch (key.value) {
    case DType::kE4M3:
      return std::ldexp(1.0, std::max(m == 0 ? -9 : std::ilogb(m), -6) - 4);
    case DType::kE2M1:
      return m >= 4 ? 1 : m >= 2 ? 0.5 : 0.25;
    case DType::kIq4:
      return 12;  // between 89 and 113
    default:
      return 0.5;
  }
}

TEST_P(EveryKeyTest, ErrorsAreAtMostHalfAStep) {
  const QuantKey& key = GetParam().scheme.weights;
  if (!key.quantized() || key.global_group.cols > 0) return;
  // A rule that never clips.
  const Tensor source = random_matrix(kOut, kIn, 3);
  const QuantizedMatrix q = quantize_weights(source, key, {.scale_rule = MxScaleRule::kCeil});
  const Tensor decoded = dequantize_weights(q.view(), key, kIn);
  for (std::int64_t r = 0; r < kOut; ++r) {
    for (std::int64_t c = 0; c < kIn; ++c) {
      const std::int64_t block = core::block_of(r, key.group.rows, 0) * q.scales.size(1) +
                                 core::block_of(c, key.group.cols, 0);
      double scale = load_f32(q.scales.data(), q.scales.dtype(), block);
      if (q.global_scale) scale *= q.global_scale.as<float>()[q.global_scale.size(0) > 1 ? r : 0];
      const double x = source.as<float>()[r * kIn + c], y = decoded.as<float>()[r * kIn + c];
      const double code = scale > 0 ? x / scale : 0;
      double bound = half_step(key, code);
      // The codes of W4A8 were chosen for scales of bf16; e4m3 ones are up to 1/16 (below 2^-6:
      // more) away, and so are products. NVFP4 scales are rounded down by up to 1/16, which clips.
      if (key.value == DType::kI4 && key.global_scale) bound += 0.15 * std::abs(code) + 0.1;
      if (key.value == DType::kE2M1 && key.global_scale) bound += 0.07 * std::abs(code);
      ASSERT_LE(std::abs(x - y), bound * scale * 1.0001 + 1e-9) << r << " " << c << " " << x;
    }
  }
}

struct Steps {
  QuantKey key;
  double codes;   // steps between the smallest and the largest value of a group, at least
  double scales;  // and of scales and offsets
};

// Groups of llama.cpp's blocks round their scales and offsets, too. Q4_1 and Q5_1 have one group a
// block, whose factors are all there is to round.
TEST(BlocksTest, ErrorsAreAtMostTheStepsOfCodesAndScales) {
  constexpr double kExact = 1e9;
  const Tensor source = random_matrix(kOut, kIn, 3);
  for (const auto& [key, codes, steps] :
       {Steps{keys::q2_k(), 3, 15}, Steps{keys::q3_k(), 6, 31}, Steps{keys::q4_k(), 15, 63},
        Steps{keys::q5_k(), 31, 63}, Steps{keys::q6_k(), 62, 127}, Steps{keys::q4_1(), 15, kExact},
        Steps{keys::q5_1(), 31, kExact}, Steps{keys::iq4_xs(), 226.0 / 24, 31}}) {
    const QuantizedMatrix q = quantize_weights(source, key);
    const Tensor decoded = dequantize_weights(q.view(), key, kIn);
    const std::int64_t width = key.global_group.cols;
    for (std::int64_t r = 0; r < kOut; ++r) {
      for (std::int64_t block = 0; block < kIn; block += width) {
        const std::int64_t end = std::min(kIn, block + width);
        double largest = 0;
        for (std::int64_t c = block; c < end; ++c) {
          largest = std::max(largest, std::abs(double{source.as<float>()[r * kIn + c]}));
        }
        // Twice for ranges of both signs. Half a code; half a step of the scale times the code;
        // half a step of the offset; the rounding of both factors to f16.
        const double range = 2 * largest;
        const double bound = range / codes / 2 + range / steps + range / 1024;
        for (std::int64_t c = block; c < end; ++c) {
          const double x = source.as<float>()[r * kIn + c];
          ASSERT_NEAR(decoded.as<float>()[r * kIn + c], x, bound)
              << name(QuantScheme{key, {}}) << " " << r << " " << c;
        }
      }
    }
  }
}

TEST_P(EveryKeyTest, ZerosStayZeros) {
  const QuantKey& key = GetParam().scheme.weights;
  const Tensor zeros = Tensor::zeros({3, 66}, DType::kBF16);
  const QuantizedMatrix q = quantize_weights(zeros, key);
  core::check_matrix(q.view(), key, "matrix", 3, 66);
  const Tensor decoded = dequantize_weights(q.view(), key, 66);
  for (std::int64_t i = 0; i < decoded.numel(); ++i) EXPECT_EQ(decoded.as<float>()[i], 0);
}

TEST_P(EveryKeyTest, WhatIsNotFiniteIsRefused) {
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    const Tensor source = random_matrix(3, 64, 4);
    source.as<float>()[70] = bad;
    try {
      quantize_weights(source, GetParam().scheme.weights);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.was(), "NaN or infinite in row 1");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryKeyTest, ::testing::ValuesIn(weight_keys()),
                         [](const auto& info) { return info.param.name; });

// ------------------------------------------------------------------------------------------------
// Against the formulas

TEST(QuantizeWeightsTest, MxAndNvfp4RowsEqualTheFormulas) {
  const Tensor source = random_matrix(40, 90, 5);
  const float* x = source.as<float>();
  for (auto rule :
       {MxScaleRule::kOcp, MxScaleRule::kEven, MxScaleRule::kCeil, MxScaleRule::kFloor}) {
    for (const QuantKey& key : {keys::mxfp4(), keys::mxfp8(), keys::nvfp4()}) {
      const QuantizedMatrix q = quantize_weights(source, key, {.scale_rule = rule});
      const std::int64_t group = key.group.cols, groups = q.scales.size(1);
      const float global = key.global_scale ? *q.global_scale.as<float>() : 0;
      if (key.global_scale) {
        EXPECT_EQ(global, oracle::amax(x, 40 * 90) / 2688);
      }
      for (std::int64_t r = 0; r < 40; ++r) {
        for (std::int64_t g = 0; g < groups; ++g) {
          const float* block = x + r * 90 + g * group;
          const std::int64_t count = std::min(group, 90 - g * group);
          const bool e2m1 = key.value == DType::kE2M1;
          const oracle::Block expected = key.global_scale
                                             ? oracle::nvfp4_block(block, count, global)
                                             : oracle::mx_block(block, count, e2m1, rule);
          ASSERT_EQ(q.scales.as<std::uint8_t>()[r * groups + g], expected.scale);
          for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t c = g * group + i;
            const auto* row = q.values.as<std::uint8_t>() + r * q.values.size(1);
            ASSERT_EQ(e2m1 ? row[c / 2] >> (c % 2 * 4) & 15 : row[c], expected.codes[i]);
          }
        }
      }
    }
  }
}

TEST(QuantizeWeightsTest, BlocksOf128EqualTheFormula) {
  const Tensor source = random_matrix(130, 200, 6);
  for (std::int64_t i = 128 * 200; i < 130 * 200; ++i) source.as<float>()[i] *= 1e-6F;
  const QuantizedMatrix q = quantize_weights(source, keys::e4m3_block());
  ASSERT_EQ(q.scales.shape(), (Shape{2, 2}));
  for (std::int64_t i = 0; i < 4; ++i) {
    float largest = 1e-4F;  // decides in the last two rows
    for (std::int64_t r = i / 2 * 128; r < std::min<std::int64_t>(130, i / 2 * 128 + 128); ++r) {
      for (std::int64_t c = i % 2 * 128; c < std::min<std::int64_t>(200, i % 2 * 128 + 128); ++c) {
        largest = std::max(largest, std::abs(source.as<float>()[r * 200 + c]));
      }
    }
    EXPECT_EQ(q.scales.as<float>()[i], largest / 448);
  }
  for (std::int64_t i = 0; i < source.numel(); ++i) {
    const float scale = q.scales.as<float>()[i / 200 / 128 * 2 + i % 200 / 128];
    const float inverse = 1 / scale;
    ASSERT_EQ(q.values.as<std::uint8_t>()[i], oracle::e4m3(source.as<float>()[i] * inverse));
  }
}

std::uint32_t word_code(const QuantizedMatrix& q, std::int64_t row, std::int64_t column,
                        int width) {
  const std::int64_t packing = 32 / width;
  const std::uint32_t word =
      q.values.as<std::uint32_t>()[row * q.values.size(1) + column / packing];
  return word >> (column % packing * width) & ((1U << width) - 1);
}

TEST(QuantizeWeightsTest, IntegersByHand) {
  const std::vector<float> x = {-8, 7, 3.5F, -2.5F, 0.5F, 1.5F, 0, 6};
  const TensorView source(x.data(), DType::kF32, {1, 8});
  // Symmetric: scale max(7 / 7, 8 / 8) = 1; halves to even.
  const QuantizedMatrix four = quantize_weights(source, keys::int4(32));
  EXPECT_EQ(*four.scales.as<float>(), 1);
  const std::vector<int> expected = {-8, 7, 4, -2, 0, 2, 0, 6};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(int(word_code(four, 0, i, 4)) - 8, expected[i]) << i;
  // Asymmetric: scale 15 / 15 = 1, zero point 8.
  const QuantizedMatrix zp = quantize_weights(source, keys::int4(32, false));
  EXPECT_EQ(*zp.scales.as<float>(), 1);
  EXPECT_EQ(*zp.zero_points.as<std::uint8_t>(), 8);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(int(word_code(zp, 0, i, 4)) - 8, expected[i]) << i;
  // 8 bits: scale max(7 / 127, 8 / 128) = 1 / 16.
  const QuantizedMatrix eight = quantize_weights(source, keys::int8(-1));
  EXPECT_EQ(*eight.scales.as<float>(), 0.0625F);
  EXPECT_EQ(word_code(eight, 0, 0, 8), 0U);
  EXPECT_EQ(word_code(eight, 0, 7, 8), 128U + 96);
  EXPECT_EQ(eight.values.shape(), (Shape{1, 2}));
  // A group on one side of zero keeps zero in its range.
  const std::vector<float> high = {15, 10};
  const QuantizedMatrix one_sided =
      quantize_weights(TensorView(high.data(), DType::kF32, {1, 2}), keys::int4(32, false));
  EXPECT_EQ(*one_sided.zero_points.as<std::uint8_t>(), 0);
  EXPECT_EQ(word_code(one_sided, 0, 1, 4), 10U);
}

TEST(QuantizeWeightsTest, IntegerScalesAreRoundedBeforeTheCodes) {
  const std::vector<float> x = {1.003F, -0.5F};
  const QuantizedMatrix q = quantize_weights(TensorView(x.data(), DType::kF32, {1, 2}),
                                             keys::int8(32), {.scale_dtype = DType::kBF16});
  EXPECT_EQ(q.scales.dtype(), DType::kBF16);
  const float scale = load_f32(q.scales.data(), DType::kBF16, 0);
  EXPECT_EQ(static_cast<int>(word_code(q, 0, 1, 8)),
            128 + static_cast<int>(std::nearbyint(-0.5F / scale)));
}

TEST(QuantizeWeightsTest, W4A8ByHand) {
  // Groups with scales 1, 0.5 and 3 of bf16 give fp8 scales 448 s / 3, rounded, over 8.
  std::vector<float> x(3 * 128, 0.0F);
  x[0] = 7;
  x[128] = -4;
  x[129] = 1.5F;
  x[256] = 21;
  x[257] = -9;
  const TensorView source(x.data(), DType::kF32, {1, 384});
  const QuantizedMatrix q = quantize_weights(source, keys::int4_e4m3());
  const float channel = 3.0F / 448;
  EXPECT_EQ(*q.global_scale.as<float>(), 8 * channel);
  const auto* scales = q.scales.as<std::uint8_t>();
  EXPECT_EQ(e4m3_to_f32(scales[0]), 18);    // 149.33 -> 144, / 8
  EXPECT_EQ(e4m3_to_f32(scales[1]), 9);     // 74.67 -> 72, / 8
  EXPECT_EQ(e4m3_to_f32(scales[2]), 56);    // 448 / 8
  EXPECT_EQ(word_code(q, 0, 0, 4), 15U);    // 7
  EXPECT_EQ(word_code(q, 0, 128, 4), 0U);   // -8
  EXPECT_EQ(word_code(q, 0, 129, 4), 11U);  // 3
  const Tensor decoded = dequantize_weights(q.view(), keys::int4_e4m3(), 384);
  EXPECT_EQ(decoded.as<float>()[0], 128 * 8 * channel);     // e4m3(7 * 18 = 126) is 128
  EXPECT_EQ(decoded.as<float>()[129], 28 * 8 * channel);    // e4m3(27): a tie, to even
  EXPECT_EQ(decoded.as<float>()[257], -160 * 8 * channel);  // e4m3(-168): a tie
}

TEST(QuantizeWeightsTest, SharedGlobalScale) {
  const Tensor source = random_matrix(4, 32, 8);
  const QuantizedMatrix q = quantize_weights(source, keys::nvfp4(), {}, 2688.0F);
  EXPECT_EQ(*q.global_scale.as<float>(), 1);
}

TEST(QuantizeWeightsTest, BadArgumentsAreNamed) {
  const Tensor source = random_matrix(4, 32, 9);
  const auto fault = [&](const TensorView& values, const QuantKey& key, QuantizeOptions options,
                         std::optional<float> global = {}) {
    try {
      quantize_weights(values, key, options, global);
    } catch (const Error& error) {
      return error.argument();
    }
    return std::string();
  };
  EXPECT_EQ(fault(source, keys::nvfp4(), {}), "");
  EXPECT_EQ(fault({}, keys::nvfp4(), {}), "values");
  EXPECT_EQ(fault(source.slice(0, 0, 0), keys::nvfp4(), {}), "values");
  EXPECT_EQ(fault(source, keys::nvfp4(true), {}), "key");
  EXPECT_EQ(fault(source, keys::int4(32), {.scale_dtype = DType::kE4M3}), "options.scale_dtype");
  EXPECT_EQ(fault(source, keys::nvfp4(), {}, -1.0F), "global_amax");
}

// ------------------------------------------------------------------------------------------------
// Merging of scales

TEST(MergeGateUpScalesTest, TheSmallerHalfIsRequantized) {
  testing::Case spec{.num_experts = 3, .hidden = 40, .intermediate = 24};
  spec.scheme = parse_scheme("fp8_tensor");
  const testing::Problem problem = testing::make_problem(spec);
  ExpertWeights merged = problem.weights;
  merge_gate_up_scales(merged);
  merged.validate();
  const auto scale = [](const WeightMatrix& m) { return *m.scales.as<const float>(); };
  bool different = false;
  for (std::size_t e = 0; e < 3; ++e) {
    const ExpertMatrices &before = problem.weights.experts[e], &after = merged.experts[e];
    const float larger = std::max(scale(before.gate), scale(before.up));
    different = different || scale(before.gate) != scale(before.up);
    EXPECT_EQ(scale(after.gate), larger);
    EXPECT_EQ(scale(after.up), larger);
    const bool gate_is_larger = scale(before.gate) == larger;
    const WeightMatrix &kept = gate_is_larger ? after.gate : after.up,
                       &kept_before = gate_is_larger ? before.gate : before.up,
                       &changed = gate_is_larger ? after.up : after.gate,
                       &changed_before = gate_is_larger ? before.up : before.gate;
    EXPECT_EQ(kept.values.data(), kept_before.values.data());
    const Tensor old = dequantize_weights(changed_before, keys::e4m3_tensor(), 40);
    const float inverse = 1 / larger;
    for (std::int64_t i = 0; i < old.numel(); ++i) {
      ASSERT_EQ(changed.values.as<std::uint8_t>()[i], oracle::e4m3(old.as<float>()[i] * inverse));
    }
  }
  EXPECT_TRUE(different);
  ExpertWeights other = testing::make_problem({}).weights;
  EXPECT_THROW(merge_gate_up_scales(other), Error);
}

}  // namespace fusedmoe::quantize_weights_test
