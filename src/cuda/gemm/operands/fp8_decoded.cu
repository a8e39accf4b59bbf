// Packs and unpacks FP8 weights that are decoded, and makes their WeightFormat.
#include "cuda/gemm/operands/fp8_decoded.cuh"

#include "cuda/gemm/operands/e8m0_scales.cuh"

namespace fusedmoe::cuda {
namespace {

bool holds(const QuantKey& key) {
  if (key.value != DType::kE4M3 || key.dynamic) return false;
  return key == keys::mxfp8() || key == keys::e4m3_tensor() || key == keys::e4m3_row();
}

int exponent_shift(const WeightMatrix& gate, const WeightMatrix* up) {
  const DType scales = gate.scales.dtype();
  if (scales != DType::kU8 && scales != DType::kE8M0) return 0;
  return exponent_shift_bf16<DecodedE4m3Operands>(gate, up);
}

}  // namespace

WeightFormat decoded_e4m3_format() {
  WeightFormat format =
      decoded_format<DecodedE4m3Operands, E8m0Scales<DecodedE4m3Operands>>("e4m3_w16", holds);
  format.exponent_shift = exponent_shift;
  return format;
}

}  // namespace fusedmoe::cuda
