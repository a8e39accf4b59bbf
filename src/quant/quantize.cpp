// Quantization of whole tensors of activations, row by row (quantize_row.h), and back.
#include "fusedmoe/quant.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/check.h"
#include "core/parallel.h"
#include "fusedmoe/tensor.h"
#include "quant/quantize.h"
#include "quant/quantize_row.h"

namespace fusedmoe {
namespace {

using core::is_nvfp4;
using core::per_tensor;

constexpr std::int64_t kMaxGroup = 4096;

}  // namespace

namespace core {

bool has_quantizer(const QuantKey& key) {
  const GroupShape group = key.group;
  const bool per_row = group.rows == 1 && key.dynamic && (group.cols == -1 || group.cols > 0) &&
                       group.cols <= kMaxGroup;
  switch (key.value) {
    case DType::kE4M3:
      if (key.scale == DType::kE8M0) return per_row && group.cols > 0;
      return key.scale == DType::kF32 && (per_tensor(key) || per_row);
    case DType::kI8:
      return key.scale == DType::kF32 && per_row;
    case DType::kI16:
      return key.scale == DType::kF32 && per_row && group.cols > 0;
    case DType::kE2M1:
      if (is_nvfp4(key)) return key.dynamic && group == GroupShape{1, 16};
      return key.dynamic && is_mx(key);
    default:
      return false;
  }
}

bool is_integer(const QuantKey& key) {
  return key.value == DType::kI8 || key.value == DType::kI16;
}

bool has_cuda_quantizer(const QuantKey& key) {
  if (!has_quantizer(key) || is_nvfp4(key) || is_integer(key)) return false;
  if (is_mx(key) || !key.dynamic) return true;
  return key.group == GroupShape{1, -1} || key.group == GroupShape{1, 128};
}

std::int64_t scales_per_row(const QuantKey& key, std::int64_t count) {
  return key.group.cols < 0 ? 1 : (count + key.group.cols - 1) / key.group.cols;
}

float amax(const float* x, std::int64_t count) {
  return largest_magnitude(x, count);
}

float tensor_scale(float amax) {
  return amax / kE4M3Max;
}

float nvfp4_global_scale(float amax) {
  constexpr float kLargest = kE2M1Max * kE4M3Max;
  const float scale = amax / kLargest;
  return std::isfinite(1.0F / scale) ? scale : 1.0F;
}

void quantize_row(const float* x, std::int64_t count, const QuantKey& key, float scale,
                  std::uint8_t* codes, void* scales) {
  quantize_row_here(x, count, key, scale, codes, scales);
}

}  // namespace core

// ------------------------------------------------------------------------------------------------
// Whole tensors
namespace {

constexpr std::int64_t kParallelActivations = 1 << 15;

/// Row `row` of x as f32, `buffer` or x itself, from column `begin` on.
const float* load_row(const TensorView& x, std::int64_t row, std::int64_t begin, std::int64_t count,
                      float* buffer) {
  const std::int64_t offset = row * x.stride(0) + begin;
  if (x.dtype() == DType::kF32) return x.as<const float>() + offset;
  const auto* source = x.as<const std::uint16_t>() + offset;
  if (x.dtype() == DType::kBF16) {
    for (std::int64_t i = 0; i < count; ++i) {
      buffer[i] = std::bit_cast<float>(static_cast<std::uint32_t>(source[i]) << 16);
    }
  } else {
    for (std::int64_t i = 0; i < count; ++i) buffer[i] = f16_to_f32(source[i]);
  }
  return buffer;
}

float row_amax(const TensorView& x, std::int64_t row) {
  float buffer[kMaxGroup];
  float largest = 0;
  for (std::int64_t begin = 0; begin < x.size(1); begin += kMaxGroup) {
    const std::int64_t count = std::min(kMaxGroup, x.size(1) - begin);
    largest = std::max(largest, core::amax(load_row(x, row, begin, count, buffer), count));
  }
  return largest;
}

/// Rows with one scale each: it is known only after a first pass.
void quantize_whole_row(const TensorView& x, std::int64_t row, const QuantKey& key,
                        std::uint8_t* codes, float* scale) {
  float buffer[kMaxGroup];
  const float largest = row_amax(x, row);
  *scale = core::block_scale(largest, key);
  const float factor = core::block_factor(largest, key);
  for (std::int64_t begin = 0; begin < x.size(1); begin += kMaxGroup) {
    const std::int64_t count = std::min(kMaxGroup, x.size(1) - begin);
    core::write_elements(load_row(x, row, begin, count, buffer), count, count, &factor, key,
                         codes + begin);
  }
}

void quantize_groups(const TensorView& x, std::int64_t row, const QuantKey& key, float scale,
                     std::uint8_t* codes, std::uint8_t* scales) {
  float buffer[kMaxGroup];
  const std::int64_t group = per_tensor(key) ? kMaxGroup : key.group.cols;
  const std::int64_t step = kMaxGroup / group * group;  // whole groups
  const std::int64_t scale_bytes = bytes(*key.scale, 1);
  for (std::int64_t begin = 0; begin < x.size(1); begin += step) {
    const std::int64_t count = std::min(step, x.size(1) - begin);
    core::quantize_row(load_row(x, row, begin, count, buffer), count, key, scale,
                       codes + bytes(key.value, begin), scales + begin / group * scale_bytes);
  }
}

float scale_of_tensor(Executor& executor, const TensorView& x) {
  const bool worthwhile = x.numel() >= kParallelActivations;
  return core::tensor_scale(core::parallel_max(executor, x.size(0), worthwhile,
                                               [&](std::int64_t begin, std::int64_t end) {
                                                 float largest = 0;
                                                 for (std::int64_t row = begin; row < end; ++row) {
                                                   largest = std::max(largest, row_amax(x, row));
                                                 }
                                                 return largest;
                                               }));
}

}  // namespace

QuantizedShape quantized_shape(const QuantKey& key, std::int64_t rows, std::int64_t cols) {
  FUSEDMOE_CHECK(core::has_quantizer(key), "key", name(QuantScheme{key, {}}),
                 "a number format of activations");
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  FUSEDMOE_CHECK_FAULT(rows >= 0 && cols >= 0 && rows <= kMost && cols <= kMost, kShape, "x",
                       core::format("{} rows of {} columns", rows, cols),
                       core::format("of 0 to {} each", kMost));
  QuantizedShape result;
  const bool packed = key.value == DType::kE2M1;
  result.values_dtype = packed ? DType::kU8 : key.value;
  result.values = {rows, packed ? (cols + 1) / 2 : cols};
  result.scales_dtype = *key.scale;
  result.scales = per_tensor(key) ? Shape{1, 1} : Shape{rows, core::scales_per_row(key, cols)};
  return result;
}

void core::quantize(Executor& executor, const TensorView& x, const QuantKey& key,
                    std::optional<float> scale, const QuantizedViews& out) {
  const TensorView &values = out.values, &scales = out.scales;  // not bindings: clang 14
  FUSEDMOE_CHECK_FAULT(x.defined() && x.rank() == 2 && core::is_activation_dtype(x.dtype()) &&
                           (x.stride(1) == 1 || x.size(1) <= 1) && x.device().is_cpu(),
                       kShape, "x", core::describe(x),
                       "(rows, cols) f32, f16 or bf16, rows contiguous");
  const QuantizedShape shape = quantized_shape(key, x.size(0), x.size(1));
  core::check_tensor(values, "values", shape.values_dtype, shape.values);
  core::check_tensor(scales, "scales", shape.scales_dtype, shape.scales);
  FUSEDMOE_CHECK(values.device().is_cpu() && scales.device().is_cpu(), "values",
                 core::format("values on {}, scales on {}", to_string(values.device()),
                              to_string(scales.device())),
                 "on the cpu");
  const bool takes_scale = !key.dynamic || is_nvfp4(key);
  if (scale && !takes_scale) throw Error::conflict("scale", "a dynamic key");
  if (!scale && takes_scale) {
    throw Error::invalid("scale", "scale is missing: static keys and NVFP4 need one");
  }
  FUSEDMOE_CHECK(!scale || (*scale > 0 && std::isfinite(*scale)), "scale", core::to_string(*scale),
                 "positive and finite");
  if (per_tensor(key)) {
    if (!scale) scale = scale_of_tensor(executor, x);
    *scales.as<float>() = *scale;
  }
  const std::int64_t row_values = bytes(shape.values_dtype, shape.values[1]);
  const std::int64_t row_scales = shape.scales[1] * bytes(shape.scales_dtype, 1);
  const bool worthwhile = x.numel() >= kParallelActivations;
  core::parallel_for(executor, x.size(0), worthwhile, [&](std::int64_t row) {
    std::uint8_t* codes = values.as<std::uint8_t>() + row * row_values;
    if (key.group == GroupShape{1, -1}) {
      quantize_whole_row(x, row, key, codes, scales.as<float>() + row);
    } else {
      quantize_groups(x, row, key, scale.value_or(1), codes,
                      scales.as<std::uint8_t>() + (per_tensor(key) ? 0 : row * row_scales));
    }
  });
}

namespace {

float scale_value(const TensorView& scales, std::int64_t index) {
  return scales.dtype() == DType::kE8M0 ? e8m0_to_f32(scales.as<const std::uint8_t>()[index])
                                        : scales.as<const float>()[index];
}

void store_value(const TensorView& out, std::int64_t index, float value) {
  constexpr float kF16Max = 65504;
  if (out.dtype() == DType::kF32) {
    out.as<float>()[index] = value;
  } else if (out.dtype() == DType::kBF16) {
    out.as<std::uint16_t>()[index] = f32_to_bf16(value);
  } else {
    const float limited = value > kF16Max ? kF16Max : value < -kF16Max ? -kF16Max : value;
    out.as<std::uint16_t>()[index] = f32_to_f16(limited);
  }
}

}  // namespace

void core::dequantize(Executor& executor, const QuantizedViews& in, const QuantKey& key,
                      const TensorView& out) {
  const TensorView &values = in.values, &scales = in.scales;
  const std::int64_t columns = out.size(1), row_values = bytes(values.dtype(), values.size(1));
  const std::int64_t per_row = scales_per_row(key, columns);
  const std::int64_t group = key.group.cols < 0 ? columns : key.group.cols;
  parallel_for(executor, out.size(0), out.numel() >= kParallelActivations, [&](std::int64_t row) {
    const std::uint8_t* codes = values.as<const std::uint8_t>() + row * row_values;
    for (std::int64_t begin = 0; begin < columns; begin += group) {
      const std::int64_t end = std::min(begin + group, columns);
      const float scale = scale_value(scales, per_tensor(key) ? 0 : row * per_row + begin / group);
      for (std::int64_t i = begin; i < end; ++i) {
        store_value(out, row * columns + i, load_f32(codes, key.value, i) * scale);
      }
    }
  });
}

void quantize(const TensorView& x, const QuantKey& key, const TensorView& values,
              const TensorView& scales, std::optional<float> scale) {
  core::quantize(default_executor(), x, key, scale, {values, scales});
}

}  // namespace fusedmoe
