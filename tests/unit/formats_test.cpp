// Conversions of every storage format: all codes, every tie and both of its neighbours, and what
// lies beyond the largest value. The expected values come from the formats' definition in double
// arithmetic (sign * mantissa * 2^exponent), not from the bit tricks under test.
#include "fusedmoe/quant.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fusedmoe/tensor.h"

namespace fusedmoe::formats_test {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

/// A format by its definition, with the functions under test.
struct Format {
  std::string name;
  int exponent_bits, mantissa_bits, bias;
  unsigned max_code;       // largest finite magnitude
  unsigned overflow_code;  // what larger magnitudes become
  unsigned nan_code;       // what NaN becomes
  float (*widen)(unsigned);
  unsigned (*narrow)(float);

  unsigned sign() const { return 1U << (exponent_bits + mantissa_bits); }
  /// Value of a finite code, from the definition.
  double value(unsigned code) const {
    const unsigned magnitude = code & (sign() - 1);
    const int exponent = static_cast<int>(magnitude >> mantissa_bits);
    const unsigned mantissa = magnitude & ((1U << mantissa_bits) - 1);
    const double significand = std::ldexp(mantissa, -mantissa_bits) + (exponent ? 1 : 0);
    const double result = std::ldexp(significand, (exponent ? exponent : 1) - bias);
    return code & sign() ? -result : result;
  }
};

std::ostream& operator<<(std::ostream& out, const Format& format) {
  return out << format.name;
}

class FormatsTest : public ::testing::TestWithParam<Format> {};

TEST_P(FormatsTest, EveryFiniteCodeWidensToItsDefinitionAndBack) {
  const Format& format = GetParam();
  for (unsigned sign : {0U, format.sign()}) {
    for (unsigned magnitude = 0; magnitude <= format.max_code; ++magnitude) {
      const unsigned code = sign | magnitude;
      const float value = format.widen(code);
      ASSERT_EQ(static_cast<double>(value), format.value(code)) << "code " << code;
      ASSERT_EQ(std::signbit(value), sign != 0) << "code " << code;
      ASSERT_EQ(format.narrow(value), code) << "value " << value;
    }
  }
}

TEST_P(FormatsTest, EveryTieGoesToTheEvenCodeAndItsNeighboursToTheNearest) {
  const Format& format = GetParam();
  for (unsigned sign : {0U, format.sign()}) {
    const float direction = sign ? -kInfinity : kInfinity;
    for (unsigned low = 0; low < format.max_code; ++low) {
      const double exact = (format.value(sign | low) + format.value(sign | (low + 1))) / 2;
      const auto tie = static_cast<float>(exact);
      ASSERT_EQ(static_cast<double>(tie), exact) << "the tie itself must be an fp32 value";
      const unsigned even = low & 1 ? low + 1 : low;
      ASSERT_EQ(format.narrow(tie), sign | even) << tie;
      ASSERT_EQ(format.narrow(std::nextafter(tie, 0.0F)), sign | low) << tie;
      ASSERT_EQ(format.narrow(std::nextafter(tie, direction)), sign | (low + 1)) << tie;
      const float value = format.widen(sign | low);
      ASSERT_EQ(format.narrow(std::nextafter(value, direction)), sign | low) << value;
    }
  }
}

TEST_P(FormatsTest, BeyondTheLargestValueOverflowsAfterHalfAStep) {
  const Format& format = GetParam();
  // Where the next value of the same step would be; halfway to it, rounding leaves the range. A
  // saturating format (overflow code = largest code) does not care.
  const double largest = format.value(format.max_code);
  const double step = largest - format.value(format.max_code - 1);
  const auto halfway = static_cast<float>(largest + step / 2);
  for (float sign : {1.0F, -1.0F}) {
    const unsigned bit = sign < 0 ? format.sign() : 0;
    const unsigned overflow = bit | format.overflow_code;
    EXPECT_EQ(format.narrow(sign * std::nextafter(halfway, 0.0F)), bit | format.max_code);
    EXPECT_EQ(format.narrow(sign * halfway), overflow);  // the largest code is odd
    EXPECT_EQ(format.narrow(sign * std::nextafter(halfway, kInfinity)), overflow);
    EXPECT_EQ(format.narrow(sign * std::numeric_limits<float>::max()), overflow);
    EXPECT_EQ(format.narrow(sign * kInfinity), overflow);
  }
}

TEST_P(FormatsTest, NanBecomesTheFormatsNanCode) {
  const Format& format = GetParam();
  EXPECT_EQ(format.narrow(kNan), format.nan_code);
  const auto signaling = std::bit_cast<float>(0x7F800001U);
  EXPECT_EQ(format.narrow(signaling), format.nan_code);
}

TEST_P(FormatsTest, TinyValuesOfFp32BecomeZeroWithTheirSign) {
  const Format& format = GetParam();
  const float smallest = format.widen(1);
  for (float value : {std::numeric_limits<float>::denorm_min(), smallest / 4, smallest / 2}) {
    EXPECT_EQ(format.narrow(value), 0U) << value;
    EXPECT_EQ(format.narrow(-value), format.sign()) << value;
  }
}

template <auto function>
float widen(unsigned code) {
  return function(static_cast<std::uint8_t>(code));
}
template <auto function>
float widen16(unsigned code) {
  return function(static_cast<std::uint16_t>(code));
}
template <auto function>
unsigned narrow(float value) {
  return function(value);
}

INSTANTIATE_TEST_SUITE_P(
    All, FormatsTest,
    ::testing::Values(
        Format{"bf16", 8, 7, 127, 0x7F7F, 0x7F80, 0x7FC0, widen16<bf16_to_f32>,
               narrow<f32_to_bf16>},
        Format{"f16", 5, 10, 15, 0x7BFF, 0x7C00, 0x7E00, widen16<f16_to_f32>, narrow<f32_to_f16>},
        Format{"e4m3", 4, 3, 7, 0x7E, 0x7E, 0x7F, widen<e4m3_to_f32>, narrow<f32_to_e4m3>},
        Format{"e5m2", 5, 2, 15, 0x7B, 0x7B, 0x7F, widen<e5m2_to_f32>, narrow<f32_to_e5m2>},
        Format{"e2m1", 2, 1, 1, 0x7, 0x7, 0x7, widen<e2m1_to_f32>, narrow<f32_to_e2m1>}),
    [](const auto& info) { return info.param.name; });

TEST(Bf16Test, All65536CodesRoundTrip) {
  for (unsigned code = 0; code < 65536; ++code) {
    const float value = bf16_to_f32(static_cast<std::uint16_t>(code));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(value), code << 16);
    const unsigned expected = std::isnan(value) ? code | 0x40 : code;  // NaN becomes quiet
    ASSERT_EQ(f32_to_bf16(value), expected);
  }
}

