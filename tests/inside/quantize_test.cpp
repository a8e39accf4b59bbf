// Quantizers of activations, bit for bit: random blocks against the formulas, and the worked
// examples.
#include "fusedmoe/quant.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "quant/quantize.h"
#include "quant/quantize_elements.h"
#include "quant/quantize_scales.h"
#include "quantize_oracle.h"
#include "testing/cases.h"

namespace fusedmoe::quantize_test {

using testing::Random;

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");

// ------------------------------------------------------------------------------------------------
// Random blocks

/// Values of one block; `kind` walks through what blocks can be like.
void fill(float* x, std::int64_t count, std::uint64_t kind, Random& random) {
  const auto exponent = static_cast<int>(random.below(40)) - 20;
  for (std::int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(random.normal());
  const auto scale = [&](int power) {
    for (std::int64_t i = 0; i < count; ++i) x[i] = std::ldexp(x[i], power);
  };
  float& one = x[random.below(count)];
  switch (kind % 12) {
    case 0:
      return scale(0);
    case 1:  // exact ties are common
      for (std::int64_t i = 0; i < count; ++i) {
        x[i] = std::ldexp(static_cast<float>(random.below(129) - 64), exponent);
      }
      return;
    case 2:
      return scale(static_cast<int>(random.below(270)) - 148);
    case 3:
      return static_cast<void>(std::fill_n(x, count, random.below(2) == 0 ? 0.0F : -0.0F));
    case 4:
      one = std::ldexp(one, 60);
      return;
    case 5:  // bits at random, subnormal
      for (std::int64_t i = 0; i < count; ++i) {
        x[i] = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits() >> 32) & 0x807fffff);
      }
      return;
    case 6:
      one = random.below(2) == 0 ? kInf : -kInf;
      return;
    case 7:
      one = kNan;
      return scale(exponent);
    case 8:
      std::fill_n(x, count, 0.0F);
      x[random.below(count)] = kNan;
      return;
    case 9:  // bits at random
      for (std::int64_t i = 0; i < count; ++i) {
        x[i] = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits() >> 32));
      }
      return;
    case 10:  // the largest decides: put it next to a power of two times 1, 1.5, 1.75, 448
      std::fill_n(x, count, 0.0F);
      one = std::ldexp(std::array{1.0F, 1.5F, 1.75F, 448.0F}[random.below(4)], exponent);
      if (random.below(3) != 0) one = std::nextafter(one, random.below(2) == 0 ? kInf : -kInf);
      return;
    default:
      return scale(exponent);
  }
}

struct BlockScheme {
  std::string name;
  QuantKey key;
  std::int64_t blocks;
};

oracle::Block expected_block(const float* x, std::int64_t count, const QuantKey& key,
                             float global_scale) {
  const bool e2m1 = key.value == DType::kE2M1;
  if (key.scale == DType::kE4M3) return oracle::nvfp4_block(x, count, global_scale);
  if (key.group == GroupShape{1, 32} && key.scale == DType::kE8M0) {
    return oracle::mx_block(x, count, e2m1, key.scale_rule);
  }
  return oracle::f32_block(x, count, key);
}

/// As oracle::Block has them.
int code_of(const std::vector<std::uint8_t>& codes, DType type, std::int64_t i) {
  if (type == DType::kE2M1) return codes[i / 2] >> (i % 2 * 4) & 15;
  if (type == DType::kI16) return static_cast<int>(load_f32(codes.data(), type, i));
  return codes[i];
}

class QuantizeBlocksTest : public ::testing::TestWithParam<BlockScheme> {};

TEST_P(QuantizeBlocksTest, EqualTheFormulas) {
  const QuantKey& key = GetParam().key;
  const std::int64_t group = key.group.cols < 0 ? 48 : key.group.cols;
  Random random(7);
  std::vector<float> x(group);
  std::vector<std::uint8_t> codes(bytes(key.value, group));
  for (std::int64_t b = 0; b < GetParam().blocks; ++b) {
    // Now and then a short block, as at the end of a row.
    const std::int64_t count = b % 16 == 15 ? 1 + random.below(group) : group;
    fill(x.data(), count, static_cast<std::uint64_t>(b), random);
    const auto global_scale = std::ldexp(1 + static_cast<float>(random.uniform()),
                                         static_cast<int>(random.below(20)) - 15);
    float scale_bytes = 0;
    core::quantize_row(x.data(), count, key, global_scale, codes.data(), &scale_bytes);
    const oracle::Block expected = expected_block(x.data(), count, key, global_scale);
    if (key.scale == DType::kF32) {
      ASSERT_EQ(scale_bytes, static_cast<float>(expected.scale)) << "block " << b;
    } else {
      const auto code = *reinterpret_cast<const std::uint8_t*>(&scale_bytes);
      const bool ue8m0_group = key.scale == DType::kE8M0 && key.group.cols == 128;
      ASSERT_EQ(ue8m0_group ? oracle::e8m0_decode(code) : code, expected.scale) << "block " << b;
    }
    for (std::int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(code_of(codes, key.value, i), expected.codes[i])
          << "block " << b << " element " << i << ": " << x[i];
    }
    if (key.value == DType::kE2M1 && count % 2 == 1) {
      ASSERT_EQ(codes[count / 2] >> 4, 0);
    }
  }
}

