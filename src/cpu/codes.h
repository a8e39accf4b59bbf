// Decoding of packed codes and scales to fp32, in plain loops over 64 columns that the compiler
// vectorizes for each instruction set. Included by isa_*.cpp only.
//
// A Blocks policy turns one block of a stream (kernels.h) into steps of a dot product; those here
// are for fp32 dot products, one step per k, and are exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/rows.h"

namespace fusedmoe::cpu {
namespace {

inline float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

/// Computes with normal numbers only, so that the thread's denormal modes do not matter.
inline float e4m3_value(std::uint32_t code) {
  constexpr std::uint32_t kExponentShift = 127 - 7;
  const std::uint32_t magnitude = code & 0x7F;
  const float normal = float_of_bits((magnitude << 20) + (kExponentShift << 23));
  const float subnormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f;
  const float finite = magnitude < 8 ? subnormal : normal;
  const float value = magnitude == 0x7F ? float_of_bits(0x7FC00000) : finite;
  return code & 0x80 ? -value : value;
}

inline float e2m1_value(std::uint32_t code) {
  const std::uint32_t magnitude = code & 7;
  const float normal = float_of_bits((magnitude << 22) + (126u << 23));
  const float value = magnitude < 2 ? (magnitude ? 0.5f : 0.0f) : normal;
  return code & 8 ? -value : value;
}

/// Nearest E4M3 value, ties to even; saturates.
inline float round_to_e4m3(float value) {
  constexpr float kLargest = 448;
  value = value > kLargest ? kLargest : value;
  value = value < -kLargest ? -kLargest : value;
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const std::uint32_t exponent = bits & 0x7F800000u, smallest = (127u - 6) << 23;
  // Adding 1.5 x 2^20 units in the last place of E4M3 leaves the fp32 sum no finer bits.
  const float magic =
      float_of_bits(((exponent > smallest ? exponent : smallest) + (20u << 23)) | 0x400000u);
  return (value + magic) - magic;
}

/// 64 scales as fp32.
inline void decode_scales(ScaleType type, const std::byte* source, float* __restrict scales) {
  const auto* codes = reinterpret_cast<const std::uint8_t*>(source);
  const auto half = [&](int c) {
    std::uint16_t code;
    std::memcpy(&code, codes + 2 * c, 2);
    return code;
  };
  switch (type) {
    case ScaleType::kNone:
      for (int c = 0; c < kTileColumns; ++c) scales[c] = 1;
      break;
    case ScaleType::kF32:
      std::memcpy(scales, source, 4 * kTileColumns);
      break;
    case ScaleType::kF16:
      for (int c = 0; c < kTileColumns; ++c) {
        scales[c] = half_to_f32(half(c), Epilogue::Rounding::kF16);
      }
      break;
    case ScaleType::kBF16:
      for (int c = 0; c < kTileColumns; ++c) {
        scales[c] = float_of_bits(static_cast<std::uint32_t>(half(c)) << 16);
      }
      break;
    case ScaleType::kE4M3:
      for (int c = 0; c < kTileColumns; ++c) scales[c] = e4m3_value(codes[c]);
      break;
    case ScaleType::kE8M0:
      for (int c = 0; c < kTileColumns; ++c) {
        scales[c] = float_of_bits(codes[c] ? static_cast<std::uint32_t>(codes[c]) << 23 : 0x400000);
      }
      break;
  }
}

/// 64 zero points, negated: factors of the initial accumulators.
inline void decode_zeros(const std::byte* source, float* __restrict zeros) {
  const auto* codes = reinterpret_cast<const std::uint8_t*>(source);
  for (int c = 0; c < kTileColumns; ++c) {
    zeros[c] = -static_cast<float>(static_cast<std::int32_t>(codes[c]));
  }
}

/// One block of codes -> (kK, 64) fp32 values.
template <Codes kCodes>
struct BlocksToF32 {
  static constexpr int kK = kCodes == Codes::kE4M3 || kCodes == Codes::kInt8 ? 4 : 8;

  explicit BlocksToF32(const TileFormat& format)
      : zero_(format.zeros             ? 0
              : kCodes == Codes::kInt8 ? 128
                                       : 8) {}

