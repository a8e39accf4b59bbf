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

/// A thread block is a packed row.
__global__ void mark_nan_rows_kernel(const PackSource s, float* scales) {
  const std::int64_t row = s.source_row(blockIdx.x);
  if (row < 0) return;
  constexpr std::uint32_t kMagnitude = 0x7F;  // of NaN all bits but the sign
  bool has_nan = false;
  for (std::int64_t k = threadIdx.x; k < s.k; k += blockDim.x) {
    has_nan |= (code_at<8>(s, row, k) & kMagnitude) == kMagnitude;
  }
  if (__syncthreads_or(has_nan) && threadIdx.x == 0) {
    scales[blockIdx.x] = __int_as_float(0x7FC00000);
  }
}

void mark_nan_rows(const PackSource& source, const BlockGrid& grid, float* scales,
                   const Stream& stream) {
  launch(mark_nan_rows_kernel, dim3(static_cast<unsigned>(grid.row_blocks * kBlockRows)), dim3(128),
         0, static_cast<cudaStream_t>(stream.handle), false, source, scales);
}

}  // namespace

WeightFormat decoded_e4m3_format() {
  WeightFormat format =
      decoded_format<DecodedE4m3Operands, E8m0Scales<DecodedE4m3Operands>>("e4m3_w16", holds);
  format.exponent_shift = exponent_shift;
  format.mark_nan_rows = mark_nan_rows;
  return format;
}

}  // namespace fusedmoe::cuda
