// Operands of FP8 weights and activations in layers of f16: the rows that are quantized to FP8 are
// f16, and so are the results.
#pragma once

#include "cuda/formats/as_is.cuh"

namespace fusedmoe::cuda {

/// GEMM 2 multiplies its rows by router weights. The epilogue of tiles with tokens as rows cannot,
/// and tiles of 128 tokens have no registers for it.
struct Fp8F16Operands : Fp8Operands {
  static constexpr const WeightFormat& kFormat = formats::kFp8F16;
  using Output = RoundedOutput<__half>;
  static constexpr DType kRowDType = DType::kF16;
};

}  // namespace fusedmoe::cuda