std::vector<BlockScheme> block_schemes() {
  std::vector<BlockScheme> result;
  for (auto rule :
       {MxScaleRule::kOcp, MxScaleRule::kEven, MxScaleRule::kCeil, MxScaleRule::kFloor}) {
    result.push_back({"mxfp4_" + std::string(name(rule)), keys::mxfp4(true, rule), 120000});
    QuantKey mxfp8 = keys::mxfp8(true);
    mxfp8.scale_rule = rule;
    result.push_back({"mxfp8_" + std::string(name(rule)), mxfp8, 60000});
  }
  result.push_back({"nvfp4", keys::nvfp4(true), 150000});
  result.push_back({"e4m3_group", keys::e4m3_group(), 20000});
  result.push_back({"e4m3_group_ue8m0", keys::e4m3_group(true), 20000});
  result.push_back({"e4m3_row", keys::e4m3_row(true), 50000});
  result.push_back({"int8_row", keys::int8_row(true), 50000});
  result.push_back({"int8_group", keys::int8_group(32), 50000});
  result.push_back({"int16_group", keys::int16_group(32), 50000});
  return result;
}

INSTANTIATE_TEST_SUITE_P(All, QuantizeBlocksTest, ::testing::ValuesIn(block_schemes()),
                         [](const auto& info) { return info.param.name; });

TEST(QuantizeRowTest, E4M3PerTensorMultipliesByTheReciprocal) {
  Random random(3);
  std::vector<float> x(64);
  std::vector<std::uint8_t> codes(64);
  for (std::uint64_t b = 0; b < 50000; ++b) {
    fill(x.data(), 64, b, random);
    const auto scale = std::ldexp(1 + static_cast<float>(random.uniform()),
                                  static_cast<int>(random.below(30)) - 15);
    const float inverse = 1 / scale;
    core::quantize_row(x.data(), 64, keys::e4m3_tensor(b % 2 == 0), scale, codes.data(), nullptr);
    for (int i = 0; i < 64; ++i) ASSERT_EQ(codes[i], oracle::e4m3(x[i] * inverse)) << x[i];
  }
}

TEST(QuantizeRowTest, Int16KeepsBf16Values) {
  const QuantKey key = keys::int16_group(32);
  Random random(5);
  std::vector<float> x(32);
  for (std::uint64_t b = 0; b < 50000; ++b) {
    fill(x.data(), 32, b, random);
    for (float& value : x) value = bf16_to_f32(f32_to_bf16(value));
    const bool finite = std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
    if (!finite) continue;
    const double largest = oracle::amax(x.data(), 32);
    std::vector<std::uint8_t> codes(64);
    float scale = 0;
    core::quantize_row(x.data(), 32, key, 1, codes.data(), &scale);
    for (int i = 0; i < 32; ++i) {
      const double value = double{scale} * code_of(codes, DType::kI16, i);
      // Scales are normal numbers: the smallest is 2^-126.
      const bool exact = std::abs(x[i]) >= largest / 128 && largest >= 0x1p-112;
      ASSERT_LE(std::abs(value - x[i]), exact ? 0 : std::max(largest * 0x1p-15, 0x1p-127)) << x[i];
    }
  }
}

// ------------------------------------------------------------------------------------------------
// Worked examples