TEST(F16Test, All65536CodesRoundTrip) {
  for (unsigned code = 0; code < 65536; ++code) {
    const float value = f16_to_f32(static_cast<std::uint16_t>(code));
    const bool nan = (code & 0x7FFF) > 0x7C00;
    ASSERT_EQ(std::isnan(value), nan) << code;
    ASSERT_EQ(std::isinf(value), (code & 0x7FFF) == 0x7C00) << code;
    ASSERT_EQ(std::signbit(value), code >> 15 == 1) << code;
    ASSERT_EQ(f32_to_f16(value), nan ? (code & 0x8000) | 0x7E00 : code);
  }
}

TEST(E4M3Test, NanAndTheMissingInfinity) {
  EXPECT_TRUE(std::isnan(e4m3_to_f32(0x7F)));
  EXPECT_TRUE(std::isnan(e4m3_to_f32(0xFF)));
  EXPECT_EQ(e4m3_to_f32(0x7E), 448);
  EXPECT_EQ(f32_to_e4m3(kInfinity), 0x7E);
}

// Golden vectors that came from the conversion instructions' host twins of CUDA 13.
TEST(E4M3Test, GoldenVectors) {
  const struct {
    float value;
    std::uint8_t code;
  } vectors[] = {{17, 0x58},
                 {18, 0x59},
                 {19, 0x5A},
                 {std::ldexp(1.0F, -10), 0x00},
                 {std::ldexp(1.5F, -10), 0x01},
                 {std::ldexp(1.5F, -9), 0x02},
                 {464, 0x7E},
                 {465, 0x7E},
                 {kNan, 0x7F}};
  for (const auto& [value, code] : vectors) EXPECT_EQ(f32_to_e4m3(value), code) << value;
}

