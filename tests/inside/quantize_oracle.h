// Quantizers written straight from docs/number-formats.md, "Quantization formulas": tables of
// values, binary search, std::round and std::ilogb instead of bit patterns. Floating-point
// operations whose order matters are in that order.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "fusedmoe/quant.h"

namespace fusedmoe::oracle {

/// Value of the magnitude code 0 .. 126 of E4M3.
inline double e4m3_value(int code) {
  const int exponent = code >> 3, mantissa = code & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

inline double e4m3_decode(std::uint8_t code) {
  if ((code & 0x7f) == 0x7f) return std::nan("");
  return code & 0x80 ? -e4m3_value(code & 0x7f) : e4m3_value(code);
}

inline double e2m1_decode(int code) {
  constexpr std::array<double, 8> kValues{0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kValues[code & 7] : kValues[code & 7];
}

inline double e8m0_decode(std::uint8_t code) {
  return code == 255 ? std::nan("") : std::ldexp(1.0, code - 127);
}

/// Nearest, ties to even, saturating; NaN gives 0x7f.
inline std::uint8_t e4m3(double x) {
  static const std::vector<double> ties = [] {
    std::vector<double> result;
    for (int code = 0; code < 126; ++code) {
      result.push_back((e4m3_value(code) + e4m3_value(code + 1)) / 2);
    }
    return result;
  }();
  if (std::isnan(x)) return 0x7f;
  const double magnitude = std::abs(x);
  const auto above = std::lower_bound(ties.begin(), ties.end(), magnitude);
  auto code = static_cast<int>(above - ties.begin());  // ties below the magnitude
  if (above != ties.end() && *above == magnitude && code % 2 == 1) ++code;
  return static_cast<std::uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

/// The table of intervals; NaN gives +6.
inline std::uint8_t e2m1(double x) {
  const double m = std::abs(x);
  const int sign = std::signbit(x) ? 8 : 0;
  if (std::isnan(x)) return 7;
  if (m <= 0.25) return static_cast<std::uint8_t>(sign | 0);
  if (m < 0.75) return static_cast<std::uint8_t>(sign | 1);
  if (m <= 1.25) return static_cast<std::uint8_t>(sign | 2);
  if (m < 1.75) return static_cast<std::uint8_t>(sign | 3);
  if (m <= 2.5) return static_cast<std::uint8_t>(sign | 4);
  if (m < 3.5) return static_cast<std::uint8_t>(sign | 5);
  if (m <= 5) return static_cast<std::uint8_t>(sign | 6);
  return static_cast<std::uint8_t>(sign | 7);
}

inline std::uint8_t int8(float x) {
  return static_cast<std::uint8_t>(static_cast<std::int8_t>(std::isnan(x) ? 0 : std::round(x)));
}

/// Nearest, ties to even, saturating.
inline int int16(float x) {
  if (std::isnan(x)) return 0;
  return static_cast<int>(std::nearbyint(std::clamp(x, -32767.0F, 32767.0F)));
}

inline float amax(const float* x, std::int64_t count) {
  float largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isnan(x[i])) largest = std::max(largest, std::abs(x[i]));
  }
  return largest;
}

/// Smallest n with 2^n >= x, for positive finite x.
inline int ceil_log2(float x) {
  int exponent = 0;
  return std::frexp(x, &exponent) == 0.5F ? exponent - 1 : exponent;
}

/// floor(log2 x); infinity counts as 2^128.
inline int floor_log2(float x) {
  return std::isinf(x) ? 128 : std::ilogb(x);
}

/// E8M0 code of an MX block.
inline std::uint8_t mx_scale(float a, bool e2m1, MxScaleRule rule) {
  if (a == 0) return 0;
  const float largest = e2m1 ? 6 : 448;
  const int power = e2m1 ? 2 : 8;
  int exponent = 0;
  switch (rule) {
    case MxScaleRule::kOcp:
      exponent = floor_log2(a) - power;
      break;
    case MxScaleRule::kEven: {
      // From this mantissa on, one more bit than elements have rounds up to the next power of two.
      const double carry = e2m1 ? 1.75 : 1.9375;
      const int floor = floor_log2(a);
      exponent = floor - power + (!std::isinf(a) && std::ldexp(a, -floor) >= carry ? 1 : 0);
      break;
    }
    case MxScaleRule::kCeil: {
      const float t = e2m1 ? a / largest : a * (1 / largest);
      if (t == 0) return 0;
      exponent = std::isinf(t) ? 127 : ceil_log2(t);
      if (e2m1) exponent = std::max(exponent, -126);
      break;
    }
    case MxScaleRule::kFloor: {
      const float t = a * (1 / largest);
      exponent = t == 0 ? -127 : std::isinf(t) ? 127 : std::ilogb(t);
      break;
    }
  }
  return static_cast<std::uint8_t>(std::clamp(exponent + 127, 0, 254));
}

/// One block: codes (of int8 as bytes), and the scale, whose code is the value for E8M0 and E4M3.
struct Block {
  std::vector<int> codes;
  double scale = 0;
};

inline Block mx_block(const float* x, std::int64_t count, bool e2m1_elements, MxScaleRule rule) {
  Block block;
  const float a = amax(x, count);
  const std::uint8_t code = mx_scale(a, e2m1_elements, rule);
  block.scale = code;
  for (std::int64_t i = 0; i < count; ++i) {
    const double scaled = std::ldexp(static_cast<double>(x[i]), 127 - code);
    if (e2m1_elements) {
      block.codes.push_back(code == 0 && !std::isnan(x[i]) ? 0 : e2m1(scaled));
    } else {
      block.codes.push_back(a == 0 && !std::isnan(x[i]) ? 0 : e4m3(scaled));
    }
  }
  return block;
}

inline Block nvfp4_block(const float* x, std::int64_t count, float global_scale) {
  Block block;
  const float gs = 1 / global_scale, v = amax(x, count);
  const float sixth = v * (1 / 6.0F);
  const std::uint8_t code = e4m3(gs * sixth);
  block.scale = code;
  const auto sf = static_cast<float>(e4m3_decode(code));
  const float rgs = 1 / gs;
  const float o = code == 0 || v == 0 ? 0 : 1 / (sf * rgs);
  for (std::int64_t i = 0; i < count; ++i) block.codes.push_back(e2m1(x[i] * o));
  return block;
}

/// Row or group of e4m3 or integer codes with an f32 or (as a value) power-of-two scale.
inline Block f32_block(const float* x, std::int64_t count, const QuantKey& key) {
  Block block;
  const float a = amax(x, count);
  if (key.value == DType::kI8) {
    const float limited = std::max(a, 1e-10F), factor = 127 / limited;
    block.scale = limited / 127;
    for (std::int64_t i = 0; i < count; ++i) block.codes.push_back(int8(x[i] * factor));
    return block;
  }
  if (key.value == DType::kI16) {
    const int power = a > 0 ? std::max(floor_log2(a) - 14, -126) : -126;
    block.scale = std::ldexp(1.0, power);
    for (std::int64_t i = 0; i < count; ++i) block.codes.push_back(int16(std::ldexp(x[i], -power)));
    return block;
  }
  float s = 0;
  if (key.group.cols < 0) {
    s = std::max(a / 448, static_cast<float>(1.0 / (448 * 512)));
  } else {
    s = std::max(a, 1e-10F) / 448;
    if (key.scale == DType::kE8M0) {
      s = std::max(s, 1e-10F);
      s = std::ldexp(1.0F, std::isinf(s) ? 127 : ceil_log2(s));
    }
  }
  block.scale = s;
  for (std::int64_t i = 0; i < count; ++i) block.codes.push_back(e4m3(x[i] / s));
  return block;
}

}  // namespace fusedmoe::oracle
