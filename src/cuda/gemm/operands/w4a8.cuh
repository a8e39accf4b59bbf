// Operands of INT4 weights with E4M3 scales per 128 of K, and FP8 activations: a weight is
// e4m3((code - 8) * scale), looked up in registers, and is wgmma's register operand.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda/gemm/operands/activations.cuh"
#include "cuda/gemm/operands/codes.h"
#include "cuda/gemm/operands/w4a8_table.h"
#include "cuda/gemm/packed_block.h"

namespace fusedmoe::cuda {

/// Base of the policies of 4-bit weights that are decoded to E4M3, with FP8 activations and one
/// scale for each token row.
struct DecodedFp8Operands {
  using Activation = __nv_fp8_e4m3;
  using Output = RoundedOutput<__nv_bfloat16>;
  static constexpr DType kRowDType = DType::kBF16;
  static constexpr int kInstructionK = 32;
  using Layout = W4a8Codes;
  static constexpr int kBlockK = 128;
  static constexpr int kCodeBytes = kBlockRows * kBlockK / 2;
  static constexpr int kPromotedColumns = 96;
  /// Whether K blocks have scales, by which promoted sums are multiplied.
  static constexpr bool kHasKScales = false;
  static constexpr int kBlocksPerGroup = 1;
  static constexpr bool kDecodes = true;
  static constexpr int kMmaSyncTokens = 0;
  static constexpr std::span<const TileShape> kTiles = kTilesDecodedFp8;
};

/// The codes of a block are followed by its scales: for each w and g (codes.h) the E4M3 scales of
/// the rows g and g + 8 of warp w.
struct W4a8Operands : DecodedFp8Operands {
  static constexpr int kGroupK = 128, kGroups = 1;
  static constexpr PackedBlock kBlock{kCodeBytes + kBlockRows, kBlockK};
  static constexpr int kFixedExponent = 0;

  /// 1 to 8 times a scale, rounded.
  __device__ static W4a8Table table(__half scale) {
    std::uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 factors = __floats2half2_rn(2.0F * i + 1, 2.0F * i + 2);
      const __half2 products = __hmul2(__half2half2(scale), factors);  // exact
      const std::uint32_t codes =
          __nv_cvt_halfraw2_to_fp8x2(__half2_raw(products), __NV_SATFINITE, __NV_E4M3);
      words[i / 2] = i % 2 == 0 ? codes : words[i / 2] | codes << 16;
    }
    return W4a8Table::of_multiples(words[0], words[1]);
  }
  /// A packed block -> the register operands of all steps.
  __device__ static void load_fragments(const std::uint8_t* block, int thread,
                                        std::uint32_t (&a)[4][4]) {
    const auto* of_thread = reinterpret_cast<const uint4*>(block) + thread;
    const uint4 words[2] = {of_thread[0], of_thread[128]};
    const auto scales = *reinterpret_cast<const std::uint16_t*>(
        block + kCodeBytes + (thread / 32 * 8 + thread % 32 / 4) * 2);
    const __half2 of_rows = __nv_cvt_fp8x2_to_halfraw2(scales, __NV_E4M3);
    const W4a8Table row = table(__low2half(of_rows)), next = table(__high2half(of_rows));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row.decode(words[i].x, a[2 * i][0], a[2 * i][2]);
      next.decode(words[i].y, a[2 * i][1], a[2 * i][3]);
      row.decode(words[i].z, a[2 * i + 1][0], a[2 * i + 1][2]);
      next.decode(words[i].w, a[2 * i + 1][1], a[2 * i + 1][3]);
    }
  }
};

}  // namespace fusedmoe::cuda
