// Operands of 4- and 8-bit integer weights with 16-bit activations: (code - zero point) times a
// scale of the activations' type, rounded once, in registers.
//
// Behind the codes of a block lie, for each (w, g) and each group of K, the scales of rows g and
// g + 8, then in the same order the bytes of their zero points, if there are any.
#pragma once

#include "cuda/formats/activations.cuh"
#include "cuda/formats/codes.h"
#include "cuda/formats/packed_block.h"

namespace fusedmoe::cuda {

/// Arithmetic on two elements in one register.
template <typename Element>
struct Pairs;
template <>
struct Pairs<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  __device__ static Pair low(Pair x) { return __low2bfloat162(x); }
  __device__ static Pair high(Pair x) { return __high2bfloat162(x); }
  /// 128 + n for n below 128.
  static constexpr std::uint32_t kInteger = 0x43004300;
};
template <>
struct Pairs<__half> {
  using Pair = __half2;
  __device__ static Pair low(Pair x) { return __low2half2(x); }
  __device__ static Pair high(Pair x) { return __high2half2(x); }
  /// 1024 + n for n below 1024.
  static constexpr std::uint32_t kInteger = 0x64006400;
};

/// `kScaleGroups`: groups of K of a block, each with scales of its own. One and two of 4-bit codes
/// are policies of their own: where one group would do, two make blocks 6 to 9 % larger.
template <typename Element, int kCodeBits, int kScaleGroups>
struct IntegerOperands : DecodedOperands<Element, kCodeBits> {
  using Layout = std::conditional_t<kCodeBits == 4, NibbleCodes, ByteCodes>;
  using P = Pairs<Element>;
  using Pair = typename P::Pair;
  static constexpr int kGroups = kScaleGroups, kGroupK = 64 / kGroups;
  static constexpr int kCodeBytes = kBlockRows * 64 * kCodeBits / 8;
  static constexpr int kZeroPointBytes = kCodeBytes + 128 * kGroups;  // where they begin
  static constexpr int kScaleBytes = 192 * kGroups;
  static constexpr bool kHasZeroPoints = true;
  static constexpr int kScaleExponent = 0;  ///< scales are packed as they are
  static constexpr PackedBlock kBlock{kCodeBytes + kScaleBytes, 64};

  struct Codes {
    std::uint32_t words[kCodeBits];
    std::uint32_t scales[kGroups];
    std::uint32_t zero_points;  // two bytes a group
  };
  template <typename Block>
  __device__ static Codes load(const Block& block, int thread) {
    Codes codes;
#pragma unroll
    for (int i = 0; i < kCodeBits / 4; ++i) {
      const auto words = block.template read<uint4>(i * 2048 + thread * 16);
      codes.words[4 * i] = words.x;
      codes.words[4 * i + 1] = words.y;
      codes.words[4 * i + 2] = words.z;
      codes.words[4 * i + 3] = words.w;
    }
    const int rows = thread / 32 * 8 + thread % 32 / 4;
    if constexpr (kGroups == 1) {
      codes.scales[0] = block.template read<std::uint32_t>(kCodeBytes + rows * 4);
      codes.zero_points = block.template read<std::uint16_t>(kZeroPointBytes + rows * 2);
    } else {
      const auto scales = block.template read<uint2>(kCodeBytes + rows * 8);
      codes.scales[0] = scales.x;
      codes.scales[1] = scales.y;
      codes.zero_points = block.template read<std::uint32_t>(kZeroPointBytes + rows * 4);
    }
    return codes;
  }

  __device__ static Pair as_pair(std::uint32_t bits) {
    return reinterpret_cast<const Pair&>(bits);
  }
  /// Codes in two halves as 16-bit numbers plus a constant: 128, 1024, or -128 for bf16 bytes. It
  /// cancels against that of the zero points, which come from here, too.
  __device__ static Pair number(std::uint32_t bytes) {
    if constexpr (kCodeBits == 4 || P::kInteger == 0x64006400) {
      return as_pair(bytes | P::kInteger);
    } else {  // 128 + the low 7 bits; -256 or, with bit 7, -128: the byte less 128
      return __hadd2(as_pair((bytes & 0x007F007F) | P::kInteger),
                     as_pair((bytes & 0x00800080) ^ 0xC380C380));
    }
  }
  /// -> the register operands of two steps of 16 of K, of the first or second half of the block.
  __device__ static void decode(const Codes& codes, int half, std::uint32_t (&a)[2][4]) {
    constexpr std::uint32_t kMask = kCodeBits == 4 ? 0x000F000F : 0x00FF00FF;
    const int group = kGroups == 2 ? half : 0;
    // Bytes of rows (g, g + 8) to the low bytes of two halves.
    const Pair zero_points =
        number(__byte_perm(codes.zero_points, 0, group == 0 ? 0x4140 : 0x4342));
    const Pair scales = as_pair(codes.scales[group]);
    const Pair zero[2] = {P::low(zero_points), P::high(zero_points)};
    const Pair scale[2] = {P::low(scales), P::high(scales)};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const BitPlace place = Layout::place(2 * half + step, pair, 0, 0);
        const Pair code = number(codes.words[place.word] >> place.bit & kMask);
        const Pair weight = __hmul2(__hsub2(code, zero[pair % 2]), scale[pair % 2]);
        a[step][pair] = reinterpret_cast<const std::uint32_t&>(weight);
      }
    }
  }
};