TEST(QuantizeExamplesTest, Mxfp4ScaleRules) {
  // amax; log2 of the scale by kFloor, kEven, kCeil, kOcp.
  struct Row {
    float amax;
    int floor, even, ceil, ocp;
  };
  for (const Row& row :
       {Row{1, -3, -2, -2, -2}, Row{1.5F, -2, -2, -2, -2}, Row{1.74F, -2, -2, -1, -2},
        Row{1.75F, -2, -1, -1, -2}, Row{3.4F, -1, -1, 0, -1}, Row{3.5F, -1, 0, 0, -1},
        Row{4, -1, 0, 0, 0}, Row{6, 0, 0, 0, 0}, Row{6.0001F, 0, 0, 1, 0}, Row{7, 0, 1, 1, 0},
        Row{8, 0, 1, 1, 1}}) {
    const auto log2 = [&](MxScaleRule rule) {
      return core::mx_scale_code(row.amax, true, rule) - 127;
    };
    EXPECT_EQ(log2(MxScaleRule::kFloor), row.floor) << row.amax;
    EXPECT_EQ(log2(MxScaleRule::kEven), row.even) << row.amax;
    EXPECT_EQ(log2(MxScaleRule::kCeil), row.ceil) << row.amax;
    EXPECT_EQ(log2(MxScaleRule::kOcp), row.ocp) << row.amax;
  }
}

TEST(QuantizeExamplesTest, Nvfp4BlockOfATensorWithAmax3) {
  const std::vector<float> x = {1, 0.5F, -0.25F, 0};
  std::uint8_t codes[2], scale = 0;
  core::quantize_row(x.data(), 4, keys::nvfp4(true), 3.0F / 2688, codes, &scale);
  EXPECT_EQ(e4m3_to_f32(scale), 144);
  EXPECT_EQ(e2m1_to_f32(codes[0] & 15), 6);      // 6.22 saturates
  EXPECT_EQ(e2m1_to_f32(codes[0] >> 4), 3);      // 3.11
  EXPECT_EQ(e2m1_to_f32(codes[1] & 15), -1.5F);  // -1.56
  EXPECT_NEAR(6 * 144 / 896.0, 0.9643, 5e-5);
}

TEST(QuantizeExamplesTest, ScalarCodes) {
  for (const auto& [value, code] : std::vector<std::pair<float, int>>{{17, 0x58},
                                                                      {18, 0x59},
                                                                      {19, 0x5A},
                                                                      {0x1p-10F, 0},
                                                                      {0x1.8p-10F, 1},
                                                                      {0x1.8p-9F, 2},
                                                                      {464, 0x7E},
                                                                      {465, 0x7E},
                                                                      {kNan, 0x7F}}) {
    EXPECT_EQ(core::e4m3_code(value), code) << value;
  }
  EXPECT_EQ(core::e2m1_code(5.0001F), 7);
  EXPECT_EQ(core::e2m1_code(1e30F), 7);
  EXPECT_EQ(core::e2m1_code(-0.25F), 8);
  EXPECT_EQ(core::e2m1_code(-kNan), 7);
}

struct Quantized {
  Tensor values, scales;
};

Quantized quantized(const TensorView& x, const QuantKey& key, std::optional<float> scale = {}) {
  const QuantizedShape shape = quantized_shape(key, x.size(0), x.size(1));
  Quantized result{Tensor::empty(shape.values, shape.values_dtype),
                   Tensor::empty(shape.scales, shape.scales_dtype)};
  quantize(x, key, result.values, result.scales, scale);
  return result;
}

TEST(QuantizeExamplesTest, ZeroNanAndInfinity) {
  const std::vector<float> zeros(64, 0.0F);
  const TensorView zero(zeros.data(), DType::kF32, {1, 64});
  const auto all_zero = [](const Tensor& values) {
    const auto* codes = values.as<std::uint8_t>();
    return std::all_of(codes, codes + values.numel(), [](std::uint8_t code) { return code == 0; });
  };
  EXPECT_TRUE(all_zero(quantized(zero, keys::e4m3_row(true)).values));
  EXPECT_EQ(*quantized(zero, keys::e4m3_row(true)).scales.as<float>(), 1.0F / (448 * 512));
  // vLLM writes 448 and multiplies it by the scale 0; the product is 0 either way.
  EXPECT_TRUE(all_zero(quantized(zero, keys::e4m3_tensor(true)).values));
  EXPECT_EQ(*quantized(zero, keys::e4m3_tensor(true)).scales.as<float>(), 0);
  EXPECT_TRUE(all_zero(quantized(zero, keys::mxfp4(true)).values));
  EXPECT_EQ(*quantized(zero, keys::mxfp4(true)).scales.as<std::uint8_t>(), 0);
  EXPECT_TRUE(all_zero(quantized(zero, keys::nvfp4(true), 1.0F).values));
  EXPECT_EQ(*quantized(zero, keys::nvfp4(true), 1.0F).scales.as<std::uint8_t>(), 0);
  EXPECT_TRUE(all_zero(quantized(zero, keys::int8_row(true)).values));
  EXPECT_EQ(*quantized(zero, keys::int8_row(true)).scales.as<float>(), 1e-10F / 127);

  const std::vector<float> bad = {1, kInf, kNan, -2};
  const TensorView x(bad.data(), DType::kF32, {1, 4});
  const Quantized token = quantized(x, keys::e4m3_row(true));
  EXPECT_EQ(*token.scales.as<float>(), kInf);
  const auto* codes = token.values.as<std::uint8_t>();
  EXPECT_EQ(codes[0], 0);     // finite / inf
  EXPECT_EQ(codes[1], 0x7f);  // inf / inf
  EXPECT_EQ(codes[2], 0x7f);
  EXPECT_EQ(codes[3], 0x80);
}

