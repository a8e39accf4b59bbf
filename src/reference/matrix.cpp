#include "reference/matrix.h"

#include <algorithm>
#include <array>
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

double decode_iq4(std::uint32_t code) {
  constexpr double kValues[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
  return kValues[code];
}

/// 2^(code - 127); 255 is NaN. Written as the bits of a double, whose exponent has bias 1023.
double decode_e8m0(std::uint8_t code) {
  if (code == 0xff) return kNan;
  return std::bit_cast<double>(static_cast<std::uint64_t>(code + 1023 - 127) << 52);
}

/// Sign, 4 exponent bits of bias 7, 3 fraction bits; all ones is NaN.
double compute_e4m3(std::uint8_t code) {
  const int exponent = code >> 3 & 0xf, fraction = code & 7;
  double magnitude = 0;
  if ((code & 0x7f) == 0x7f) {
    magnitude = kNan;
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, -9);
  } else {
    magnitude = std::ldexp(8 + fraction, exponent - 10);
  }
  return code & 0x80 ? -magnitude : magnitude;
}

double decode_e4m3(std::uint8_t code) {
  static const std::array<double, 256> kTable = [] {
    std::array<double, 256> table{};
    for (int i = 0; i < 256; ++i) table[i] = compute_e4m3(static_cast<std::uint8_t>(i));
    return table;
  }();
  return kTable[code];
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

/// To the nearest value of a format without upper end, ties to even; not of zero.
double round_to_format(const Format& format, double value) {
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  // In units of the last place; scaling by a power of two is exact, nearbyint takes ties to even.
  const int unit = exponent - (format.significand_bits - 1);
  return std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
}

double round_to_e4m3(double value) {
  if (!std::isfinite(value) || value == 0) return value;
  constexpr Format kE4M3{4, -6, 448};
  const double rounded = round_to_format(kE4M3, value);
  return std::copysign(std::min(std::abs(rounded), kE4M3.largest), value);
}

std::int64_t position(const TensorView& view, std::int64_t row, std::int64_t column) {
  return row * view.stride(0) + column * view.stride(1);
}

/// The bits of element `index` of a row whose elements of `width` bits fill words of `word` bits
/// from the low end.
template <typename Word>
std::uint32_t field(const TensorView& view, std::int64_t row, std::int64_t index, int width) {
  const std::int64_t per_word = static_cast<std::int64_t>(8 * sizeof(Word)) / width;
  const Word word = view.as<const Word>()[position(view, row, index / per_word)];
  return static_cast<std::uint32_t>(word >> (index % per_word * width)) & ((1U << width) - 1);
}

/// A scale; bytes that are called u8 are of the key's type.
double decode_scale(const void* scales, DType dtype, std::int64_t index) {
  const auto* codes = static_cast<const std::uint8_t*>(scales);
  if (dtype == DType::kE8M0) return decode_e8m0(codes[index]);
  if (dtype == DType::kE4M3) return decode_e4m3(codes[index]);
  if (dtype == DType::kU8) return codes[index];
  if (dtype == DType::kI8) return static_cast<std::int8_t>(codes[index]);
  return load(scales, dtype, index);
}

/// A value before its scale: an element of the format, or an unsigned code.
double decode_value(const TensorView& values, DType type, std::int64_t row, std::int64_t column) {
  switch (type) {
    case DType::kE4M3:
      return decode_e4m3(static_cast<std::uint8_t>(field<std::uint8_t>(values, row, column, 8)));
    case DType::kE2M1:
      return decode_e2m1(static_cast<int>(field<std::uint8_t>(values, row, column, 4)));
    case DType::kI4:
      return field<std::uint32_t>(values, row, column, 4);
    case DType::kIq4:
      return decode_iq4(field<std::uint32_t>(values, row, column, 4));
    case DType::kU8:
      return field<std::uint32_t>(values, row, column, 8);
    case DType::kI8:
      return values.as<const std::int8_t>()[position(values, row, column)];
    default:
      return load(values.data(), values.dtype(), position(values, row, column));
  }
}

/// What codes that stand for 0 hold where there are no zero points.
double middle(DType type) {
  return type == DType::kI4 ? 8 : type == DType::kU8 ? 128 : 0;
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
    case DType::kI16:
      return static_cast<const std::int16_t*>(data)[index];
    default:
      return kNan;
  }
}

double round_to(DType dtype, double value) {
  if (!std::isfinite(value) || value == 0) return value;
  const Format format = format_of(dtype);
  const double rounded = round_to_format(format, value);
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

double element(const WeightMatrix& m, const QuantKey& key, std::int64_t row, std::int64_t column) {
  const double value = decode_value(m.values, key.value, row, column);
  if (!key.scale) return value;
  const std::int64_t block_row = key.group.rows < 0 ? 0 : (m.first_row + row) / key.group.rows;
  const std::int64_t block_column =
      key.group.cols < 0 ? 0 : (m.first_col + column) / key.group.cols;
  const DType scale_type = m.scales.dtype() == DType::kU8 ? *key.scale : m.scales.dtype();
  const double scale =
      decode_scale(m.scales.data(), scale_type, position(m.scales, block_row, block_column));
  const double zero =
      key.symmetric
          ? middle(key.value)
          : m.zero_points
                .as<const std::uint8_t>()[position(m.zero_points, block_row, block_column)];
  if (key.global_group.cols > 0) {
    const auto factor = [&](std::int64_t index) {
      return load(m.global_scale.data(), DType::kF16, position(m.global_scale, row, index));
    };
    const std::int64_t block = column / key.global_group.cols;
    if (key.symmetric) return (value - zero) * scale * factor(block);
    return value * scale * factor(2 * block) - zero * factor(2 * block + 1);
  }
  const double product = (value - zero) * scale;
  if (!key.global_scale) return product;
  const auto* global = m.global_scale.as<const float>();
  if (key.global_group.rows < 0) return product * global[0];
  return round_to_e4m3(product) * global[row * m.global_scale.stride(0)];
}

double element(const QuantizedRow& row, std::int64_t column) {
  const QuantKey& key = row.key;
  double value = 0;
  if (key.value == DType::kE2M1) {
    value = decode_e2m1(row.codes[column / 2] >> (column % 2 * 4) & 0xf);
  } else if (key.value == DType::kI8) {
    value = static_cast<std::int8_t>(row.codes[column]);
  } else if (key.value == DType::kI16) {
    value = load(row.codes, DType::kI16, column);
  } else {
    value = decode_e4m3(row.codes[column]);
  }
  const std::int64_t group = key.group.cols < 0 ? 0 : column / key.group.cols;
  return value * decode_scale(row.scales, *key.scale, group) * row.global_scale;
}

double bias(const WeightMatrix& matrix, std::int64_t row) {
  if (!matrix.bias) return 0;
  return load(matrix.bias.data(), matrix.bias.dtype(), row * matrix.bias.stride(0));
}

}  // namespace fusedmoe::reference
