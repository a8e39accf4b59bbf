// Values of single codes, for tables, and the scales and zero points of a stream as fp32 vectors.
// Included by isa_*.cpp only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"
#include "quant/quantize_elements.h"

namespace fusedmoe::cpu {
namespace {

// ---- Single values, for tables ------------------------------------------------------------------

/// The value of a 4-bit code: E2M1, IQ4, or an integer minus `zero`.
template <Codes kCodes>
inline float nibble_value(std::uint32_t code, int zero) {
  if constexpr (kCodes == Codes::kE2M1 || kCodes == Codes::kMxfp4) {
    return core::e2m1_value(static_cast<std::uint8_t>(code));
  }
  if constexpr (kCodes == Codes::kIq4) return core::iq4_value(static_cast<std::uint8_t>(code));
  return static_cast<float>(static_cast<int>(code) - zero);
}

/// The zero point that decoding subtracts from integer codes. It is 0 where the stream has its own
/// zero points: those are already in the accumulators' initial values.
inline int implied_zero(const TileFormat& format) {
  return format.zeros ? 0 : format.codes == Codes::kInt8 ? 128 : 8;
}

// ---- Scales -------------------------------------------------------------------------------------

/// Values of E4M3 codes, one in each word.
template <class S>
inline typename S::F e4m3_values(typename S::I codes) {
  using I = typename S::I;
  const I magnitude = codes & 0x7F;
  const I subnormal = reinterpret_cast<I>(S::to_float(magnitude) * S::set1(0x1p-9f));
  const I finite = S::select(magnitude < 8, subnormal, (magnitude << 20) + (120 << 23));
  const I bits = S::select(magnitude == 0x7F, I{} + 0x7FC00000, finite);
  return S::as_float(bits | ((codes & 0x80) << 24));
}

/// Where an instruction set has its own way to widen E4M3 codes without a sign.
template <class S>
concept WidensE4m3 = requires(const std::byte* codes) {
  S::load_finite_e4m3(codes);
};

/// Scales of columns W v .. W v + W - 1 of a header. Computes with normal numbers only, so that the
/// thread's denormal modes do not matter.
template <class S, ScaleType kType>
inline typename S::F load_scale(const std::byte* header, int v) {
  using I = typename S::I;
  constexpr int kW = S::kWidth;
  if constexpr (kType == ScaleType::kF32) {
    return S::load(reinterpret_cast<const float*>(header) + kW * v);
  } else if constexpr (kType == ScaleType::kF16) {
    return S::load_f16(header + 2 * kW * v);
  } else if constexpr (kType == ScaleType::kBF16) {
    return S::load_bf16(header + 2 * kW * v);
  } else if constexpr (kType == ScaleType::kE4M3) {
    return e4m3_values<S>(S::load_u8(header + kW * v));
  } else if constexpr (kType == ScaleType::kE8M0) {
    const I codes = S::load_u8(header + kW * v);
    return S::as_float(S::select(codes == 0, I{} + 0x400000, codes << 23));
  } else {
    return S::set1(1.0f);
  }
}

template <class S, ScaleType kType>
inline void decode_scales_of(const std::byte* header, float* scales) {
  if constexpr (kType == ScaleType::kE4M3 && WidensE4m3<S>) {
    if (!S::any_e4m3_nan(header)) [[likely]] {
#pragma GCC unroll 8
      for (int v = 0; v < kTileColumns / S::kWidth; ++v) {
        S::store(scales + v * S::kWidth, S::load_finite_e4m3(header + v * S::kWidth));
      }
      return;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kTileColumns / S::kWidth; ++v) {
    S::store(scales + v * S::kWidth, load_scale<S, kType>(header, v));
  }
}

/// 64 scales as fp32.
template <class S>
[[gnu::noinline]] void decode_scales(ScaleType type, const std::byte* header, float* scales) {
  switch (type) {
    case ScaleType::kF32:
      return decode_scales_of<S, ScaleType::kF32>(header, scales);
    case ScaleType::kF16:
      return decode_scales_of<S, ScaleType::kF16>(header, scales);
    case ScaleType::kBF16:
      return decode_scales_of<S, ScaleType::kBF16>(header, scales);
    case ScaleType::kE4M3:
      return decode_scales_of<S, ScaleType::kE4M3>(header, scales);
    case ScaleType::kE8M0:
      return decode_scales_of<S, ScaleType::kE8M0>(header, scales);
    case ScaleType::kNone:
      return decode_scales_of<S, ScaleType::kNone>(header, scales);
  }
}

/// Zero points of one vector of columns, negated: factors of the initial accumulators.
template <class S>
inline typename S::F load_zeros(const std::byte* zeros, int v) {
  return S::to_float(-S::load_u8(zeros + S::kWidth * v));
}

/// The E8M0 codes of an MXFP4 tile's columns. Streams hold the differences from group to group.
template <class S>
class Mxfp4Scales {
 public:
  static constexpr int kHeaderBytes = kMxfp4HeaderBytes;  // of a tile
  static constexpr int kGroupK = kGroup;
  Mxfp4Scales() = default;
  explicit Mxfp4Scales(const std::byte* tile) {
    for (int v = 0; v < kVectors; ++v) code_[v] = S::load_u8(tile + S::kWidth * v);
  }
  /// Goes to a group, given its header.
  void advance(const std::byte* header) {
    for (int v = 0; v < kVectors; ++v) code_[v] -= S::load_u8(header + S::kWidth * v) - 127;
  }
  typename S::F scale(int v) const { return S::as_float(code_[v] << 23); }
  void store(float* scales) const {
    for (int v = 0; v < kVectors; ++v) S::store(scales + v * S::kWidth, scale(v));
  }

 private:
  static constexpr int kVectors = kTileColumns / S::kWidth;
  typename S::I code_[kVectors];
};

/// The scales of an NVFP4 tile's columns, by the same interface.
template <class S>
class Nvfp4Scales {
 public:
  static constexpr int kHeaderBytes = 0;
  static constexpr int kGroupK = 16;
  explicit Nvfp4Scales(const std::byte*) {}
  void advance(const std::byte* header) { decode_scales_of<S, ScaleType::kE4M3>(header, scales_); }
  typename S::F scale(int v) const { return S::load(scales_ + S::kWidth * v); }

 private:
  alignas(64) float scales_[kTileColumns];
};

/// 2^(code - 127) of E8M0 codes that are normal numbers.
template <class S>
inline typename S::F load_power_of_two(const std::byte* codes, int v) {
  return S::as_float(S::load_u8(codes + S::kWidth * v) << 23);
}

}  // namespace
}  // namespace fusedmoe::cpu
