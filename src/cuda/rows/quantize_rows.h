// Rows to codes and scales and back, as they travel between ranks. (The experts quantize rows where
// they permute them: row_transform.h.)
#pragma once

#include "quant/quantize.h"

namespace fusedmoe::cuda {

/// As fusedmoe::quantize(), of keys with has_cuda_quantizer(); rows of `x` may have a stride, and
/// columns are a multiple of 8.
void quantize_rows(const TensorView& x, const QuantKey& key, std::optional<float> scale,
                   const core::QuantizedViews& out, Stream stream);
/// As core::dequantize(), of the same keys and columns.
void dequantize_rows(const core::QuantizedViews& in, const QuantKey& key, const TensorView& out,
                     Stream stream);

}  // namespace fusedmoe::cuda
