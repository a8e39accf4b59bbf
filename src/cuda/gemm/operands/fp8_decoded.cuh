// Operands of FP8 (E4M3) weights with bf16 activations: weights are decoded to bf16 in registers,
// exactly, times a power of two for each row and 32 of K (MXFP8; 1 for other scales).
#pragma once

#include "cuda/gemm/operands/activations.cuh"
#include "cuda/gemm/operands/codes.h"
#include "cuda/gemm/weight_format.h"

namespace fusedmoe::cuda {

/// Behind the codes: exponent fields as those of Mxfp4Operands, of 2^kExponent times the scale.
struct DecodedE4m3Operands : DecodedOperands<__nv_bfloat16, 8, true> {
  using Layout = E4m3Codes;
  static constexpr int kExponent = 120;
  static constexpr int kGroupK = 32, kGroups = 2, kScaleBytes = 128, kOffset = kExponent;
  static constexpr int kCodeBytes = kBlockRows * 64;
  static constexpr PackedBlock kBlock{kCodeBytes + kScaleBytes, 64};

  struct Codes {
    uint4 words[2];
    std::uint32_t exponents;
  };
  __device__ static Codes load(const std::uint8_t* block, int thread) {
    const auto* words = reinterpret_cast<const uint4*>(block) + thread;
    return {{words[0], words[128]},
            *reinterpret_cast<const std::uint32_t*>(block + kCodeBytes +
                                                    (thread / 32 * 8 + thread % 32 / 4) * 4)};
  }
  __device__ static std::uint32_t multiply(std::uint32_t bits, __nv_bfloat162 multiplier) {
    const __nv_bfloat162 pair = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), multiplier);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
  /// -> the register operands of two steps of 16 of K, of the first or second half of the block.
  __device__ static void decode(const Codes& codes, int half, std::uint32_t (&a)[2][4]) {
    constexpr std::uint32_t kExponents = 0x7F807F80;  // of two bf16: rows (g, g + 8)
    const std::uint32_t bits =
        half == 0 ? codes.exponents << 7 & kExponents : codes.exponents >> 1 & kExponents;
    const auto& both = reinterpret_cast<const __nv_bfloat162&>(bits);
    const __nv_bfloat162 row = __low2bfloat162(both), next = __high2bfloat162(both);
    const uint4& four = codes.words[half];
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

}  // namespace fusedmoe::cuda
