// Single elements: codes of activations on every rounding boundary.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "fusedmoe/quant.h"
#include "quant/quantize_elements.h"
#include "quant/quantize_scales.h"
#include "quantize_oracle.h"
#include "testing/cases.h"

namespace fusedmoe::quantize_elements_test {

using testing::Random;

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");

TEST(QuantizeElementsTest, EqualTheFormatsOnEveryRoundingBoundary) {
  // Boundaries of both formats have their last set bit among the upper 20; the low ones decide
  // between below, at and above.
  for (std::uint32_t upper = 0; upper < 1U << 20; ++upper) {
    for (const std::uint32_t lower : {0x000U, 0x001U, 0x800U, 0xfffU}) {
      const auto value = std::bit_cast<float>(upper << 12 | lower);
      ASSERT_EQ(core::e4m3_code(value), f32_to_e4m3(value)) << value;
      ASSERT_EQ(core::e2m1_code(value), f32_to_e2m1(value)) << value;
    }
  }
}

TEST(QuantizeElementsTest, ValuesOfCodesAreThoseOfTheFormats) {
  const auto bits_of = [](float value) { return std::bit_cast<std::uint32_t>(value); };
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<std::uint8_t>(code);
    ASSERT_EQ(bits_of(core::e4m3_value(byte)), bits_of(e4m3_to_f32(byte))) << code;
    if ((code & 0x7F) != 0x7F) {
      const auto expected = static_cast<float>(oracle::e4m3_decode(byte));
      ASSERT_EQ(bits_of(core::e4m3_value(byte)), bits_of(expected)) << code;
    } else {
      ASSERT_TRUE(std::isnan(core::e4m3_value(byte))) << code;
    }
    if (code < 16) {
      ASSERT_EQ(bits_of(core::e2m1_value(byte)), bits_of(e2m1_to_f32(byte))) << code;
      const auto expected = static_cast<float>(oracle::e2m1_decode(code));
      ASSERT_EQ(bits_of(core::e2m1_value(byte)), bits_of(expected)) << code;
    }
  }
}

TEST(QuantizeElementsTest, AQuotientIsThatOfTheDivision) {
  const auto bits_of = [](float value) { return std::bit_cast<std::uint32_t>(value); };
  Random random(0x5ca1e);
  for (int i = 0; i < 1000; ++i) {
    // Any significand, 2^-40 to 2^40.
    const std::int64_t significand_of_scale = random.below(1 << 23);
    const std::int64_t word = (87 + random.below(80)) << 23 | significand_of_scale;
    const auto scale = std::bit_cast<float>(static_cast<std::uint32_t>(word));
    for (std::uint32_t significand = 0; significand < 1U << 10; ++significand) {  // all of f16
      for (const std::uint32_t sign_and_exponent : {0x3f800000U, 0xb0000000U}) {
        const auto value = std::bit_cast<float>(sign_and_exponent | significand << 13);
        ASSERT_EQ(bits_of(core::quotient(value, scale, 1 / scale)), bits_of(value / scale))
            << value << " / " << scale;
      }
    }
    for (const float zero : {0.0F, -0.0F}) {
      ASSERT_EQ(bits_of(core::quotient(zero, scale, 1 / scale)), bits_of(zero));
    }
  }
}

TEST(QuantizeElementsTest, FormatsEqualTheTables) {
  for (std::uint32_t upper = 0; upper < 1U << 20; ++upper) {
    for (const std::uint32_t lower : {0x000U, 0x001U, 0xfffU}) {
      const auto value = std::bit_cast<float>(upper << 12 | lower);
      ASSERT_EQ(core::e4m3_code(value), oracle::e4m3(value)) << value;
      ASSERT_EQ(core::e2m1_code(value), oracle::e2m1(value)) << value;
    }
  }
}

TEST(QuantizeElementsTest, Int8RoundsHalvesAwayFromZero) {
  for (int half = -254; half <= 254; ++half) {
    const float tie = static_cast<float>(half) / 2;
    for (const float value : {std::nextafter(tie, -kInf), tie, std::nextafter(tie, kInf)}) {
      const float limited = std::clamp(value, -127.0F, 127.0F);
      EXPECT_EQ(core::int8_code(value), std::round(limited)) << value;
    }
  }
  EXPECT_EQ(core::int8_code(kInf), 127);
  EXPECT_EQ(core::int8_code(-kInf), -127);
  EXPECT_EQ(core::int8_code(kNan), 0);
  EXPECT_EQ(core::int8_code(-kNan), 0);
  EXPECT_EQ(core::int8_code(-0.49999997F), 0);
}

TEST(QuantizeElementsTest, Int16RoundsHalvesToEven) {
  for (const auto& [value, code] : std::vector<std::pair<float, int>>{{0.5F, 0},
                                                                      {1.5F, 2},
                                                                      {-2.5F, -2},
                                                                      {16384.5F, 16384},
                                                                      {32767.5F, 32767},
                                                                      {-32768, -32767},
                                                                      {kInf, 32767},
                                                                      {-kInf, -32767},
                                                                      {kNan, 0}}) {
    EXPECT_EQ(core::int16_code(value), code) << value;
  }
}

}  // namespace fusedmoe::quantize_elements_test
