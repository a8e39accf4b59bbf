#include "reference/matrix.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace fusedmoe::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Sign, 5 exponent bits of bias 15, 10 fraction bits.
double decode_f16(std::uint16_t code) {
  const int exponent = code >> 10 & 0x1f, fraction = code & 0x3ff;
  double magnitude = 0;
  if (exponent == 0x1f) {
    magnitude = fraction ? kNan : kInfinity;
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, -24);
  } else {
    magnitude = std::ldexp(1024 + fraction, exponent - 25);
  }
  return code & 0x8000 ? -magnitude : magnitude;
}

/// The upper half of an f32.
double decode_bf16(std::uint16_t code) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
}

double decode_e2m1(int code) {
  constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

/// 2^(code - 127); 255 is NaN. Written as the bits of a double, whose exponent has bias 1023.
double decode_e8m0(std::uint8_t code) {
  if (code == 0xff) return kNan;
  return std::bit_cast<double>(static_cast<std::uint64_t>(code + 1023 - 127) << 52);
}

/// Inverse of decode_f16 for values that f16 has.
std::uint16_t encode_f16(double value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | 0x7c00);
  if (magnitude < 0x1p-14) return static_cast<std::uint16_t>(sign | int(magnitude * 0x1p24));
  const int exponent = std::ilogb(magnitude);
  const int fraction = static_cast<int>(std::ldexp(magnitude, 10 - exponent)) - 1024;
  return static_cast<std::uint16_t>(sign | (exponent + 15) << 10 | fraction);
}

struct Format {
  int significand_bits;  // with the hidden one
  int min_exponent;      // of the smallest normal number
  double largest;
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return {11, -14, 65504.0};
    case DType::kBF16:
      return {8, -126, 0x1.fep127};
    default:
      return {24, -126, static_cast<double>(std::numeric_limits<float>::max())};
  }
}

}  // namespace

double load(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[index];
    case DType::kF16:
      return decode_f16(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kBF16:
      return decode_bf16(static_cast<const std::uint16_t*>(data)[index]);
    default:
      return kNan;
  }
}

double round_to(DType dtype, double value) {
  if (!std::isfinite(value) || value == 0) return value;
  const Format format = format_of(dtype);
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  // In units of the last place; scaling by a power of two is exact, nearbyint takes ties to even.
  const int unit = exponent - (format.significand_bits - 1);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
  return std::abs(rounded) > format.largest ? std::copysign(kInfinity, value) : rounded;
}

void store(void* data, DType dtype, std::int64_t index, double value) {
  const double rounded = round_to(dtype, value);
  switch (dtype) {
    case DType::kBF16:
      static_cast<std::uint16_t*>(data)[index] = static_cast<std::uint16_t>(
          std::bit_cast<std::uint32_t>(static_cast<float>(rounded)) >> 16);
      break;
    case DType::kF16:
      static_cast<std::uint16_t*>(data)[index] = encode_f16(rounded);
      break;
    default:
      static_cast<float*>(data)[index] = static_cast<float>(rounded);
      break;
  }
}

double element(const WeightMatrix& matrix, std::int64_t row, std::int64_t column) {
  const TensorView& values = matrix.values;
  if (!matrix.scales) {
    return load(values.data(), values.dtype(), row * values.stride(0) + column * values.stride(1));
  }
  const auto* codes = values.as<const std::uint8_t>();
  const auto* scales = matrix.scales.as<const std::uint8_t>();
  const std::uint8_t pair = codes[row * values.stride(0) + column / 2 * values.stride(1)];
  const std::uint8_t scale =
      scales[row * matrix.scales.stride(0) + column / 32 * matrix.scales.stride(1)];
  return decode_e2m1(column % 2 == 0 ? pair & 0xf : pair >> 4) * decode_e8m0(scale);
}

double bias(const WeightMatrix& matrix, std::int64_t row) {
  if (!matrix.bias) return 0;
  return load(matrix.bias.data(), matrix.bias.dtype(), row * matrix.bias.stride(0));
}

}  // namespace fusedmoe::reference
