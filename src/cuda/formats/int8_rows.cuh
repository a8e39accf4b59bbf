// Operands of INT8 weights and activations, which the tensor cores read as they are; sums are int32
// and exact.
#pragma once

#include "cuda/formats/as_is.cuh"

namespace fusedmoe::cuda {

/// `Element`: of hidden states and results. Activations are quantized before each GEMM.
template <typename Element>
struct Int8RowOperandsOf {
  using Activation = std::int8_t;
  using Output = RoundedOutput<Element>;
  static constexpr DType kRowDType = ElementTraits<Element>::kDType;
  static constexpr int kInstructionK = 32;
  static constexpr int kBlockK = 128;
  static constexpr bool kHasKScales = false;
  using Tables = NoTables;
  static constexpr PackedBlock kBlock{kSwizzledBlockBytes, kBlockK};
  static constexpr bool kDecodes = false;
};
struct Int8RowOperands : Int8RowOperandsOf<__nv_bfloat16> {
  static constexpr const WeightFormat& kFormat = formats::kInt8Rows;
};
struct Int8RowF16Operands : Int8RowOperandsOf<__half> {
  static constexpr const WeightFormat& kFormat = formats::kInt8RowsF16;
};

}  // namespace fusedmoe::cuda
