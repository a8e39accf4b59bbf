// Numbers as the reference reads and writes them: every stored value widened exactly to double, and
// one rounding back. Written from the formats' definitions, apart from the library's conversions.
#pragma once

#include <cstdint>

#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::reference {

/// Element at linear position `index` of memory of f32, f16 or bf16.
double load(const void* data, DType dtype, std::int64_t index);

/// The nearest value of f32, f16 or bf16, ties to even; beyond the largest: infinity.
double round_to(DType dtype, double value);

/// Rounds once and stores at linear position `index`.
void store(void* data, DType dtype, std::int64_t index, double value);

/// Element (row, column) of an expert's matrix of the key, decoded: (code - zero point) * scale *
/// global scale; W4A8: e4m3((code - 8) * group scale) * channel scale; Q4_K: code * scale * factor
/// - zero point * other factor.
double element(const WeightMatrix& matrix, const QuantKey& key, std::int64_t row,
               std::int64_t column);

/// Element `row` of the bias; 0 without one.
double bias(const WeightMatrix& matrix, std::int64_t row);

/// One row of quantized activations, in the form of core::quantize_row.
struct QuantizedRow {
  const QuantKey& key;
  const std::uint8_t* codes;
  const void* scales;       ///< of the row's groups, or the one of the tensor
  double global_scale = 1;  ///< of NVFP4
};
double element(const QuantizedRow& row, std::int64_t column);

}  // namespace fusedmoe::reference
