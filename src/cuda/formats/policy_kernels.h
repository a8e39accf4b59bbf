// The kernels of each weight format, made beside their policy.
#pragma once

#include <array>
#include <utility>

#include "cuda/formats/format_kernels.h"
#include "cuda/sm90/kernel_set.h"

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

/// Defined by the generated file of the policy (cmake/FusedmoeKernels.cmake).
template <typename Operands, int kIndex>
void launch_kernel(const FusedMlpParams& params, const Stream& stream);

template <typename Operands>
void launch_one_token(const OneTokenParams& params, const OneTokenShape& shape,
                      const Stream& stream);

template <typename Operands>
inline constexpr auto kLaunches = []<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
  return std::array<FormatKernels::Launch, sizeof...(kIndex)>{
      &launch_kernel<Operands, static_cast<int>(kIndex)>...};
}
(std::make_index_sequence<kernel_set(Operands::kFormat).tiles.size()>());

/// Whether a row of the table says what the policy is compiled for.
template <typename Operands>
constexpr bool agrees(const WeightFormat& format) {
  using Output = typename Operands::Output;
  return format.row_dtype == Operands::kRowDType && format.block.bytes == Operands::kBlock.bytes &&
         format.block.k == Operands::kBlock.k && format.decodes == Operands::kDecodes &&
         format.k_scales == Operands::kHasKScales && format.weights_rows == Output::kWeightsRows &&
         format.quantizes_rows == Output::kQuantizes;
}

/// What the kernels of a format take from its policy.
template <typename Operands>
FormatKernels kernels_from() {
  static_assert(agrees<Operands>(Operands::kFormat));
  return {.format = Operands::kFormat,
          .launches = kLaunches<Operands>,
          .one_token = &launch_one_token<Operands>};
}

}  // namespace fusedmoe::cuda
