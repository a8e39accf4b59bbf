// Bit-exact conversions between fp32 and the storage formats.
//
// One template, Minifloat, serves every format with a sign, exponent and mantissa. It works on the
// bits alone, so neither the rounding mode nor flush-to-zero of the caller's thread changes a
// result. Sources: IEEE 754; OCP 8-bit Floating Point (OFP8) 1.0; OCP Microscaling (MX) 1.0.
#include "fusedmoe/quant.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "quant/quantize_elements.h"

namespace fusedmoe {
namespace {

constexpr std::uint32_t kF32Infinity = 0x7F800000;

/// A binary format of 1 + exponent_bits + mantissa_bits bits.
struct Traits {
  int exponent_bits, mantissa_bits, bias;
  std::uint32_t max_code;       ///< of the largest finite magnitude
  std::uint32_t overflow_code;  ///< what larger magnitudes become
  std::uint32_t nan_code;       ///< what NaN becomes
  std::uint32_t first_nan;      ///< without infinity this code and those above it are NaN
  bool has_infinity;            ///< all-ones exponents hold infinity (mantissa 0) and NaN
  bool nan_keeps_sign;          ///< the sign bit joins nan_code
};
constexpr Traits kF16Traits{5, 10, 15, 0x7BFF, 0x7C00, 0x7E00, 0x7C01, true, true};
constexpr Traits kE4M3Traits{4, 3, 7, 0x7E, 0x7E, 0x7F, 0x7F, false, false};
constexpr Traits kE5M2Traits{5, 2, 15, 0x7B, 0x7B, 0x7F, 0x7D, true, false};
constexpr Traits kE2M1Traits{2, 1, 1, 0x7, 0x7, 0x7, 0x8, false, false};

template <Traits kTraits>
struct Minifloat {
  static constexpr int kMantissaBits = kTraits.mantissa_bits;
  static constexpr int kSignBit = kTraits.exponent_bits + kMantissaBits;
  static constexpr int kMinExponent = 1 - kTraits.bias;

  static std::uint32_t narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 31) << kSignBit;
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude > kF32Infinity) return kTraits.nan_code | (kTraits.nan_keeps_sign ? sign : 0);

    const int biased = static_cast<int>(magnitude >> 23);
    const int exponent = biased ? biased - 127 : -126;
    const std::uint32_t significand = (magnitude & 0x7FFFFF) | (biased ? 0x800000 : 0);
    const int below_normal = exponent < kMinExponent ? kMinExponent - exponent : 0;
    const int shift = 23 - kMantissaBits + below_normal;
    if (shift > 24) return sign;  // under half of the smallest subnormal

    std::uint32_t code = significand >> shift;
    const std::uint32_t rest = significand & ((1U << shift) - 1);
    const std::uint32_t half = 1U << (shift - 1);
    code += (rest > half || (rest == half && (code & 1))) ? 1 : 0;
    // The hidden bit of `code` counts as one step of the exponent; a carry out of the mantissa
    // raises it by another.
    if (!below_normal) code += static_cast<std::uint32_t>(exponent - kMinExponent) << kMantissaBits;
    return sign | (code > kTraits.max_code ? kTraits.overflow_code : code);
  }

  static float widen(std::uint32_t code) {
    const std::uint32_t sign = (code >> kSignBit & 1) << 31;
    const std::uint32_t magnitude = code & ((1U << kSignBit) - 1);
    const std::uint32_t mantissa = magnitude & ((1U << kMantissaBits) - 1);
    const std::uint32_t exponent = magnitude >> kMantissaBits;
    const std::uint32_t mantissa32 = mantissa << (23 - kMantissaBits);
    if (magnitude >= kTraits.first_nan) {
      return std::bit_cast<float>(sign | kF32Infinity | 0x400000 | mantissa32);
    }
    if (kTraits.has_infinity && magnitude > kTraits.max_code) {
      return std::bit_cast<float>(sign | kF32Infinity);
    }
    if (exponent == 0) {
      const float step = std::bit_cast<float>(
          static_cast<std::uint32_t>(kMinExponent - kMantissaBits + 127) << 23);
      const float value = static_cast<float>(mantissa) * step;
      return sign ? -value : value;
    }
    return std::bit_cast<float>(
        sign | (exponent + 127 - static_cast<std::uint32_t>(kTraits.bias)) << 23 | mantissa32);
  }
};

inline float widen_bf16(std::uint16_t code) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(code) << 16);
}

// Without branches, so that loops over it vectorize.
inline std::uint16_t narrow_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const std::uint32_t nan = bits >> 16 | 0x40;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFF) > kF32Infinity ? nan : rounded);
}

