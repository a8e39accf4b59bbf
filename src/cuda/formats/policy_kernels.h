// The kernels of each weight format, made beside their policy.
#pragma once

#include "cuda/formats/format_kernels.h"
#include "cuda/formats/operand_policy.h"

namespace fusedmoe::cuda {

FormatKernels bf16_kernels();
FormatKernels f16_kernels();
FormatKernels fp8_kernels();
FormatKernels fp8_rows_kernels();
FormatKernels fp8_f16_kernels();
FormatKernels w4a8_kernels();
FormatKernels mxfp4_bf16_kernels();
FormatKernels mxfp4_quantized_kernels();
FormatKernels mxfp4_f16_kernels();
FormatKernels mxfp4_fp8_kernels();
FormatKernels nvfp4_bf16_kernels();
FormatKernels nvfp4_f16_kernels();
FormatKernels int4_symmetric_kernels();
FormatKernels int4_g32_symmetric_kernels();
FormatKernels int4_bf16_kernels();
FormatKernels int4_f16_kernels();
FormatKernels int4_g32_bf16_kernels();
FormatKernels int4_g32_f16_kernels();
FormatKernels int8_bf16_kernels();
FormatKernels int8_f16_kernels();
FormatKernels decoded_e4m3_kernels();
FormatKernels scaled_e4m3_kernels();

/// Whether a row of the table says what the policy is compiled for.
template <OperandPolicy Operands>
constexpr bool agrees(const WeightFormat& format) {
  using Output = typename Operands::Output;
  return format.row_dtype == Operands::kRowDType && format.block.bytes == Operands::kBlock.bytes &&
         format.block.k == Operands::kBlock.k && format.decodes == Operands::kDecodes &&
         format.k_scales == Operands::kHasKScales && format.weights_rows == Output::kWeightsRows &&
         format.quantizes_rows == Output::kQuantizes;
}

/// What the kernels of a format take from its policy.
template <OperandPolicy Operands>
FormatKernels kernels_from() {
  static_assert(agrees<Operands>(Operands::kFormat));
  FormatKernels kernels;
  kernels.format = Operands::kFormat;
  return kernels;
}

}  // namespace fusedmoe::cuda
