// Packs and unpacks FP8 weights that are decoded, and makes their FormatKernels.
#include "cuda/formats/fp8_decoded.cuh"

#include <array>

#include "cuda/formats/e8m0_scales.cuh"

namespace fusedmoe::cuda {
namespace {

int exponent_shift(const WeightMatrix& gate, const WeightMatrix* up) {
  const DType scales = gate.scales.dtype();
  if (scales != DType::kU8 && scales != DType::kE8M0) return 0;
  return exponent_shift_bf16<DecodedE4m3Operands>(gate, up);
}

/// fp32 scales of rows; relative ones are rounded to bf16.
struct RelativeScales {
  static constexpr DType kDType = DType::kF32;

  __device__ static std::uint32_t code(const PackSource&, std::int64_t, std::int64_t,
                                       std::uint32_t code, bool inside) {
    return inside ? code : 0;
  }
  __device__ static void store(const PackSource& s, std::int64_t row, std::int64_t k, bool inside,
                               std::uint8_t* area, const RowInBlock& to, int) {
    float scale = 0;
    if (inside) {
      scale = static_cast<const float*>(s.scales)[s.scale_index(row, k)] / s.largest_scales[row];
    }
    reinterpret_cast<__nv_bfloat16*>(area)[to.pair() * 2 + to.half] =
        __float2bfloat16_rn(ldexpf(scale, ScaledE4m3Operands::kExponent));
  }
  /// Those of several rows are kept beside the blocks.
  static void load(const PackedView&, const std::byte*, const RowInBlock&, int, std::int64_t,
                   const UnpackedRow&) {}
};

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

FormatKernels decoded_e4m3_kernels() {
  using Scales = E8m0Scales<DecodedE4m3Operands>;
  FormatKernels kernels = decoded_kernels<DecodedE4m3Operands, Scales>();
  kernels.exponent_shift = exponent_shift;
  kernels.mark_nan_rows = mark_nan_rows;
  return kernels;
}
FormatKernels scaled_e4m3_kernels() {
  FormatKernels kernels = decoded_kernels<ScaledE4m3Operands, RelativeScales>();
  kernels.mark_nan_rows = mark_nan_rows;
  return kernels;
}

}  // namespace

std::span<const FormatKernels> fp8_decoded_kernels() {
  static const std::array kAll = {decoded_e4m3_kernels(), scaled_e4m3_kernels()};
  return kAll;
}

}  // namespace fusedmoe::cuda