/// f64 to f32 with "round to odd": a second rounding to a narrower format then gives what one
/// rounding from f64 would have given.
float f64_to_f32_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (!(static_cast<double>(nearest) != value) || std::isnan(value)) return nearest;
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::abs(static_cast<double>(nearest)) > std::abs(value)) --bits;
  return std::bit_cast<float>(bits | 1);
}

}  // namespace

float bf16_to_f32(std::uint16_t code) {
  return widen_bf16(code);
}
std::uint16_t f32_to_bf16(float value) {
  return narrow_bf16(value);
}

float f16_to_f32(std::uint16_t code) {
  return Minifloat<kF16Traits>::widen(code);
}
std::uint16_t f32_to_f16(float value) {
  return static_cast<std::uint16_t>(Minifloat<kF16Traits>::narrow(value));
}

float e4m3_to_f32(std::uint8_t code) {
  return Minifloat<kE4M3Traits>::widen(code);
}
std::uint8_t f32_to_e4m3(float value) {
  return static_cast<std::uint8_t>(Minifloat<kE4M3Traits>::narrow(value));
}

float e5m2_to_f32(std::uint8_t code) {
  return Minifloat<kE5M2Traits>::widen(code);
}
std::uint8_t f32_to_e5m2(float value) {
  return static_cast<std::uint8_t>(Minifloat<kE5M2Traits>::narrow(value));
}

float e2m1_to_f32(std::uint8_t code) {
  return Minifloat<kE2M1Traits>::widen(code & 0xF);
}
std::uint8_t f32_to_e2m1(float value) {
  return static_cast<std::uint8_t>(Minifloat<kE2M1Traits>::narrow(value));
}

float e8m0_to_f32(std::uint8_t code) {
  if (code == 255) return std::bit_cast<float>(0x7FC00000U);
  return std::bit_cast<float>(code == 0 ? 0x00400000U : static_cast<std::uint32_t>(code) << 23);
}

std::uint8_t f32_to_e8m0(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > kF32Infinity) return 255;
  if (bits >> 31) return 0;
  const std::uint32_t exponent = bits >> 23, mantissa = bits & 0x7FFFFF;
  // 2^-127, the value of code 0, is a subnormal of fp32.
  if (exponent == 0) return mantissa > 0x400000 ? 1 : 0;
  const std::uint32_t code = exponent + (mantissa ? 1 : 0);
  return static_cast<std::uint8_t>(code > 254 ? 254 : code);
}

int int4_to_int(std::uint8_t code) {
  return static_cast<int>((code & 0xF) ^ 8) - 8;
}

std::uint8_t f32_to_int4(float value) {
  if (std::isnan(value)) return 0;
  if (value >= 7) return 7;
  if (value <= -8) return 8;
  const float floor = std::floor(value);
  const float fraction = value - floor;  // exact for these magnitudes
  int rounded = static_cast<int>(floor);
  rounded += (fraction > 0.5F || (fraction == 0.5F && (rounded & 1))) ? 1 : 0;
  return static_cast<std::uint8_t>(rounded & 0xF);
}

namespace {

template <typename T>
T load(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store(void* data, std::int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * sizeof(T), &value, sizeof(T));
}

std::uint8_t load_nibble(const void* data, std::int64_t index) {
  return load<std::uint8_t>(data, index / 2) >> (index % 2 * 4) & 0xF;
}

}  // namespace

float load_f32(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kF64:
      return static_cast<float>(load<double>(data, index));
    case DType::kF32:
      return load<float>(data, index);
    case DType::kF16:
      return f16_to_f32(load<std::uint16_t>(data, index));
    case DType::kBF16:
      return widen_bf16(load<std::uint16_t>(data, index));
    case DType::kE4M3:
      return e4m3_to_f32(load<std::uint8_t>(data, index));
    case DType::kE5M2:
      return e5m2_to_f32(load<std::uint8_t>(data, index));
    case DType::kE8M0:
      return e8m0_to_f32(load<std::uint8_t>(data, index));
    case DType::kE2M1:
      return e2m1_to_f32(load_nibble(data, index));
    case DType::kI4:
      return static_cast<float>(int4_to_int(load_nibble(data, index)));
    case DType::kI8:
      return static_cast<float>(load<std::int8_t>(data, index));
    case DType::kU8:
      return static_cast<float>(load<std::uint8_t>(data, index));
    case DType::kI16:
      return static_cast<float>(load<std::int16_t>(data, index));
    case DType::kI32:
      return static_cast<float>(load<std::int32_t>(data, index));
    case DType::kI64:
      return static_cast<float>(load<std::int64_t>(data, index));
    case DType::kBool:
      return load<std::uint8_t>(data, index) ? 1.0F : 0.0F;
    case DType::kIq4:
      return core::iq4_value(load_nibble(data, index));
  }
  throw Error("dtype", core::to_string(static_cast<int>(dtype)), "a value of DType", Fault::kDType);
}

