// Operands of weights and activations of the same type, which the tensor cores read as they are:
// bf16, f16, and FP8 (E4M3).
//
// A packed block is 64 rows of 128 bytes of K, the 16-byte chunk c of row r at chunk c ^ (r % 8):
// the 128-byte swizzle of wgmma's operands, in which ldmatrix has no bank conflicts either.
#pragma once

#include "cuda/formats/activations.cuh"
#include "cuda/formats/packed_block.h"

namespace fusedmoe::cuda {

inline constexpr int kSwizzledBlockBytes = kBlockRows * 128;

template <typename Element>
struct UnquantizedOperands : Operands16Bit<Element> {
  static constexpr PackedBlock kBlock{kSwizzledBlockBytes, Operands16Bit<Element>::kBlockK};
  static constexpr bool kDecodes = false;
};
struct Bf16Operands : UnquantizedOperands<__nv_bfloat16> {
  static constexpr const WeightFormat& kFormat = formats::kBf16;
};
struct F16Operands : UnquantizedOperands<__half> {
  static constexpr const WeightFormat& kFormat = formats::kF16;
};

/// Results are bf16; what GEMM 2 reads is quantized between the GEMMs. Each K block, 128, is summed
/// up apart and promoted to fp32.
struct Fp8Operands {
  static constexpr const WeightFormat& kFormat = formats::kFp8;
  using Activation = __nv_fp8_e4m3;
  using Output = RoundedOutput<__nv_bfloat16>;
  static constexpr DType kRowDType = DType::kBF16;
  static constexpr int kInstructionK = 32;
  static constexpr int kBlockK = 128;
  /// Whether K blocks have scales, by which promoted sums are multiplied.
  static constexpr bool kHasKScales = true;
  using Tables = NoTables;
  static constexpr PackedBlock kBlock{kSwizzledBlockBytes, kBlockK};
  static constexpr bool kDecodes = false;
};
/// The same where weights and rows have no scales of K blocks. Their kernels have less code, and in
/// tiles of few tokens room for the row pass: more code makes kernels slower where tokens are few.
struct Fp8RowOperands : Fp8Operands {
  static constexpr const WeightFormat& kFormat = formats::kFp8Rows;
  static constexpr bool kHasKScales = false;
};

}  // namespace fusedmoe::cuda
