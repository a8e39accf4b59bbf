// Weight matrices of every key decoded to f32.
#include <algorithm>

#include "core/check.h"
#include "core/parallel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "quant/quantize.h"
#include "quant/quantize_elements.h"
#include "quant/weight_layout.h"

namespace fusedmoe {
namespace {

using core::GlobalScale;
using core::WeightLayout;

/// Element `column` of a row before its scale: a value of the format, or an unsigned code.
float stored_value(const WeightMatrix& matrix, const QuantKey& key, std::int64_t row,
                   std::int64_t column) {
  const TensorView& values = matrix.values;
  const auto index = [&](std::int64_t packing) {
    return row * values.stride(0) + column / packing * values.stride(1);
  };
  switch (key.value) {
    case DType::kE4M3:
      return core::e4m3_value(values.as<const std::uint8_t>()[index(1)]);
    case DType::kE2M1:
      return core::e2m1_value(
          static_cast<std::uint8_t>(values.as<const std::uint8_t>()[index(2)] >> (column % 2 * 4)));
    case DType::kI4:
      return static_cast<float>(values.as<const std::uint32_t>()[index(8)] >> (column % 8 * 4) &
                                15);
    case DType::kIq4:
      return core::iq4_value(static_cast<std::uint8_t>(
          values.as<const std::uint32_t>()[index(8)] >> (column % 8 * 4) & 15));
    case DType::kU8:
      return static_cast<float>(values.as<const std::uint32_t>()[index(4)] >> (column % 4 * 8) &
                                255);
    default:
      return load_f32(values.data(), values.dtype(), index(1));
  }
}

float scale_value(const TensorView& scales, DType code, std::int64_t index) {
  return load_f32(scales.data(), scales.dtype() == DType::kU8 ? code : scales.dtype(), index);
}

class Decoder {
 public:
  Decoder(const WeightMatrix& matrix, const QuantKey& key, std::int64_t in)
      : matrix_(core::stored_form(matrix)),
        key_(key),
        layout_(core::weight_layout(key, "key")),
        in_(in) {}

  void row(std::int64_t r, float* out) const {
    if (!layout_.quantized()) {
      for (std::int64_t i = 0; i < in_; ++i) out[i] = stored_value(matrix_, key_, r, i);
      return;
    }
    const std::int64_t width = key_.group.cols;
    std::int64_t begin = 0;
    while (begin < in_) {
      const std::int64_t block = core::block_of(begin, width, matrix_.first_col);
      const std::int64_t next = width < 0 ? in_ : (block + 1) * width - matrix_.first_col;
      const std::int64_t end = std::min(in_, next);
      decode_block(r, block, begin, end, out);
      begin = end;
    }
  }

 private:
  /// Factor `index` of row r in llama.cpp's blocks.
  float block_factor(std::int64_t r, std::int64_t index) const {
    const TensorView& global = matrix_.global_scale;
    return load_f32(global.data(), DType::kF16, r * global.stride(0) + index * global.stride(1));
  }

  /// Products of a factor and a scale or offset are exact; a weight is rounded once.
  void decode_in_block(std::int64_t r, std::int64_t begin, std::int64_t end, float scale,
                       float zero, float* out) const {
    const std::int64_t block = begin / key_.global_group.cols * layout_.factors_per_block();
    const float factor = scale * block_factor(r, block);
    const float offset = layout_.zero_points ? zero * block_factor(r, block + 1) : 0;
    const float middle = layout_.zero_points ? 0 : zero;
    for (std::int64_t i = begin; i < end; ++i) {
      out[i] = (stored_value(matrix_, key_, r, i) - middle) * factor - offset;
    }
  }

  void decode_block(std::int64_t r, std::int64_t block, std::int64_t begin, std::int64_t end,
                    float* out) const {
    const std::int64_t block_row = core::block_of(r, key_.group.rows, matrix_.first_row);
    const auto index = [&](const TensorView& view) {
      return block_row * view.stride(0) + block * view.stride(1);
    };
    const float scale = scale_value(matrix_.scales, *key_.scale, index(matrix_.scales));
    const float zero =
        layout_.zero_points
            ? matrix_.zero_points.as<const std::uint8_t>()[index(matrix_.zero_points)]
            : static_cast<float>(layout_.zero);
    if (layout_.global_scale == GlobalScale::kPerBlock) {
      return decode_in_block(r, begin, end, scale, zero, out);
    }
    const bool per_row = layout_.global_scale == GlobalScale::kPerRow;
    const float global =
        layout_.global_scale == GlobalScale::kNone
            ? 1
            : matrix_.global_scale
                  .as<const float>()[per_row ? r * matrix_.global_scale.stride(0) : 0];
    for (std::int64_t i = begin; i < end; ++i) {
      float value = (stored_value(matrix_, key_, r, i) - zero) * scale;
      if (per_row) value = core::e4m3_value(core::e4m3_code(value));
      out[i] = value * global;
    }
  }

  const WeightMatrix matrix_;
  const QuantKey& key_;
  const WeightLayout layout_;
  const std::int64_t in_;
};

}  // namespace

Tensor dequantize_weights(const WeightMatrix& matrix, const QuantKey& key, std::int64_t in) {
  const TensorView& values = matrix.values;
  FUSEDMOE_CHECK_FAULT(values.defined() && values.rank() == 2, kShape, "matrix.values",
                       core::describe(values), "of rank 2");
  FUSEDMOE_CHECK(in > 0, "in", core::to_string(in), "positive");
  core::check_matrix(matrix, key, "matrix", values.size(0), in);
  core::check_device(values, "matrix.values", {});
  Tensor result = Tensor::empty({values.size(0), in}, DType::kF32);
  const Decoder decoder(matrix, key, in);
  const bool worthwhile = result.numel() >= core::kParallelWeights;
  core::parallel_for(default_executor(), values.size(0), worthwhile,
                     [&](std::int64_t r) { decoder.row(r, result.as<float>() + r * in); });
  return result;
}

}  // namespace fusedmoe
