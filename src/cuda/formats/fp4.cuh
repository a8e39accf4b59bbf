// Operands of FP4 (E2M1) weights with 16-bit activations: weights are decoded in registers,
// exactly, and are the tensor cores' operand A. MXFP4 has E8M0 scales per 32 of K, NVFP4 E4M3 ones
// per 16.
#pragma once

#include "cuda/formats/activations.cuh"
#include "cuda/formats/codes.h"
#include "cuda/formats/packed_block.h"

namespace fusedmoe::cuda {

/// E2M1 codes -> 16-bit elements times 2^-kExponent, times a multiplier for each of two rows.
template <typename Element>
struct E2m1Decoder;

template <>
struct E2m1Decoder<__nv_bfloat16> {
  using Layout = E2m1Codes;
  static constexpr int kExponent = 126;
  static constexpr std::uint32_t kMask = 0x81C081C0;  // sign, and three bits around the point

  /// The pair in the masked bits, times a multiplier.
  __device__ static std::uint32_t decode_pair(std::uint32_t bits, __nv_bfloat162 multiplier) {
    bits &= kMask;
    const __nv_bfloat162 pair = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), multiplier);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }

  /// The codes of two steps. Shifts to the left go to another pipe than masks.
  __device__ static void decode(std::uint32_t x, std::uint32_t y,
                                const std::uint32_t (&multipliers)[2], std::uint32_t (&a)[4],
                                std::uint32_t (&b)[4]) {
    // Both halves of a pair from one: the multiplication takes it so, at no cost.
    const auto& of_x = reinterpret_cast<const __nv_bfloat162&>(multipliers[0]);
    const auto& of_y = reinterpret_cast<const __nv_bfloat162&>(multipliers[1]);
    const std::uint32_t rest =
        ((x << 1) & 0x90009000) | ((y >> 6) & 0x01B001B0) | ((x >> 7) & 0x00480048);
    a[0] = decode_pair(x, __low2bfloat162(of_x));
    a[1] = decode_pair(x << 3, __high2bfloat162(of_x));
    a[2] = decode_pair(x << 6, __low2bfloat162(of_x));
    a[3] = decode_pair(rest, __high2bfloat162(of_x));
    b[0] = decode_pair(y, __low2bfloat162(of_y));
    b[1] = decode_pair(y << 3, __high2bfloat162(of_y));
    b[2] = decode_pair(y << 6, __low2bfloat162(of_y));
    b[3] = decode_pair(rest << 3, __high2bfloat162(of_y));
  }
};

template <>
struct E2m1Decoder<__half> {
  using Layout = NibbleCodes;
  static constexpr int kExponent = 14;

  __device__ static void decode_step(std::uint32_t x, std::uint32_t multipliers,
                                     std::uint32_t (&a)[4]) {
    const auto& both = reinterpret_cast<const __half2&>(multipliers);
    const __half2 rows[2] = {__low2half2(both), __high2half2(both)};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const std::uint32_t high = x << (12 - 4 * pair);
      const std::uint32_t bits = (high & 0x80008000) | (high >> 3 & 0x0E000E00);
      const __half2 value = __hmul2(reinterpret_cast<const __half2&>(bits), rows[pair % 2]);
      a[pair] = reinterpret_cast<const std::uint32_t&>(value);
    }
  }
  __device__ static void decode(std::uint32_t x, std::uint32_t y,
                                const std::uint32_t (&multipliers)[2], std::uint32_t (&a)[4],
                                std::uint32_t (&b)[4]) {
    decode_step(x, multipliers[0], a);
    decode_step(y, multipliers[1], b);
  }
};

/// What both formats share.
template <typename Element, bool kQuantizesBf16>
struct Fp4Operands : DecodedOperands<Element, 4, kQuantizesBf16> {
  using Decoder = E2m1Decoder<Element>;
  using Layout = typename Decoder::Layout;
  static constexpr int kCodeBytes = kBlockRows * Operands16Bit<Element>::kBlockK / 2;
};

/// Scales of a block: 4 bytes for each (w, g), exponent fields of the multipliers of rows (g, g +
/// 8) of K 0-31, 32-63 in the order g:0, g:1, g+8:0, g+8:1. A multiplier is 2^kExponent times the
/// scale over the matrix's own power of two. f16 multipliers below 2^-14 are 0: with the largest
/// scale at 1, weights are exact down to 2^-24, and what is smaller counts as 0.
template <typename Element, bool kQuantizesBf16 = false>
struct Mxfp4Operands : Fp4Operands<Element, kQuantizesBf16> {
  using typename Fp4Operands<Element, kQuantizesBf16>::Decoder;
  using Fp4Operands<Element, kQuantizesBf16>::kCodeBytes;
  static constexpr int kGroupK = 32, kGroups = 2, kScaleBytes = 128;
  static constexpr PackedBlock kBlock{kCodeBytes + kScaleBytes, 64};
  static constexpr bool kIsBf16 = Decoder::kExponent == 126;
  /// The exponent field is the E8M0 code + kOffset - the matrix's exponent.
  static constexpr int kOffset = Decoder::kExponent + (kIsBf16 ? 0 : 15 - 127);

