// Operands of bf16 or f16 weights with activations of the same type.
//
// A packed block is (64, 64) elements in rows of 128 bytes, the 16-byte chunk c of row r at chunk
// c ^ (r % 8): the 128-byte swizzle of wgmma's shared-memory operands, which reads it as it is.
#pragma once

#include "cuda/gemm/operands/activations.cuh"
#include "cuda/gemm/packed_block.h"

namespace fusedmoe::cuda {

template <typename Element>
struct UnquantizedOperands : Operands16Bit<Element> {
  static constexpr PackedBlock kBlock{kBlockRows * 128, Operands16Bit<Element>::kBlockK};
  /// K blocks of a stage for each K group.
  static constexpr int kBlocksPerGroup = 1;
  static constexpr bool kDecodes = false;
  static constexpr int kMmaSyncTokens = 0;
};
struct Bf16Operands : UnquantizedOperands<__nv_bfloat16> {};
struct F16Operands : UnquantizedOperands<__half> {};

}  // namespace fusedmoe::cuda
