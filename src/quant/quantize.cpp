// Quantization of activations, row by row: largest magnitude, scale, codes. The order of the
// floating-point operations is part of the formats: vLLM's kernels for FP8, INT8 and NVFP4, the
// OCP Microscaling specification and its three published variants for MX. Formulas:
// docs/number-formats.md, "Quantization formulas".
#include "fusedmoe/quant.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "core/parallel.h"
#include "fusedmoe/tensor.h"
#include "moe/experts_args.h"
#include "quant/quantize.h"
#include "quant/quantize_elements.h"
#include "quant/quantize_scales.h"

namespace fusedmoe {
namespace {

using core::e2m1_code;
using core::e4m3_code;
using core::int8_code;
using core::kE4M3Max;
using core::kMinAmax;

constexpr float kInt8Max = 127.0F;
constexpr float kFullInt8Max = 127.5F, kFullInt8Zero = 0x1p-23F;  // torch's epsilon for all zeros
constexpr std::int64_t kMaxGroup = 4096;

bool per_tensor(const QuantKey& key) {
  return key.group == GroupShape{-1, -1};
}
bool is_nvfp4(const QuantKey& key) {
  return key.value == DType::kE2M1 && key.scale == DType::kE4M3;
}
bool is_mx(const QuantKey& key) {
  return key.scale == DType::kE8M0 && key.group == GroupShape{1, 32};
}

// ------------------------------------------------------------------------------------------------
// Elements of one block

void e4m3_times(const float* x, std::int64_t count, float factor, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count; ++i) codes[i] = e4m3_code(x[i] * factor);
}

void e4m3_over(const float* x, std::int64_t count, float divisor, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count; ++i) codes[i] = e4m3_code(x[i] / divisor);
}

void int8_times(const float* x, std::int64_t count, float factor, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<std::uint8_t>(int8_code(x[i] * factor));
  }
}

void int16_times(const float* x, std::int64_t count, float factor, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int16_t code = core::int16_code(x[i] * factor);
    std::memcpy(codes + 2 * i, &code, 2);
  }
}

void full_int8_over(const float* x, std::int64_t count, float divisor, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count; ++i) {
    codes[i] = static_cast<std::uint8_t>(core::full_int8_code(x[i] / divisor));
  }
}

void e2m1_times(const float* x, std::int64_t count, float factor, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count / 2; ++i) {
    codes[i] = static_cast<std::uint8_t>(e2m1_code(x[2 * i] * factor) |
                                         e2m1_code(x[2 * i + 1] * factor) << 4);
  }
  if (count % 2 != 0) codes[count / 2] = e2m1_code(x[count - 1] * factor);
}

/// What published kernels write for a block whose scale counts as zero: zeros; but NaN stays.
void zero_codes(const float* x, std::int64_t count, DType element, std::uint8_t* codes) {
  const bool e2m1 = element == DType::kE2M1;
  std::fill_n(codes, e2m1 ? (count + 1) / 2 : count, std::uint8_t{0});
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isnan(x[i])) continue;
    if (e2m1) {
      codes[i / 2] |= static_cast<std::uint8_t>(e2m1_code(x[i]) << (i % 2 * 4));
    } else {
      codes[i] = e4m3_code(x[i]);
    }
  }
}

std::uint8_t mx_block(const float* x, std::int64_t count, const QuantKey& key,
                      std::uint8_t* codes) {
  const float amax = core::amax(x, count);
  const std::uint8_t scale = core::mx_scale(amax, key.value, key.scale_rule);
  const bool e2m1 = key.value == DType::kE2M1;
  // 2^(127 - scale), exact in fp32 for every code.
  const float inverse = 1.0F / e8m0_to_f32(scale);
  if (e2m1 ? scale == 0 : amax == 0) {
    zero_codes(x, count, key.value, codes);
  } else if (e2m1) {
    e2m1_times(x, count, inverse, codes);
  } else {
    e4m3_times(x, count, inverse, codes);
  }
  return scale;
}

std::uint8_t nvfp4_block(const float* x, std::int64_t count, float global_scale,
                         std::uint8_t* codes) {
  const core::Nvfp4Scale scale = core::nvfp4_scale(core::amax(x, count), global_scale);
  e2m1_times(x, count, scale.factor, codes);
  return scale.code;
}

/// Scale of a row, or of a group of one, with f32 scales or power-of-two ones of e4m3 groups.
float block_scale(float amax, const QuantKey& key) {
  if (key.full_range) return amax > 0 ? amax / kFullInt8Max : kFullInt8Zero;
  if (key.value == DType::kI8) return std::max(amax, kMinAmax) / kInt8Max;
  if (key.value == DType::kI16) return core::int16_scale(amax);
  if (key.group.cols < 0) return core::e4m3_row_scale(amax);
  return core::e4m3_group_scale(amax, key.scale == DType::kE8M0);
}

