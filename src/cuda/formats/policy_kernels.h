// What the FormatKernels of a policy begin with.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/formats/format_kernels.h"
#include "cuda/formats/operand_policy.h"

namespace fusedmoe::cuda {

/// Whether a row of the table says what the policy is compiled for.
template <OperandPolicy Operands>
constexpr bool agrees(const WeightFormat& format) {
  using Output = typename Operands::Output;
  return format.row_dtype == Operands::kRowDType && format.block.bytes == Operands::kBlock.bytes &&
         format.block.k == Operands::kBlock.k && format.decodes == Operands::kDecodes &&
         format.k_scales == Operands::kHasKScales && format.weights_rows == Output::kWeightsRows &&
         format.quantizes_rows == Output::kQuantizes &&
         format.int8_rows == std::is_same_v<typename Operands::Activation, std::int8_t>;
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
