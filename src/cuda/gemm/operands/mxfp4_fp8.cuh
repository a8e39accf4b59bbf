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

  /// The fields of a thread's two rows.
  using Scales = uint2;
  template <typename Block>
  __device__ static Scales load_scales(const Block& block, int thread) {
    return block.template read<uint2>(scales_offset(thread, kGroups));
  }
  /// As W4a8Operands::Codes.
  struct Codes {
    StagedBlock block;
    int thread;
    Scales fields;
  };
  __device__ static Codes load(const StagedBlock& block, int thread, const Tables& /*tables*/) {
    return {block, thread, load_scales(block, thread)};
  }
  /// -> the register operands of two steps of 32 of K, of the first or second half of the block.
  __device__ static void decode(const Codes& codes, int half, std::uint32_t (&a)[2][4]) {
    decode(words(codes.block, codes.thread, half), codes.fields, Tables(), half, a);
  }
  __device__ static void decode(const uint4& of_half, Scales fields, const Tables& /*tables*/,
                                int half, std::uint32_t (&a)[2][4]) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int shift = 16 * half + 8 * step;
      const Mxfp4Table row(fields.x >> shift & 0xFF), next(fields.y >> shift & 0xFF);
      row.decode(step == 0 ? of_half.x : of_half.z, a[step][0], a[step][2]);
      next.decode(step == 0 ? of_half.y : of_half.w, a[step][1], a[step][3]);
    }
  }
};

}  // namespace fusedmoe::cuda
