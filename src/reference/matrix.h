// Numbers as the reference reads and writes them: every stored value widened exactly to double, and
// one rounding back. Written from the formats' definitions, apart from the library's conversions.
#pragma once

#include <cstdint>

#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::reference {

/// Element at linear position `index` of memory of f32, f16 or bf16.
double load(const void* data, DType dtype, std::int64_t index);

/// The nearest value of f32, f16 or bf16, ties to even; beyond the largest: infinity.
double round_to(DType dtype, double value);

/// Rounds once and stores at linear position `index`.
void store(void* data, DType dtype, std::int64_t index, double value);

/// Element (row, column) of an expert's matrix, decoded: f32, f16, bf16, or MXFP4 with its scale.
double element(const WeightMatrix& matrix, std::int64_t row, std::int64_t column);

/// Element `row` of the bias; 0 without one.
double bias(const WeightMatrix& matrix, std::int64_t row);

}  // namespace fusedmoe::reference