/// 4-bit codes without zero points, for bf16: (code - 8) times a scale, rounded once, by one
/// instruction for a pair. A code is the mantissa of a subnormal number, code x 2^-133; the scale
/// is packed as the multiplier that makes it the weight, over the expert's own power of two; and 8
/// of them are subtracted with the same rounding. That product is exact, as 8 is a power of two.
/// Scales below 2^-118 of the expert's largest lose bits.
template <int kScaleGroups>
struct SymmetricInt4Operands : DecodedOperands<__nv_bfloat16, 4> {
  using Layout = NibbleCodes;
  static constexpr int kGroups = kScaleGroups, kGroupK = 64 / kGroups;
  static constexpr int kCodeBytes = kBlockRows * 64 / 2;
  static constexpr PackedBlock kBlock{kCodeBytes + 128 * kGroups, 64};
  static constexpr bool kHasZeroPoints = false;
  /// A multiplier is the scale times 2^133, over the expert's power of two.
  static constexpr int kScaleExponent = 133;

  struct Codes {
    uint4 words;
    std::uint32_t scales[kGroups];  // of rows (g, g + 8)
  };
  template <typename Block>
  __device__ static Codes load(const Block& block, int thread) {
    const int rows = thread / 32 * 8 + thread % 32 / 4;
    Codes codes;
    codes.words = block.template read<uint4>(thread * 16);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      codes.scales[i] = block.template read<std::uint32_t>(kCodeBytes + (rows * kGroups + i) * 4);
    }
    return codes;
  }
  /// -> the register operands of two steps of 16 of K, of the first or second half of the block.
  __device__ static void decode(const Codes& codes, int half, std::uint32_t (&a)[2][4]) {
    const auto as_pair = [](std::uint32_t bits) {
      return reinterpret_cast<const __nv_bfloat162&>(bits);
    };
    const __nv_bfloat162 both = as_pair(codes.scales[kGroups == 2 ? half : 0]);
    const __nv_bfloat162 scales[2] = {__low2bfloat162(both), __high2bfloat162(both)};
    const __nv_bfloat162 minus_8 = as_pair(0x80088008);  // times 2^-133
    const __nv_bfloat162 offsets[2] = {__hmul2(scales[0], minus_8), __hmul2(scales[1], minus_8)};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const std::uint32_t first = step == 0 ? codes.words.x : codes.words.y;
      const std::uint32_t second = step == 0 ? codes.words.z : codes.words.w;
      const std::uint32_t word = half == 0 ? first : second;
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const __nv_bfloat162 code = as_pair(word >> (4 * pair) & 0x000F000F);
        const __nv_bfloat162 weight = __hfma2(code, scales[pair % 2], offsets[pair % 2]);
        a[step][pair] = reinterpret_cast<const std::uint32_t&>(weight);
      }
    }
  }
};

struct Int4SymmetricOperands : SymmetricInt4Operands<1> {
  static constexpr const WeightFormat& kFormat = formats::kInt4Symmetric;
};
struct Int4G32SymmetricOperands : SymmetricInt4Operands<2> {
  static constexpr const WeightFormat& kFormat = formats::kInt4G32Symmetric;
};
struct Int4Bf16Operands : IntegerOperands<__nv_bfloat16, 4, 1> {
  static constexpr const WeightFormat& kFormat = formats::kInt4Bf16;
};
struct Int4G32Bf16Operands : IntegerOperands<__nv_bfloat16, 4, 2> {
  static constexpr const WeightFormat& kFormat = formats::kInt4G32Bf16;
};
struct Int8Bf16Operands : IntegerOperands<__nv_bfloat16, 8, 2> {
  static constexpr const WeightFormat& kFormat = formats::kInt8Bf16;
};
struct Int4F16Operands : IntegerOperands<__half, 4, 1> {
  static constexpr const WeightFormat& kFormat = formats::kInt4F16;
};
struct Int4G32F16Operands : IntegerOperands<__half, 4, 2> {
  static constexpr const WeightFormat& kFormat = formats::kInt4G32F16;
};
struct Int8F16Operands : IntegerOperands<__half, 8, 2> {
  static constexpr const WeightFormat& kFormat = formats::kInt8F16;
};

}  // namespace fusedmoe::cuda