  void decode(const std::byte* block, std::byte* target) const {
    auto* __restrict out = reinterpret_cast<float*>(target);
    if constexpr (kCodes == Codes::kE4M3) {
      const auto* codes = reinterpret_cast<const std::uint8_t*>(block);
      for (int k = 0; k < kK; ++k) {
        for (int c = 0; c < kTileColumns; ++c) {
          const std::uint8_t code = codes[c / 4 * 16 + k / 2 * 8 + c % 4 * 2 + k % 2];
          out[k * kTileColumns + c] = e4m3_value(code);
        }
      }
    } else {
      std::uint32_t words[kTileColumns];
      std::memcpy(words, block, sizeof(words));
      for (int k = 0; k < kK; ++k) {
        const int shift = kCodes == Codes::kInt8 ? 8 * k : 16 * (k % 2) + 2 * (k - k % 2);
        for (int c = 0; c < kTileColumns; ++c) out[k * kTileColumns + c] = value(words[c] >> shift);
      }
    }
  }

 private:
  float value(std::uint32_t code) const {
    if constexpr (kCodes == Codes::kE2M1) return e2m1_value(code & 15);
    const std::uint32_t mask = kCodes == Codes::kInt8 ? 255 : 15;
    return static_cast<float>(static_cast<std::int32_t>(code & mask) - zero_);
  }

  std::int32_t zero_;
};

// NOTE: `auto` would drop the attribute.
typedef std::uint32_t AnyBits __attribute__((may_alias));

/// (2 pairs, 64) fp32 values as bf16 pairs; exact, because none has more than 8 significant bits.
inline void to_bf16_pairs(const float* source, int pairs, std::byte* target) {
  const AnyBits* values = reinterpret_cast<const AnyBits*>(source);
  AnyBits* out = reinterpret_cast<AnyBits*>(target);
  for (int pair = 0; pair < pairs; ++pair) {
    for (int c = 0; c < kTileColumns; ++c) {
      out[pair * kTileColumns + c] = values[2 * pair * kTileColumns + c] >> 16 |
                                     (values[(2 * pair + 1) * kTileColumns + c] & 0xFFFF0000u);
    }
  }
}

template <class F32Blocks>
struct BlocksToBf16 {
  static constexpr int kK = F32Blocks::kK;

  explicit BlocksToBf16(const TileFormat& format) : blocks_(format) {}

  void decode(const std::byte* block, std::byte* target) const {
    alignas(64) float values[kK * kTileColumns];
    blocks_.decode(block, reinterpret_cast<std::byte*>(values));
    to_bf16_pairs(values, kK / 2, target);
  }

 private:
  F32Blocks blocks_;
};

/// Panels of a stream without scales.
template <class D, class Blocks>
class BlockPanels {
 public:
  BlockPanels(const std::byte* stream, const TileFormat& format)
      : stream_(stream), blocks_(format) {}

  const std::byte* panel(std::int64_t begin, std::int64_t count, std::byte* scratch) {
    constexpr std::int64_t kSteps = Blocks::kK / D::kPerStep;
    const std::byte* block = stream_ + begin / kSteps * kStepBytes;
    for (std::int64_t step = 0; step < count; step += kSteps, block += kStepBytes) {
      blocks_.decode(block, scratch + step * kStepBytes);
    }
    return scratch;
  }

 private:
  const std::byte* stream_;
  Blocks blocks_;
};

/// Panels of W4A8: weights are e4m3(code * factor), with a factor per group; fp32 or bf16 pairs.
template <class D>
class W4A8Panels {
 public:
  W4A8Panels(const std::byte* stream, const TileFormat& format)
      : stream_(stream), format_(format), codes_(format) {}

  const std::byte* panel(std::int64_t begin, std::int64_t count, std::byte* scratch) {
    constexpr std::int64_t kSteps = kK / D::kPerStep;
    for (std::int64_t step = begin; step < begin + count; step += kSteps) {
      decode(step * D::kPerStep, scratch + (step - begin) * kStepBytes);
    }
    return scratch;
  }

 private:
  static constexpr int kK = BlocksToF32<Codes::kInt4>::kK;

  void decode(std::int64_t k, std::byte* target) const {
    const std::byte* group = stream_ + k / format_.group * format_.group_bytes();
    alignas(64) float values[kK * kTileColumns], factors[kTileColumns];
    decode_scales(ScaleType::kE4M3, group, factors);
    codes_.decode(group + format_.header_bytes() + format_.code_bytes(k % format_.group),
                  reinterpret_cast<std::byte*>(values));
    for (int i = 0; i < kK; ++i) {
      for (int c = 0; c < kTileColumns; ++c) {
        float& value = values[i * kTileColumns + c];
        value = round_to_e4m3(value * factors[c]);
      }
    }
    if constexpr (D::kPerStep == 1) {
      std::memcpy(target, values, sizeof(values));
    } else {
      to_bf16_pairs(values, kK / 2, target);
    }
  }

  const std::byte* stream_;
  const TileFormat format_;
  BlocksToF32<Codes::kInt4> codes_;
};

}  // namespace
}  // namespace fusedmoe::cpu