  /// What one thread of 128 needs of a packed block.
  struct Codes {
    uint4 words;
    std::uint32_t exponents;
  };
  template <typename Block>
  __device__ static Codes load(const Block& block, int thread) {
    const int rows = thread / 32 * 8 + thread % 32 / 4;
    return {block.template read<uint4>(thread * 16),
            block.template read<std::uint32_t>(kCodeBytes + rows * 4)};
  }
  /// Multipliers of rows (g, g + 8) in one half of K.
  __device__ static std::uint32_t multipliers(std::uint32_t exponents, int half) {
    if constexpr (kIsBf16) {
      constexpr std::uint32_t kExponents = 0x7F807F80;
      return half == 0 ? exponents << 7 & kExponents : exponents >> 1 & kExponents;
    } else {
      return (exponents >> (8 * half) & 0x001F001F) << 10;
    }
  }
  /// -> the register operands of two steps of 16 of K, of the first or second half of the block.
  __device__ static void decode(const Codes& codes, int half, std::uint32_t (&a)[2][4]) {
    const std::uint32_t both = multipliers(codes.exponents, half);
    const std::uint32_t twice[2] = {both, both};
    if (half == 0) {
      Decoder::decode(codes.words.x, codes.words.y, twice, a[0], a[1]);
    } else {
      Decoder::decode(codes.words.z, codes.words.w, twice, a[0], a[1]);
    }
  }
};

/// Scales of a block: 8 bytes for each (w, g), two bits more than E4M3 has of exponent and none of
/// sign: (exponent + 10) << 3 | mantissa of rows (g, g + 8) of K 0-15, then of K 16-31, ... The
/// multiplier is the scale times 2^(kExponent - kScaleShift), which the epilogue undoes; a scale of
/// 0 has codes of 0.
template <typename Element>
struct Nvfp4Operands : Fp4Operands<Element, true> {
  using typename Fp4Operands<Element, true>::Decoder;
  using Fp4Operands<Element, true>::kCodeBytes;
  static constexpr int kGroupK = 16, kGroups = 4, kScaleBytes = 256;
  static constexpr PackedBlock kBlock{kCodeBytes + kScaleBytes, 64};
  static constexpr bool kIsBf16 = Decoder::kExponent == 126;
  static constexpr int kScaleShift = kIsBf16 ? 9 : 7;  // 448 times 2^(kExponent - it) is finite
  static constexpr int kFixedExponent = kScaleShift;

  struct Codes {
    uint4 words;
    uint2 scales;
  };
  template <typename Block>
  __device__ static Codes load(const Block& block, int thread) {
    const int rows = thread / 32 * 8 + thread % 32 / 4;
    return {block.template read<uint4>(thread * 16),
            block.template read<uint2>(kCodeBytes + rows * 8)};
  }
  /// Of the two bytes at `selector`, one for each row.
  __device__ static std::uint32_t multiplier(std::uint32_t scales, std::uint32_t selector) {
    constexpr int kMantissa = kIsBf16 ? 7 : 10;
    constexpr int kBias = (kIsBf16 ? 127 : 15) + Decoder::kExponent - kScaleShift - 10;
    constexpr std::uint32_t kBoth = 0x00010001U * (kBias << kMantissa);
    return __byte_perm(scales, 0, selector) * (1U << (kMantissa - 3)) + kBoth;
  }
  __device__ static void decode(const Codes& codes, int half, std::uint32_t (&a)[2][4]) {
    const std::uint32_t scales = half == 0 ? codes.scales.x : codes.scales.y;
    const std::uint32_t both[2] = {multiplier(scales, 0x4140), multiplier(scales, 0x4342)};
    if (half == 0) {
      Decoder::decode(codes.words.x, codes.words.y, both, a[0], a[1]);
    } else {
      Decoder::decode(codes.words.z, codes.words.w, both, a[0], a[1]);
    }
  }
};

struct Mxfp4Bf16Operands : Mxfp4Operands<__nv_bfloat16> {
  static constexpr const WeightFormat& kFormat = formats::kMxfp4Bf16;
};
/// With quantized activations, for which the largest of those tiles have no registers.
struct Mxfp4QuantizedOperands : Mxfp4Operands<__nv_bfloat16, true> {
  static constexpr const WeightFormat& kFormat = formats::kMxfp4Quantized;
};
struct Mxfp4F16Operands : Mxfp4Operands<__half> {
  static constexpr const WeightFormat& kFormat = formats::kMxfp4F16;
};
struct Nvfp4Bf16Operands : Nvfp4Operands<__nv_bfloat16> {
  static constexpr const WeightFormat& kFormat = formats::kNvfp4Bf16;
};
struct Nvfp4F16Operands : Nvfp4Operands<__half> {
  static constexpr const WeightFormat& kFormat = formats::kNvfp4F16;
};

}  // namespace fusedmoe::cuda
