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
  /// Of the scales of int4 and int8 groups (f32, f16, bf16); they are rounded to it before the
  /// codes are chosen.
  DType scale_dtype = DType::kF32;
};

/// A matrix in tensors of its own, in the form that WeightMatrix describes.
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
/// Quantizes one matrix: (out, in) f32, f16 or bf16, any strides, all finite. NVFP4 takes its
/// global scale from `global_amax` where given (w1 and w3 share one), else from the matrix. A key
/// without scales converts. Throws Error for keys that no weights have.
FUSEDMOE_API QuantizedMatrix quantize_weights(const TensorView& values, const QuantKey& key,
                                              const QuantizeOptions& options = {},
                                              std::optional<float> global_amax = {});

/// Element (row, column) of every row, decoded to f32 (out, in): (code - zero point) * scale *
/// global scale, products rounded once each. W4A8: e4m3(code * group scale) * channel scale.
FUSEDMOE_API Tensor dequantize_weights(const WeightMatrix& matrix, const QuantKey& key,
                                       std::int64_t in);

/// FP8 per-tensor weights whose gate and up differ in scale, as engines hold them that keep one
/// scale for the fused w13: the half with the smaller scale becomes codes e4m3(code * own scale *
/// (1 / larger scale)), fp32 products from left to right, in a tensor of its own; both halves then
/// have the larger scale. It loses precision, which is why nothing here does it unasked. Throws
/// Error for weights of another format. Experts without `up` stay as they are.
FUSEDMOE_API void merge_gate_up_scales(ExpertWeights& weights);

}  // namespace fusedmoe
