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

  /// As W4a8Operands::Codes.
  struct Codes {
    const std::uint8_t* block;
    int thread;
    uint2 fields;
  };
  __device__ static Codes load(const std::uint8_t* block, int thread, const Tables& /*tables*/) {
    return {block, thread, *reinterpret_cast<const uint2*>(scales(block, thread, kGroups))};
  }
  /// -> the register operands of two steps of 32 of K, of the first or second half of the block.
  __device__ static void decode(const Codes& codes, int half, std::uint32_t (&a)[2][4]) {
    const uint4 of_half = words(codes.block, codes.thread, half);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int shift = 16 * half + 8 * step;
      const Mxfp4Table row(codes.fields.x >> shift & 0xFF), next(codes.fields.y >> shift & 0xFF);
      row.decode(step == 0 ? of_half.x : of_half.z, a[step][0], a[step][2]);
      next.decode(step == 0 ? of_half.y : of_half.w, a[step][1], a[step][3]);
    }
  }
};

}  // namespace fusedmoe::cuda
