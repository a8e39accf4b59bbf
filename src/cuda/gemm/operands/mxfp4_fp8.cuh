// Operands of MXFP4 weights with FP8 activations: a weight times a power of two of its row is an
// E4M3 number, looked up in registers, and is wgmma's register operand.
#pragma once

#include "cuda/gemm/operands/mxfp4_table.h"
#include "cuda/gemm/operands/w4a8.cuh"

namespace fusedmoe::cuda {

/// The codes of a block are followed by the fields of its scales (Mxfp4Table): for each w and g
/// (codes.h) those of row g and the four groups of K, then of row g + 8.
struct Mxfp4Fp8Operands : DecodedFp8Operands {
  static constexpr int kGroupK = 32, kGroups = 4;
  static constexpr PackedBlock kBlock{kCodeBytes + kBlockRows * kGroups, kBlockK};
  static constexpr int kFixedExponent = -Mxfp4Table::kLargestExponent;

  /// A packed block -> the register operands of all steps.
  __device__ static void load_fragments(const std::uint8_t* block, int thread,
                                        std::uint32_t (&a)[4][4]) {
    const auto* of_thread = reinterpret_cast<const uint4*>(block) + thread;
    const uint4 halves[2] = {of_thread[0], of_thread[128]};
    const auto fields = *reinterpret_cast<const uint2*>(
        block + kCodeBytes + (thread / 32 * 8 + thread % 32 / 4) * 2 * kGroups);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4& words = halves[step / 2];
      const std::uint32_t row = step % 2 == 0 ? words.x : words.z;
      const std::uint32_t next = step % 2 == 0 ? words.y : words.w;
      Mxfp4Table(fields.x >> (8 * step) & 0xFF).decode(row, a[step][0], a[step][2]);
      Mxfp4Table(fields.y >> (8 * step) & 0xFF).decode(next, a[step][1], a[step][3]);
    }
  }
};

}  // namespace fusedmoe::cuda
