#include "cuda/experts/weight_scales.h"

#include <algorithm>
#include <cmath>

#include "quant/weight_layout.h"

namespace fusedmoe::cuda {

float scale_at(const QuantKey& key, const WeightMatrix& matrix, std::int64_t row,
               std::int64_t group) {
  const TensorView& scales = matrix.scales;
  const DType dtype = key.scale == DType::kE8M0 ? DType::kE8M0 : scales.dtype();
  const std::int64_t r = core::block_of(row, key.group.rows, matrix.first_row);
  return load_f32(scales.data(), dtype, r * scales.stride(0) + group * scales.stride(1));
}

Tensor scales_of_rows(const QuantKey& key, const WeightMatrix& matrix, std::int64_t rows) {
  const std::int64_t groups = matrix.scales.size(1);
  Tensor result = Tensor::empty({rows, groups}, DType::kF32);
  for (std::int64_t i = 0; i < result.numel(); ++i) {
    result.as<float>()[i] = scale_at(key, matrix, i / groups, i % groups);
  }
  return result;
}

Tensor largest_scales(const QuantKey& key, const WeightMatrix& matrix, std::int64_t rows) {
  Tensor result = Tensor::empty({rows, 1}, DType::kF32);
  for (std::int64_t row = 0; row < rows; ++row) {
    float largest = 0;
    for (std::int64_t group = 0; group < matrix.scales.size(1); ++group) {
      largest = std::max(largest, std::fabs(scale_at(key, matrix, row, group)));
    }
    result.as<float>()[row] = largest > 0 ? largest : 1;
  }
  return result;
}

}  // namespace fusedmoe::cuda
