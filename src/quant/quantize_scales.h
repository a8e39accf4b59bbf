// Scales of quantized activations from the largest magnitude of their block: the formulas, once,
// for the host and for CUDA. docs/number-formats.md, "Quantization formulas", says where each is
// from.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "fusedmoe/quant.h"
#include "quant/quantize_elements.h"

namespace fusedmoe::core {

inline constexpr float kE4M3Max = 448.0F, kE2M1Max = 6.0F, kInt8Max = 127.0F;

/// As fusedmoe::f32_to_e8m0(): rounds up to a power of two.
FUSEDMOE_HD static inline int e8m0_code(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return 255;
  if (bits >> 31 != 0) return 0;
  // 2^-127, the value of code 0, is a subnormal of fp32.
  if (bits < 0x800000U) return bits > 0x400000U ? 1 : 0;
  const auto code = static_cast<int>((bits + 0x7FFFFFU) >> 23);
  return code < 254 ? code : 254;
}
/// 2^(code - 127).
FUSEDMOE_HD static inline float e8m0_value(int code) {
  return std::bit_cast<float>(code == 0 ? 0x400000U : static_cast<std::uint32_t>(code) << 23);
}

/// Code of the E8M0 scale of an MX block of e2m1 (or else e4m3) elements with this amax.
FUSEDMOE_HD static inline std::uint8_t mx_scale_code(float amax, bool e2m1, MxScaleRule rule) {
  if (amax == 0) return 0;
  const float largest = e2m1 ? kE2M1Max : kE4M3Max;
  const int power = e2m1 ? 2 : 8, mantissa_bits = e2m1 ? 1 : 3;
  const auto exponent = [](float value, std::uint32_t added) {
    return static_cast<int>((std::bit_cast<std::uint32_t>(value) + added) >> 23);
  };
  int code = 0;
  switch (rule) {
    case MxScaleRule::kOcp:
      code = exponent(amax, 0) - power;
      break;
    case MxScaleRule::kEven:
      code = exponent(amax, 1U << (22 - mantissa_bits)) - power;
      break;
    case MxScaleRule::kCeil:
      // MXFP8 kernels multiply by the reciprocal and convert; MXFP4 ones divide.
      code = e2m1 ? exponent(amax / kE2M1Max, 0x7FFFFF) : e8m0_code(amax * (1.0F / kE4M3Max));
      break;
    case MxScaleRule::kFloor:
      code = exponent(amax * (1.0F / largest), 0);
      break;
  }
  return static_cast<std::uint8_t>(code < 0 ? 0 : code > 254 ? 254 : code);
}

/// value / scale in three operations, where many values have one scale: one step of Newton's
/// method. It has the bits of the division if `value` is finite and has at most 11 significant
/// bits, as bf16 and f16 do, `inverse` is 1 / scale and normal, and |value| is 0 or above 2^-100.
/// (A test compares all such significands of `value` with random scales.)
FUSEDMOE_HD static inline float quotient(float value, float scale, float inverse) {
  const float first = value * inverse;
  // -inverse, as GCC 12 makes FNMADD of a negated fma on ARM, which loses the sign of -0 / scale.
  return std::fma(std::fma(first, scale, -value), -inverse, first);
}

/// Smallest amax of groups and of int8 rows.
inline constexpr float kMinAmax = 1e-10F;

/// Scale of a row or group of int8 elements. `full_range`: QuantKey::full_range.
FUSEDMOE_HD static inline float int8_scale(float amax, bool full_range) {
  constexpr float kFullInt8Max = 127.5F;
  constexpr float kFullInt8Zero = 0x1p-23F;  // torch's epsilon for all zeros
  if (full_range) return amax > 0 ? amax / kFullInt8Max : kFullInt8Zero;
  return (amax > kMinAmax ? amax : kMinAmax) / kInt8Max;
}
/// What its elements are multiplied by; with the full range they are divided by the scale.
FUSEDMOE_HD static inline float int8_factor(float amax) {
  return kInt8Max / (amax > kMinAmax ? amax : kMinAmax);
}

/// Scale of a group of int16 elements: the power of two that brings amax to 2^14 or above.
static inline float int16_scale(float amax) {
  constexpr std::uint32_t kLeastExponent = 15, kLargestPower = 14;  // so the scale is normal
  const std::uint32_t exponent = std::bit_cast<std::uint32_t>(amax) >> 23;
  return std::bit_cast<float>(
      ((exponent > kLeastExponent ? exponent : kLeastExponent) - kLargestPower) << 23);
}

/// Scale of a row of e4m3 elements.
FUSEDMOE_HD static inline float e4m3_row_scale(float amax) {
  constexpr float kMinScale = 1.0F / (kE4M3Max * 512.0F);
  const float scale = amax / kE4M3Max;
  return scale > kMinScale ? scale : kMinScale;
}
/// Scale of a group of e4m3 elements, with `power_of_two` rounded up to one.
FUSEDMOE_HD static inline float e4m3_group_scale(float amax, bool power_of_two) {
  const float scale = (amax > kMinAmax ? amax : kMinAmax) / kE4M3Max;
  if (!power_of_two) return scale;
  return e8m0_value(e8m0_code(scale > kMinAmax ? scale : kMinAmax));
}

/// Value of a finite e4m3 code without a sign.
FUSEDMOE_HD static inline float e4m3_magnitude(std::uint8_t code) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 20) * 0x1p120F;
}

/// NVFP4: the e4m3 code of a block's scale, and what its elements are multiplied by.
struct Nvfp4Scale {
  std::uint8_t code;
  float factor;
};
FUSEDMOE_HD static inline Nvfp4Scale nvfp4_scale(float amax, float global_scale) {
  const float multiplier = 1.0F / global_scale;
  const std::uint8_t code = e4m3_code(multiplier * (amax * (1.0F / kE2M1Max)));
  const float decoded = e4m3_magnitude(code) * (1.0F / multiplier);
  return {code, code == 0 ? 0.0F : 1.0F / decoded};
}

}  // namespace fusedmoe::core
