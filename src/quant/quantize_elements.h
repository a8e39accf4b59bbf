// One element to its code without branches, so that loops over rows vectorize. Equal to the
// conversions of fusedmoe/quant.h for every fp32 value. Here and in quantize_scales.h functions are
// static, because each level of the CPU compiles them with its own instructions: the linker must
// not take the copy of one level for another.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/host_device.h"

namespace fusedmoe::core {

/// The bits of |value|, ordered like the magnitudes; above kInfinityBits: NaN.
FUSEDMOE_HD static inline std::int32_t magnitude_bits(float value) {
  return std::bit_cast<std::int32_t>(value) & 0x7FFFFFFF;
}
inline constexpr std::int32_t kInfinityBits = 0x7F800000;

/// All ones or zero: masks instead of ?:, which compilers turn into jumps inside loops.
FUSEDMOE_HD static inline std::int32_t mask(bool condition) {
  return -static_cast<std::int32_t>(condition);
}

FUSEDMOE_HD static inline std::uint8_t e4m3_code(float value) {
  constexpr std::int32_t kMinNormal = 0x3C800000, kLargest = 0x43E00000;  // 2^-6, 448
  constexpr float kSubnormalUnit = 0x1p14F;  // its last place is 2^-9, the step of subnormals
  const std::int32_t nan = mask(magnitude_bits(value) > kInfinityBits);
  const std::int32_t magnitude = std::min(magnitude_bits(value), kLargest);
  const std::int32_t sign = std::bit_cast<std::int32_t>(value) >> 24 & 0x80 & ~nan;
  const std::int32_t normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  const std::int32_t subnormal =
      std::bit_cast<std::int32_t>(std::bit_cast<float>(magnitude) + kSubnormalUnit) -
      std::bit_cast<std::int32_t>(kSubnormalUnit);
  const std::int32_t small = mask(magnitude < kMinNormal);
  return static_cast<std::uint8_t>((subnormal & small) | (normal & ~small) | sign | (nan & 0x7F));
}

/// The inverse, bit for bit e4m3_to_f32().
static inline float e4m3_value(std::uint8_t code) {
  const std::int32_t magnitude = code & 0x7F;
  const std::int32_t normal = (magnitude << 20) + (120 << 23);
  const std::int32_t subnormal =
      std::bit_cast<std::int32_t>(static_cast<float>(magnitude) * 0x1p-9F);
  const std::int32_t small = mask(magnitude < 8), nan = mask(magnitude == 0x7F);
  const std::int32_t value = (subnormal & small) | (normal & ~small & ~nan) | (0x7FF00000 & nan);
  return std::bit_cast<float>(value | (code & 0x80) << 24);
}

/// In the low nibble.
FUSEDMOE_HD static inline std::uint8_t e2m1_code(float value) {
  const std::int32_t magnitude = magnitude_bits(value);
  const auto above = [=](float tie) {  // 1 if |value| > tie, or NaN
    return mask(magnitude > std::bit_cast<std::int32_t>(tie)) & 1;
  };
  const auto reaches = [=](float tie) {
    return mask(magnitude >= std::bit_cast<std::int32_t>(tie)) & 1;
  };
  const std::int32_t nan = mask(magnitude > kInfinityBits);
  const std::int32_t sign = std::bit_cast<std::int32_t>(value) >> 28 & 8 & ~nan;
  return static_cast<std::uint8_t>((above(0.25F) + reaches(0.75F) + above(1.25F) + reaches(1.75F) +
                                    above(2.5F) + reaches(3.5F) + above(5.0F)) |
                                   sign);
}

/// The inverse.
FUSEDMOE_HD static inline float e2m1_value(std::uint8_t code) {
  const std::int32_t magnitude = code & 7;
  const std::int32_t normal = (magnitude << 22) + (126 << 23);
  const std::int32_t subnormal = std::bit_cast<std::int32_t>(static_cast<float>(magnitude) * 0.5F);
  const std::int32_t small = mask(magnitude < 2);
  return std::bit_cast<float>((subnormal & small) | (normal & ~small) | (code & 8) << 28);
}

/// What the 16 codes of llama.cpp's IQ4 types stand for.
static inline float iq4_value(std::uint8_t code) {
  constexpr std::int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                       1,    13,   25,  38,  53,  69,  89,  113};
  return kValues[code & 15];
}

/// Nearest integer, halves away from zero, at most 127 in magnitude; NaN: 0.
FUSEDMOE_HD static inline std::int8_t int8_code(float value) {
  constexpr float kBelowHalf = 0x1.fffffep-2F;  // with 0.5 itself, the float below a half rounds up
  const std::int32_t nan = mask(magnitude_bits(value) > kInfinityBits);
  const std::int32_t magnitude =
      std::min(magnitude_bits(value), std::bit_cast<std::int32_t>(127.0F)) & ~nan;
  const auto number = static_cast<std::int32_t>(std::bit_cast<float>(magnitude) + kBelowHalf);
  const std::int32_t sign = std::bit_cast<std::int32_t>(value) >> 31;
  return static_cast<std::int8_t>((number ^ sign) - sign);
}

/// Nearest integer, ties to even, from `least` to `most`; NaN: 0.
FUSEDMOE_HD static inline float nearest_even(float value, float least, float most) {
  const float limited = value > most ? most : value > least ? value : least;
  const float magic = 12582912.0F;  // 1.5 * 2^23: the sum has no fraction
  return value == value ? (limited + magic) - magic : 0.0F;
}

FUSEDMOE_HD static inline std::int8_t full_int8_code(float value) {
  return static_cast<std::int8_t>(nearest_even(value, -128, 127));
}

static inline std::int16_t int16_code(float value) {
  return static_cast<std::int16_t>(nearest_even(value, -32767, 32767));
}

}  // namespace fusedmoe::core