// ------------------------------------------------------------------------------------------------
// Whole tensors

TEST(QuantizeTest, EveryDTypeAndKeyLikeRowByRow) {
  // Long rows go through quantize() in pieces; the last group is short.
  constexpr std::int64_t kRows = 3, kCols = 9003;
  Random random(11);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Tensor x = Tensor::empty({kRows, kCols + 5}, dtype);
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      store_f32(x.data(), dtype, i, static_cast<float>(random.normal()));
    }
    const TensorView view = x.slice(1, 0, kCols);
    for (const QuantKey& key :
         {keys::e4m3_tensor(), keys::e4m3_tensor(true), keys::e4m3_row(true), keys::e4m3_group(),
          keys::e4m3_group(true), keys::mxfp4(true), keys::mxfp8(true), keys::nvfp4(true),
          keys::int8_row(true), keys::int8_group(32), keys::int8_group(48),
          keys::int16_group(32)}) {
      const bool given = !key.dynamic || key.global_scale;
      const Quantized actual = quantized(view, key, given ? std::optional(0.02F) : std::nullopt);
      std::vector<float> wide(kRows * kCols);
      for (std::int64_t i = 0; i < kRows * kCols; ++i) {
        wide[i] = load_f32(x.data(), dtype, i / kCols * (kCols + 5) + i % kCols);
      }
      float scale = 0.02F;
      if (key == keys::e4m3_tensor(true)) {
        scale = oracle::amax(wide.data(), kRows * kCols) / 448;
        EXPECT_EQ(*actual.scales.as<float>(), scale);
      }
      for (std::int64_t row = 0; row < kRows; ++row) {
        std::vector<std::uint8_t> codes(2 * kCols), scales(4 * kCols);
        core::quantize_row(&wide[row * kCols], kCols, key, scale, codes.data(), scales.data());
        const TensorView values = actual.values.select(0, row);
        ASSERT_EQ(std::memcmp(codes.data(), values.data(), values.nbytes()), 0);
        if (key.group.rows < 0) continue;
        const TensorView row_scales = actual.scales.select(0, row);
        ASSERT_EQ(std::memcmp(scales.data(), row_scales.data(), row_scales.nbytes()), 0);
      }
    }
  }
}

TEST(QuantizeTest, ThreadsDoNotMatter) {
  Random random(12);
  const Tensor x = Tensor::empty({64, 1000}, DType::kF32);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    x.as<float>()[i] = static_cast<float>(random.normal());
  }
  for (const QuantKey& key : {keys::e4m3_tensor(true), keys::e4m3_row(true), keys::mxfp4(true)}) {
    set_num_threads(1);
    const Quantized one = quantized(x, key);
    set_num_threads(4);
    const Quantized four = quantized(x, key);
    set_num_threads(0);
    EXPECT_EQ(std::memcmp(one.values.data(), four.values.data(), one.values.nbytes()), 0);
    EXPECT_EQ(std::memcmp(one.scales.data(), four.scales.data(), one.scales.nbytes()), 0);
  }
}

