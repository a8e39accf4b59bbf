// Scales of quantized weights by row, from host memory.
#pragma once

#include <cstdint>

#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cuda {

/// Of a row and a group of columns.
float scale_at(const QuantKey& key, const WeightMatrix& matrix, std::int64_t row,
               std::int64_t group);
/// (rows, 1) f32: the largest magnitude of each row; 1 where all are zero.
Tensor largest_scales(const QuantKey& key, const WeightMatrix& matrix, std::int64_t rows);
/// (rows, groups) f32, of blocks of several rows.
Tensor scales_of_rows(const QuantKey& key, const WeightMatrix& matrix, std::int64_t rows);

}  // namespace fusedmoe::cuda