/// Codes of (part of) that block.
void block_codes(const float* x, std::int64_t count, const QuantKey& key, float amax,
                 std::uint8_t* codes) {
  if (key.full_range) {
    full_int8_over(x, count, block_scale(amax, key), codes);
  } else if (key.value == DType::kI8) {
    int8_times(x, count, kInt8Max / std::max(amax, kMinAmax), codes);
  } else if (key.value == DType::kI16) {
    int16_times(x, count, 1.0F / core::int16_scale(amax), codes);
  } else {
    e4m3_over(x, count, block_scale(amax, key), codes);
  }
}

/// One group of `count` elements, number `index` of its row.
void quantize_group(const float* x, std::int64_t count, const QuantKey& key, float global_scale,
                    std::uint8_t* codes, void* scales, std::int64_t index) {
  if (is_nvfp4(key)) {
    static_cast<std::uint8_t*>(scales)[index] = nvfp4_block(x, count, global_scale, codes);
  } else if (is_mx(key)) {
    static_cast<std::uint8_t*>(scales)[index] = mx_block(x, count, key, codes);
  } else {
    const float amax = core::amax(x, count), scale = block_scale(amax, key);
    block_codes(x, count, key, amax, codes);
    if (key.scale == DType::kE8M0) {
      static_cast<std::uint8_t*>(scales)[index] = f32_to_e8m0(scale);
    } else {
      static_cast<float*>(scales)[index] = scale;
    }
  }
}

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
  std::int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t magnitude = magnitude_bits(x[i]);
    largest = std::max(largest, magnitude > kInfinityBits ? 0 : magnitude);
  }
  return std::bit_cast<float>(largest);
}

float tensor_scale(float amax) {
  return amax / kE4M3Max;
}

float nvfp4_global_scale(float amax) {
  constexpr float kLargest = kE2M1Max * kE4M3Max;
  const float scale = amax / kLargest;
  return std::isfinite(1.0F / scale) ? scale : 1.0F;
}

std::uint8_t mx_scale(float amax, DType element, MxScaleRule rule) {
  return mx_scale_code(amax, element == DType::kE2M1, rule);
}

void quantize_row(const float* x, std::int64_t count, const QuantKey& key, float scale,
                  std::uint8_t* codes, void* scales) {
  if (per_tensor(key)) {
    // A tensor of zeros has scale 0; a reciprocal beyond fp32 means values that count as zero.
    const float inverse = 1.0F / scale;
    return e4m3_times(x, count, std::isinf(inverse) ? 0 : inverse, codes);
  }
  const std::int64_t group = key.group.cols < 0 ? std::max<std::int64_t>(count, 1) : key.group.cols;
  for (std::int64_t begin = 0; begin < count; begin += group) {
    quantize_group(x + begin, std::min(group, count - begin), key, scale,
                   codes + bytes(key.value, begin), scales, begin / group);
  }
}

}  // namespace core

// ------------------------------------------------------------------------------------------------
// Whole tensors
namespace {

constexpr std::int64_t kParallelElements = 1 << 15;

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
  *scale = block_scale(largest, key);
  for (std::int64_t begin = 0; begin < x.size(1); begin += kMaxGroup) {
    const std::int64_t count = std::min(kMaxGroup, x.size(1) - begin);
    block_codes(load_row(x, row, begin, count, buffer), count, key, largest, codes + begin);
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
  const bool worthwhile = x.numel() >= kParallelElements;
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
  FUSEDMOE_CHECK(scale.has_value() == takes_scale, "scale", scale ? "given" : "absent",
                 takes_scale ? "given: the key is static or NVFP4" : "absent: the key is dynamic");
  FUSEDMOE_CHECK(!scale || (*scale > 0 && std::isfinite(*scale)), "scale", core::to_string(*scale),
                 "positive and finite");
  if (per_tensor(key)) {
    if (!scale) scale = scale_of_tensor(executor, x);
    *scales.as<float>() = *scale;
  }
  const std::int64_t row_values = bytes(shape.values_dtype, shape.values[1]);
  const std::int64_t row_scales = shape.scales[1] * bytes(shape.scales_dtype, 1);
  const bool worthwhile = x.numel() >= kParallelElements;
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
  parallel_for(executor, out.size(0), out.numel() >= kParallelElements, [&](std::int64_t row) {
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