TEST(E5M2Test, InfinitiesAndNanWiden) {
  EXPECT_EQ(e5m2_to_f32(0x7C), kInfinity);
  EXPECT_EQ(e5m2_to_f32(0xFC), -kInfinity);
  for (std::uint8_t code : {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}) {
    EXPECT_TRUE(std::isnan(e5m2_to_f32(code))) << int{code};
  }
  EXPECT_EQ(e5m2_to_f32(0x7B), 57344);
}

TEST(E2M1Test, GoldenVectors) {
  const float values[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  for (std::uint8_t code = 0; code < 8; ++code) {
    EXPECT_EQ(e2m1_to_f32(code), values[code]);
    EXPECT_EQ(e2m1_to_f32(code + 8), -values[code]);
    EXPECT_EQ(e2m1_to_f32(code | 0xF0), e2m1_to_f32(code)) << "the high nibble is ignored";
  }
  const struct {
    float value;
    std::uint8_t code;
  } vectors[] = {{0.25F, 0}, {0.75F, 2}, {1.25F, 2},      {1.75F, 4}, {2.5F, 4},
                 {3.5F, 6},  {5, 6},     {5.0001F, 7},    {1e30F, 7}, {-0.25F, 8},
                 {kNan, 7},  {-0.0F, 8}, {-kInfinity, 15}};
  for (const auto& [value, code] : vectors) EXPECT_EQ(f32_to_e2m1(value), code) << value;
}

TEST(E8M0Test, EveryCodeIsAPowerOfTwoAndRoundTrips) {
  for (int code = 0; code < 255; ++code) {
    const float value = e8m0_to_f32(static_cast<std::uint8_t>(code));
    ASSERT_EQ(static_cast<double>(value), std::ldexp(1.0, code - 127)) << code;
    ASSERT_EQ(f32_to_e8m0(value), code);
  }
  EXPECT_TRUE(std::isnan(e8m0_to_f32(255)));
}

TEST(E8M0Test, RoundsUpToThePowerOfTwo) {
  for (int code = 0; code < 254; ++code) {
    const float value = e8m0_to_f32(static_cast<std::uint8_t>(code));
    ASSERT_EQ(f32_to_e8m0(std::nextafter(value, kInfinity)), code + 1) << code;
    const float next = e8m0_to_f32(static_cast<std::uint8_t>(code + 1));
    ASSERT_EQ(f32_to_e8m0(std::nextafter(next, 0.0F)), code + 1) << code;
  }
}

TEST(E8M0Test, GoldenVectorsAndEdges) {
  EXPECT_EQ(f32_to_e8m0(1), 0x7F);
  EXPECT_EQ(f32_to_e8m0(1.0000001F), 0x80);
  EXPECT_EQ(f32_to_e8m0(0.75F), 0x7F);
  EXPECT_EQ(f32_to_e8m0(0), 0);
  EXPECT_EQ(f32_to_e8m0(-0.0F), 0);
  EXPECT_EQ(f32_to_e8m0(-3), 0);
  EXPECT_EQ(f32_to_e8m0(-kInfinity), 0);
  EXPECT_EQ(f32_to_e8m0(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(f32_to_e8m0(std::numeric_limits<float>::max()), 254);
  EXPECT_EQ(f32_to_e8m0(kInfinity), 254);
  EXPECT_EQ(f32_to_e8m0(kNan), 255);
}

TEST(Int4Test, EveryCodeRoundTrips) {
  for (int value = -8; value < 8; ++value) {
    const auto code = static_cast<std::uint8_t>(value & 0xF);
    EXPECT_EQ(int4_to_int(code), value);
    EXPECT_EQ(int4_to_int(code | 0x50), value) << "the high nibble is ignored";
    EXPECT_EQ(f32_to_int4(static_cast<float>(value)), code);
  }
}

TEST(Int4Test, EveryTieGoesToTheEvenValueAndItsNeighboursToTheNearest) {
  for (int low = -8; low < 7; ++low) {
    const float tie = static_cast<float>(low) + 0.5F;
    EXPECT_EQ(int4_to_int(f32_to_int4(tie)), low % 2 ? low + 1 : low) << tie;
    EXPECT_EQ(int4_to_int(f32_to_int4(std::nextafter(tie, -kInfinity))), low) << tie;
    EXPECT_EQ(int4_to_int(f32_to_int4(std::nextafter(tie, kInfinity))), low + 1) << tie;
  }
}

TEST(Int4Test, SaturatesAndNanIsZero) {
  for (float value : {7.5F, 8.0F, 1e30F, kInfinity}) EXPECT_EQ(int4_to_int(f32_to_int4(value)), 7);
  for (float value : {-8.5F, -9.0F, -1e30F, -kInfinity}) {
    EXPECT_EQ(int4_to_int(f32_to_int4(value)), -8);
  }
  EXPECT_EQ(f32_to_int4(kNan), 0);
  EXPECT_EQ(f32_to_int4(-0.0F), 0);
  EXPECT_EQ(f32_to_int4(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(LoadTest, ReadsEveryDtypeAtItsWidth) {
  const std::uint8_t nibbles[] = {0x2F, 0x71};  // elements F, 2, 1, 7
  EXPECT_EQ(load_f32(nibbles, DType::kE2M1, 0), -6);
  EXPECT_EQ(load_f32(nibbles, DType::kE2M1, 1), 1);
  EXPECT_EQ(load_f32(nibbles, DType::kE2M1, 2), 0.5F);
  EXPECT_EQ(load_f32(nibbles, DType::kE2M1, 3), 6);
  EXPECT_EQ(load_f32(nibbles, DType::kI4, 0), -1);
  EXPECT_EQ(load_f32(nibbles, DType::kI4, 3), 7);
  const double f64[] = {0, -1.5};
  EXPECT_EQ(load_f32(f64, DType::kF64, 1), -1.5F);
  const float f32[] = {0, 2.5F};
  EXPECT_EQ(load_f32(f32, DType::kF32, 1), 2.5F);
  const std::uint16_t half[] = {0, 0x3C00};
  EXPECT_EQ(load_f32(half, DType::kF16, 1), 1);
  const std::uint16_t bf16[] = {0, 0x3F80};
  EXPECT_EQ(load_f32(bf16, DType::kBF16, 1), 1);
  const std::uint8_t bytes[] = {0, 0xFE};
  EXPECT_EQ(load_f32(bytes, DType::kE4M3, 1), -448);
  EXPECT_TRUE(std::isnan(load_f32(bytes, DType::kE5M2, 1)));
  EXPECT_EQ(load_f32(bytes, DType::kE8M0, 1), std::ldexp(1.0F, 127));
  EXPECT_EQ(load_f32(bytes, DType::kI8, 1), -2);
  EXPECT_EQ(load_f32(bytes, DType::kU8, 1), 254);
  EXPECT_EQ(load_f32(bytes, DType::kBool, 1), 1);
  const std::int16_t i16[] = {0, -300};
  EXPECT_EQ(load_f32(i16, DType::kI16, 1), -300);
  const std::int32_t i32[] = {0, -70000};
  EXPECT_EQ(load_f32(i32, DType::kI32, 1), -70000);
  const std::int64_t i64[] = {0, std::int64_t{1} << 40};
  EXPECT_EQ(load_f32(i64, DType::kI64, 1), std::ldexp(1.0F, 40));
}

TEST(StoreTest, RoundsToTheDtypeAndRefusesOthers) {
  std::uint16_t bf16[] = {7, 7, 7};
  store_f32(bf16, DType::kBF16, 1, 1.00390625F);  // halfway between 1 and 1.0078125
  EXPECT_EQ(bf16[0], 7);
  EXPECT_EQ(bf16[1], 0x3F80);
  EXPECT_EQ(bf16[2], 7);
  std::uint16_t half = 0;
  store_f32(&half, DType::kF16, 0, -65520);
  EXPECT_EQ(half, 0xFC00);
  float f32 = 0;
  store_f32(&f32, DType::kF32, 0, 0.1F);
  EXPECT_EQ(f32, 0.1F);
  EXPECT_THROW(store_f32(&half, DType::kE4M3, 0, 1), Error);
}

TEST(ConvertTest, FromFp64RoundsOnce) {
  // Just above the middle between 1 and the next bf16: rounding to fp32 first would give the tie.
  const double above = 1.00390625 + std::ldexp(1.0, -40);
  const double values[] = {above, -above, 1.00390625, 1e300, -1e-320, 0.0, kNan, 1 / 3.0};
  std::uint16_t bf16[8];
  convert(TensorView(values, DType::kF64, {8}), TensorView(bf16, DType::kBF16, {8}));
  EXPECT_EQ(bf16[0], 0x3F81);
  EXPECT_EQ(bf16[1], 0xBF81);
  EXPECT_EQ(bf16[2], 0x3F80);
  EXPECT_EQ(bf16[3], 0x7F80);
  EXPECT_EQ(bf16[4], 0x8000);
  EXPECT_EQ(bf16[5], 0);
  EXPECT_TRUE(std::isnan(bf16_to_f32(bf16[6])));
  EXPECT_EQ(bf16[7], 0x3EAB);
  const double f16_above = 1 + std::ldexp(1.0, -11) + std::ldexp(1.0, -40);
  std::uint16_t half = 0;
  convert(TensorView(&f16_above, DType::kF64, {1}), TensorView(&half, DType::kF16, {1}));
  EXPECT_EQ(half, 0x3C01);
}

TEST(ConvertTest, EveryPairOfFloatTypesKeepsRepresentableValues) {
  const DType dtypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
  const float values[] = {0, -0.0F, 1, -2.5F, 448, kInfinity, 0.0078125F};
  constexpr std::int64_t kCount = 7;
  for (DType from : dtypes) {
    for (DType to : dtypes) {
      const Tensor source = Tensor::empty({kCount}, from);
      const Tensor destination = Tensor::empty({kCount}, to);
      convert(TensorView(values, DType::kF32, {kCount}), source);
      convert(source, destination);
      for (std::int64_t i = 0; i < kCount; ++i) {
        EXPECT_EQ(load_f32(destination.data(), to, i), values[i]) << name(from) << name(to);
      }
    }
  }
}

TEST(ConvertTest, FollowsTheStridesOfTheSource) {
  std::vector<float> values(2 * 3 * 4);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const TensorView source =
      TensorView(values.data(), DType::kF32, {2, 3, 4}).transpose(0, 2).slice(1, 0, 3, 2);
  std::vector<std::uint16_t> out(4 * 2 * 2);
  convert(source, TensorView(out.data(), DType::kBF16, {4, 2, 2}));
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      for (int k = 0; k < 2; ++k) {
        EXPECT_EQ(bf16_to_f32(out[(i * 2 + j) * 2 + k]), k * 12 + 2 * j * 4 + i);
      }
    }
  }
}

TEST(ConvertTest, RefusesWhatItCannotConvert) {
  float values[4] = {};
  std::uint8_t codes[4] = {1, 2, 3, 4};
  const TensorView f32(values, DType::kF32, {2, 2});
  EXPECT_THROW(convert(f32, TensorView(codes, DType::kE4M3, {2, 2})), Error);
  EXPECT_THROW(convert(TensorView(codes, DType::kU8, {2, 2}), f32), Error);
  EXPECT_THROW(convert(f32, TensorView(values, DType::kF32, {4})), Error);
  EXPECT_THROW(convert(f32, f32.transpose(0, 1)), Error);
  EXPECT_THROW(convert(TensorView(), f32), Error);
  EXPECT_THROW(convert(f32, TensorView(values, DType::kF32, {2, 2}, {DeviceKind::kCuda, 0})),
               Error);
  EXPECT_EQ(codes[0], 1) << "output is not touched";
  EXPECT_NO_THROW(
      convert(TensorView(values, DType::kF32, {0, 2}), TensorView(values, DType::kF32, {0, 2})));
}

}  // namespace fusedmoe::formats_test