TEST(QuantizeTest, ShapesOfEveryKey) {
  const auto shapes = [](const QuantKey& key) {
    const QuantizedShape s = quantized_shape(key, 5, 90);
    return std::string(name(s.values_dtype)) + to_string(s.values) + " " +
           std::string(name(s.scales_dtype)) + to_string(s.scales);
  };
  EXPECT_EQ(shapes(keys::e4m3_tensor()), "e4m3[5, 90] f32[1, 1]");
  EXPECT_EQ(shapes(keys::e4m3_row(true)), "e4m3[5, 90] f32[5, 1]");
  EXPECT_EQ(shapes(keys::e4m3_group()), "e4m3[5, 90] f32[5, 1]");
  EXPECT_EQ(shapes(keys::mxfp8(true)), "e4m3[5, 90] e8m0[5, 3]");
  EXPECT_EQ(shapes(keys::mxfp4(true)), "u8[5, 45] e8m0[5, 3]");
  EXPECT_EQ(shapes(keys::nvfp4(true)), "u8[5, 45] e4m3[5, 6]");
  EXPECT_EQ(shapes(keys::int8_row(true)), "i8[5, 90] f32[5, 1]");
  EXPECT_EQ(shapes(keys::int8_group(32)), "i8[5, 90] f32[5, 3]");
  EXPECT_EQ(shapes(keys::int16_group(32)), "i16[5, 90] f32[5, 3]");
}

TEST(QuantizeTest, EveryNamedSchemeHasAQuantizer) {
  for (const NamedScheme& entry : named_schemes()) {
    if (entry.scheme.activations) {
      EXPECT_NO_THROW(quantized_shape(*entry.scheme.activations, 2, 64)) << entry.name;
    }
  }
}

TEST(QuantizeTest, BadArgumentsAreNamed) {
  const Tensor x = Tensor::zeros({2, 64}, DType::kF32);
  const auto fault = [&](const TensorView& source, const QuantKey& key, std::optional<float> scale,
                         std::int64_t rows = 2) {
    try {
      const QuantizedShape s = quantized_shape(key, rows, 64);
      quantize(source, key, Tensor::empty(s.values, s.values_dtype),
               Tensor::empty(s.scales, s.scales_dtype), scale);
    } catch (const Error& error) {
      return error.argument();
    }
    return std::string();
  };
  EXPECT_EQ(fault(x, keys::e4m3_row(true), {}), "");
  EXPECT_EQ(fault(x, keys::e4m3_row(), {}), "key");
  EXPECT_EQ(fault(x, keys::int4(32), {}), "key");
  EXPECT_EQ(fault(x, QuantKey{}, {}), "key");
  EXPECT_EQ(fault(x, keys::e4m3_block(), {}), "key");
  EXPECT_EQ(fault(x, keys::e4m3_tensor(), {}), "scale");
  EXPECT_EQ(fault(x, keys::e4m3_tensor(), 0.0F), "scale");
  EXPECT_EQ(fault(x, keys::e4m3_tensor(), kNan), "scale");
  EXPECT_EQ(fault(x, keys::e4m3_tensor(true), 1.0F), "scale");
  EXPECT_EQ(fault(x, keys::nvfp4(true), {}), "scale");
  EXPECT_EQ(fault({}, keys::e4m3_row(true), {}), "x");
  EXPECT_EQ(fault(x.transpose(0, 1), keys::e4m3_row(true), {}), "x");
  EXPECT_EQ(fault(x, keys::e4m3_row(true), {}, 3), "values");
}

// Scales and codes that compressed-tensors 0.20 gives for int8 per token.
TEST(FullRangeInt8Test, GivesTheCodesOfCompressedTensors) {
  struct Row {
    std::vector<float> x;
    float scale;
    std::vector<int> codes;
  };
  QuantKey key = keys::int8_row(true);
  key.full_range = true;
  for (const Row& row :
       std::vector<Row>{{{-3.0F, 1.0F, 0.5F, 2.25F, -0.01F}, 0x1.818182p-6F, {-128, 42, 21, 96, 0}},
                        {{3.0F, -1.0F, 1.5F, 0.0F, 0.02F}, 0x1.818182p-6F, {127, -42, 64, 0, 1}},
                        {{0.0F, 0.0F, 0.0F, 0.0F, 0.0F}, 0x1p-23F, {0, 0, 0, 0, 0}},
                        {{127.5F, -127.5F, 0.5F, 1.5F, 2.5F}, 1.0F, {127, -128, 0, 2, 2}}}) {
    std::int8_t codes[5];
    float scale = 0;
    core::quantize_row(row.x.data(), 5, key, 1, reinterpret_cast<std::uint8_t*>(codes), &scale);
    EXPECT_EQ(scale, row.scale);
    EXPECT_EQ(std::vector<int>(codes, codes + 5), row.codes);
  }
  EXPECT_EQ(core::full_int8_code(kNan), 0);
  EXPECT_EQ(core::full_int8_code(kInf), 127);
  EXPECT_EQ(core::full_int8_code(-kInf), -128);
}

}  // namespace fusedmoe::quantize_test
