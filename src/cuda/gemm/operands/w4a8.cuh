// Operands of INT4 weights with E4M3 scales per 128 of K, and FP8 activations: a weight is
// e4m3((code - 8) * scale), rounded in registers, and is wgmma's register operand.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/gemm/operands/activations.cuh"
#include "cuda/gemm/operands/codes.h"
#include "cuda/gemm/packed_block.h"

namespace fusedmoe::cuda {

/// The codes of a block are followed by its scales: for each w and g (codes.h) the E4M3 scales of
/// the rows g and g + 8 of warp w.
struct W4a8Operands {
  using Activation = __nv_fp8_e4m3;
  using Output = RoundedOutput<__nv_bfloat16>;
  static constexpr DType kRowDType = DType::kBF16;
  static constexpr int kInstructionK = 32;
  using Layout = Fp8NibbleCodes;
  static constexpr int kBlockK = 128, kGroupK = 128, kGroups = 1;
  static constexpr int kCodeBytes = kBlockRows * kBlockK / 2;
  static constexpr int kPromotedColumns = 96;
  static constexpr PackedBlock kBlock{kCodeBytes + kBlockRows, kBlockK};
  static constexpr int kFixedExponent = 0;
  static constexpr int kBlocksPerGroup = 1;
  static constexpr bool kDecodes = true;
  static constexpr int kMmaSyncTokens = 0;
  static constexpr std::span<const TileShape> kTiles = kTilesDecodedFp8;

  struct Codes {
    uint4 words[2];
    std::uint16_t scales;  // of rows g, g + 8
  };
  __device__ static Codes load(const std::uint8_t* block, int thread) {
    const auto* words = reinterpret_cast<const uint4*>(block) + thread;
    return {{words[0], words[128]},
            *reinterpret_cast<const std::uint16_t*>(block + kCodeBytes +
                                                    (thread / 32 * 8 + thread % 32 / 4) * 2)};
  }

  /// Two nibbles in the low bits of both halves -> two weights, in the low 16 bits.
  __device__ static std::uint32_t weights(std::uint32_t nibbles, __half2 scale) {
    const std::uint32_t bits = (nibbles & 0x000F000F) | 0x64006400;  // 1024 + code
    const __half2 code =
        __hsub2(reinterpret_cast<const __half2&>(bits), __float2half2_rn(1024 + 8));
    const __half2 weight = __hmul2(code, scale);  // exact
    return __nv_cvt_halfraw2_to_fp8x2(__half2_raw(weight), __NV_SATFINITE, __NV_E4M3);
  }
  /// -> the register operands of all steps.
  __device__ static void decode(const Codes& codes, std::uint32_t (&a)[4][4]) {
    const __half2 both = __nv_cvt_fp8x2_to_halfraw2(codes.scales, __NV_E4M3);
    const __half2 scales[2] = {__low2half2(both), __high2half2(both)};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4& four = codes.words[step / 2];
      const std::uint32_t rows[2] = {step % 2 == 0 ? four.x : four.z,
                                     step % 2 == 0 ? four.y : four.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t x = rows[half];
#pragma unroll
        for (int k = 0; k < 2; ++k) {  // K 0 to 15, and 16 more
          a[step][2 * k + half] =
              weights(x >> (8 * k), scales[half]) | weights(x >> (8 * k + 4), scales[half]) << 16;
        }
      }
    }
  }
};

}  // namespace fusedmoe::cuda
