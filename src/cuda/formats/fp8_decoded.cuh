// Operands of FP8 (E4M3) weights with bf16 activations: weights are decoded to bf16 in registers,
// times a scale for each row and group of K.
#pragma once

#include "cuda/formats/activations.cuh"
#include "cuda/formats/codes.h"
#include "cuda/formats/packed_block.h"

namespace fusedmoe::cuda {

/// Behind the codes of a block lie 4 bytes of scales for each (w, g).
template <bool kQuantizesRows>
struct E4m3Bf16Operands : DecodedOperands<__nv_bfloat16, 8, kQuantizesRows> {
  using Layout = E4m3Codes;
  static constexpr int kExponent = 120;  // codes are decoded to numbers times 2^-kExponent
  static constexpr int kCodeBytes = kBlockRows * 64, kScaleBytes = 128;
  static constexpr PackedBlock kBlock{kCodeBytes + kScaleBytes, 64};

  struct Codes {
    uint4 words[2];
    std::uint32_t scales;
  };
  template <typename Block>
  __device__ static Codes load(const Block& block, int thread) {
    const int rows = thread / 32 * 8 + thread % 32 / 4;
    return {
        {block.template read<uint4>(thread * 16), block.template read<uint4>(2048 + thread * 16)},
        block.template read<std::uint32_t>(kCodeBytes + rows * 4)};
  }
  __device__ static std::uint32_t multiply(std::uint32_t bits, __nv_bfloat162 multiplier) {
    const __nv_bfloat162 pair = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), multiplier);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
  /// -> the register operands of two steps of 16 of K. `multipliers`: bf16 of rows (g, g + 8).
  __device__ static void decode_steps(const uint4& four, std::uint32_t multipliers,
                                      std::uint32_t (&a)[2][4]) {
    const auto& both = reinterpret_cast<const __nv_bfloat162&>(multipliers);
    const __nv_bfloat162 row = __low2bfloat162(both), next = __high2bfloat162(both);
    const std::uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t x = words[i];
      const std::uint32_t second = ((x << 4) & 0x80F080F0) | (x >> 4 & 0x07000700);
      a[i / 2][i % 2 * 2] = multiply(x & 0x87F087F0, row);
      a[i / 2][i % 2 * 2 + 1] = multiply(second, next);
    }
  }
};

/// Exact: a power of two for each 32 of K (MXFP8; 1 for other scales). Exponent fields as those of
/// Mxfp4Operands, of 2^kExponent times the scale.
struct DecodedE4m3Operands : E4m3Bf16Operands<true> {
  static constexpr const WeightFormat& kFormat = formats::kDecodedE4m3;
  static constexpr int kGroupK = 32, kGroups = 2, kOffset = kExponent;

  /// -> the register operands of the first or second half of the block.
  __device__ static void decode(const Codes& codes, int half, std::uint32_t (&a)[2][4]) {
    constexpr std::uint32_t kExponents = 0x7F807F80;  // of two bf16
    decode_steps(codes.words[half],
                 half == 0 ? codes.scales << 7 & kExponents : codes.scales >> 1 & kExponents, a);
  }
};

/// Scales of blocks of rows and columns: bf16 numbers of rows (g, g + 8), 2^kExponent times the
/// scale over the largest of its row. A weight is the product rounded.
struct ScaledE4m3Operands : E4m3Bf16Operands<false> {
  static constexpr const WeightFormat& kFormat = formats::kScaledE4m3;
  static constexpr int kGroupK = 64, kGroups = 1;

  __device__ static void decode(const Codes& codes, int half, std::uint32_t (&a)[2][4]) {
    decode_steps(codes.words[half], codes.scales, a);
  }
};

}  // namespace fusedmoe::cuda
