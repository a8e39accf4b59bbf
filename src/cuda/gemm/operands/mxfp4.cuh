// Operands of MXFP4 weights with bf16 activations: weights are decoded to bf16 in registers,
// exactly, and are wgmma's register operand.
#pragma once

#include "cuda/gemm/operands/activations.cuh"
#include "cuda/gemm/operands/mxfp4_block.h"

namespace fusedmoe::cuda {

struct Mxfp4Operands : Operands16Bit<__nv_bfloat16> {
  static constexpr PackedBlock kBlock{kMxfp4BlockBytes, kMxfp4BlockK};
  /// K blocks of a stage for each K group: what a stage costs beside them is shared.
  static constexpr int kBlocksPerGroup = 2;
  static constexpr bool kDecodes = true;
  static constexpr int kMmaSyncTokens = 24;

  static constexpr std::uint32_t kMask = 0x81C081C0;  // sign, and three bits around the point

  /// The pair in the masked bits, times a multiplier.
  __device__ static std::uint32_t decode_pair(std::uint32_t bits, __nv_bfloat162 multiplier) {
    bits &= kMask;
    const __nv_bfloat162 pair = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), multiplier);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }

  /// The codes of two words (see mxfp4_block.h), whose left-over bits make up two more pairs, times
  /// the rows' multipliers -> two register operands. Shifts to the left go to another pipe than
  /// masks.
  __device__ static void decode_words(std::uint32_t x, std::uint32_t y, std::uint32_t multipliers,
                                      std::uint32_t (&a)[4], std::uint32_t (&b)[4]) {
    // Both halves of a pair from one: the multiplication takes it so, at no cost.
    const auto& both = reinterpret_cast<const __nv_bfloat162&>(multipliers);
    const __nv_bfloat162 row = __low2bfloat162(both), next = __high2bfloat162(both);
    const std::uint32_t rest =
        ((x << 1) & 0x90009000) | ((y >> 6) & 0x01B001B0) | ((x >> 7) & 0x00480048);
    a[0] = decode_pair(x, row);
    a[1] = decode_pair(x << 3, next);
    a[2] = decode_pair(x << 6, row);
    a[3] = decode_pair(rest, next);
    b[0] = decode_pair(y, row);
    b[1] = decode_pair(y << 3, next);
    b[2] = decode_pair(y << 6, row);
    b[3] = decode_pair(rest << 3, next);
  }

  /// What one thread of 128 needs of a packed block.
  struct Codes {
    uint4 words;
    std::uint32_t exponents;
  };
  __device__ static Codes load(const std::uint8_t* block, int thread) {
    return {*reinterpret_cast<const uint4*>(block + thread * 16),
            *reinterpret_cast<const std::uint32_t*>(block + kMxfp4CodeBytes +
                                                    (thread / 32 * 8 + thread % 32 / 4) * 4)};
  }

  /// -> the register operands of two steps of 16 of K, of the first or second half of the block.
  __device__ static void decode(const Codes& codes, int half, std::uint32_t (&a)[2][4]) {
    constexpr std::uint32_t kExponents = 0x7F807F80;  // of two bf16: rows (g, g + 8)
    if (half == 0) {
      decode_words(codes.words.x, codes.words.y, codes.exponents << 7 & kExponents, a[0], a[1]);
    } else {
      decode_words(codes.words.z, codes.words.w, codes.exponents >> 1 & kExponents, a[0], a[1]);
    }
  }
};

}  // namespace fusedmoe::cuda
