// Operands of MXFP4 weights with FP8 activations: a weight times a power of two of its row is an
// E4M3 number, looked up in registers, and is the tensor cores' operand A, in registers.
#pragma once

#include "cuda/formats/mxfp4_table.h"
#include "cuda/formats/w4a8.cuh"

namespace fusedmoe::cuda {

/// The codes of a block are followed by the fields of its scales (Mxfp4Table): for each w and g
/// (codes.h) those of row g and the four groups of K, then of row g + 8.
struct Mxfp4Fp8Operands : DecodedFp8Operands {
  static constexpr const WeightFormat& kFormat = formats::kMxfp4Fp8;
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
  /// -> the register operands of a step of 32 of K; `of_half`: the words of its half of the block.
  __device__ static void decode_step(const Codes& codes, const uint4& of_half, int step,
                                     std::uint32_t (&a)[4]) {
    decode_step(of_half, codes.fields, step, a);
  }
  /// -> those of both steps of a half.
  __device__ static void decode(const uint4& of_half, Scales fields, const Tables& /*tables*/,
                                int half, std::uint32_t (&a)[2][4]) {
#pragma unroll
    for (int step = 0; step < 2; ++step) decode_step(of_half, fields, 2 * half + step, a[step]);
  }

 private:
  __device__ static void decode_step(const uint4& of_half, Scales fields, int step,
                                     std::uint32_t (&a)[4]) {
    const Mxfp4Table row(fields.x >> 8 * step & 0xFF), next(fields.y >> 8 * step & 0xFF);
    row.decode(step % 2 == 0 ? of_half.x : of_half.z, a[0], a[2]);
    next.decode(step % 2 == 0 ? of_half.y : of_half.w, a[1], a[3]);
  }
};

}  // namespace fusedmoe::cuda