void store_f32(void* data, DType dtype, std::int64_t index, float value) {
  switch (dtype) {
    case DType::kF32:
      return store(data, index, value);
    case DType::kF16:
      return store(data, index, f32_to_f16(value));
    case DType::kBF16:
      return store(data, index, narrow_bf16(value));
    default:
      throw Error("dtype", std::string(name(dtype)), "f32, f16 or bf16", Fault::kDType);
  }
}

namespace {

/// One storage type of convert(): how it is read, and how a value of another type is rounded.
struct F64 {
  using Storage = double;
  static double load(double stored) { return stored; }
  static double round(double value) { return value; }
};
struct F32 {
  using Storage = float;
  static float load(float stored) { return stored; }
  static float round(double value) { return static_cast<float>(value); }
  static float round(float value) { return value; }
};
struct F16 {
  using Storage = std::uint16_t;
  static float load(std::uint16_t stored) { return f16_to_f32(stored); }
  static std::uint16_t round(double value) { return f32_to_f16(f64_to_f32_odd(value)); }
  static std::uint16_t round(float value) { return f32_to_f16(value); }
};
struct BF16 {
  using Storage = std::uint16_t;
  static float load(std::uint16_t stored) { return widen_bf16(stored); }
  static std::uint16_t round(double value) { return narrow_bf16(f64_to_f32_odd(value)); }
  static std::uint16_t round(float value) { return narrow_bf16(value); }
};

template <typename From, typename To>
void convert_row(const void* source, std::int64_t stride, void* destination, std::int64_t count) {
  if (stride == 1) {
    for (std::int64_t i = 0; i < count; ++i) {
      store<typename To::Storage>(destination, i,
                                  To::round(From::load(load<typename From::Storage>(source, i))));
    }
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      store<typename To::Storage>(
          destination, i, To::round(From::load(load<typename From::Storage>(source, i * stride))));
    }
  }
}

using ConvertRow = void (*)(const void*, std::int64_t, void*, std::int64_t);

template <typename From>
constexpr std::array<ConvertRow, 4> kConvertFrom{convert_row<From, F64>, convert_row<From, F32>,
                                                 convert_row<From, F16>, convert_row<From, BF16>};

/// Position in the tables above, -1 for a dtype that convert() does not take.
int convert_index(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0;
    case DType::kF32:
      return 1;
    case DType::kF16:
      return 2;
    case DType::kBF16:
      return 3;
    default:
      return -1;
  }
}

void check_convert(const TensorView& view, const char* argument) {
  FUSEDMOE_CHECK_FAULT(view.defined() && convert_index(view.dtype()) >= 0, kDType, argument,
                       core::describe(view), "a tensor of f64, f32, f16 or bf16");
  FUSEDMOE_CHECK_FAULT(view.device().is_cpu(), kDevice, argument, to_string(view.device()),
                       "on the cpu");
}

}  // namespace

void convert(const TensorView& source, const TensorView& destination) {
  check_convert(source, "source");
  check_convert(destination, "destination");
  FUSEDMOE_CHECK_FAULT(destination.shape() == source.shape(), kShape, "destination",
                       core::describe(destination),
                       core::format("of shape {}", to_string(source.shape())));
  FUSEDMOE_CHECK_FAULT(destination.contiguous(), kLayout, "destination",
                       core::format("strided {}", to_string(destination.strides())), "contiguous");
  const std::int64_t count = source.numel();
  if (count == 0) return;

  static constexpr std::array<std::array<ConvertRow, 4>, 4> kTable{
      kConvertFrom<F64>, kConvertFrom<F32>, kConvertFrom<F16>, kConvertFrom<BF16>};
  const ConvertRow convert_row =
      kTable[static_cast<std::size_t>(convert_index(source.dtype()))]
            [static_cast<std::size_t>(convert_index(destination.dtype()))];
  const int source_bytes = bits(source.dtype()) / 8;
  const int destination_bytes = bits(destination.dtype()) / 8;
  if (source.contiguous()) {
    return convert_row(source.data(), 1, destination.data(), count);
  }
  const int last = source.rank() - 1;
  const std::int64_t row = source.size(last);
  Shape index = source.shape();
  for (int dim = 0; dim <= last; ++dim) index[dim] = 0;
  for (std::int64_t done = 0; done < count; done += row) {
    std::int64_t offset = 0;
    for (int dim = 0; dim < last; ++dim) offset += index[dim] * source.stride(dim);
    convert_row(source.as<const char>() + offset * source_bytes, source.stride(last),
                destination.as<char>() + done * destination_bytes, row);
    for (int dim = last - 1; dim >= 0 && ++index[dim] == source.size(dim); --dim) index[dim] = 0;
  }
}

}  // namespace fusedmoe
