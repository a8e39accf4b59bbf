// Quantizers: values to codes and scales, bit-exact after the formulas of docs/architecture.md,
// "Quantization".
#pragma once

#include <cstdint>
#include <optional>

#include "fusedmoe/export.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {

/// Elements and scales of activations (rows, cols) quantized with `key`: e4m3 and i8 as such, e2m1
/// as u8 (rows, ceil(cols / 2)); scales of the key's type: (1, 1), (rows, 1) or (rows, groups).
struct QuantizedShape {
  DType values_dtype;
  Shape values;
  DType scales_dtype;
  Shape scales;
};
FUSEDMOE_API QuantizedShape quantized_shape(const QuantKey& key, std::int64_t rows,
                                            std::int64_t cols);

/// Quantizes activations. x: (rows, cols) f32, f16 or bf16, rows contiguous; values, scales: as
/// quantized_shape says, contiguous. `scale` is the static scale of a key that is not dynamic
/// (values = x / scale), and the global scale of NVFP4 (the multiplier of its block scales: amax /
/// 2688); it is written to a static key's scales. Allocates nothing.
FUSEDMOE_API void quantize(const TensorView& x, const QuantKey& key, const TensorView& values,
                           const TensorView& scales, std::optional<float> scale = {});

/// How quantize_weights chooses scales.
struct QuantizeOptions {
  MxScaleRule scale_rule = MxScaleRule::kOcp;  ///< of MXFP4 and MXFP8 weights
};

/// Quantizes one matrix (f32, f16 or bf16 values, any strides; bias kept) into tensors of its own,
/// in the form that WeightMatrix describes. NVFP4 takes its global scale from `global_amax` where
/// given (w1 and w3 share one), else from the matrix.
struct QuantizedMatrix {
  Tensor values, scales, zero_points, global_scale;
  WeightMatrix view() const {
    WeightMatrix matrix;
    matrix.values = values;
    matrix.scales = scales;
    matrix.zero_points = zero_points;
    matrix.global_scale = global_scale;
    return matrix;
  }
};
FUSEDMOE_API QuantizedMatrix quantize_weights(const TensorView& values, const QuantKey& key,
                                              const QuantizeOptions& options = {},
                                              std::optional<float> global_amax = {});

/// Element (row, column) of every row, decoded to f32 (out, in): (code - zero point) * scale *
/// global scale, products rounded once each. W4A8: e4m3(code * group scale) * channel scale.
FUSEDMOE_API Tensor dequantize_weights(const WeightMatrix& matrix, const QuantKey& key,
                                       std::int64_t in);

}  // namespace fusedmoe
