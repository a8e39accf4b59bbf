// Quantizes one row of activations: finds the largest magnitudes, makes scales, writes codes. Also
// turns codes back into values. The order of the floating-point operations is part of the formats:
// vLLM's kernels for FP8, INT8 and NVFP4, the OCP Microscaling specification and its three
// published variants for MX. Formulas: docs/number-formats.md, "Quantization formulas".
//
// Loops go over many elements and have no branches, so compilers make vectors of them. Each file
// that includes this (quantize.cpp, and cpu/dot_f32.h for the levels of the CPU) compiles it with
// its own instructions; so everything here has internal linkage.
#pragma once

#include <bit>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fusedmoe/quant.h"
#include "quant/quantize_elements.h"
#include "quant/quantize_scales.h"

namespace fusedmoe::core {
namespace {

inline bool per_tensor(const QuantKey& key) {
  return key.group == GroupShape{-1, -1};
}
inline bool is_nvfp4(const QuantKey& key) {
  return key.value == DType::kE2M1 && key.scale == DType::kE4M3;
}
inline bool is_mx(const QuantKey& key) {
  return key.scale == DType::kE8M0 && key.group == GroupShape{1, 32};
}

/// Calls function(group, groups), with a small group as a constant: a loop over so few elements is
/// fast only if the compiler knows how many.
template <class Function>
inline void call_for_group(std::int64_t group, std::int64_t count, const Function& function) {
  const auto call = [&](auto size) { function(size, count / size); };
  switch (group) {
    case 16:
      return call(std::integral_constant<std::int64_t, 16>());
    case 32:
      return call(std::integral_constant<std::int64_t, 32>());
    case 64:
      return call(std::integral_constant<std::int64_t, 64>());
    case 128:
      return call(std::integral_constant<std::int64_t, 128>());
    default:
      return call(group);
  }
}

/// NaN counts as 0.
inline float largest_magnitude(const float* x, std::int64_t count) {
  std::int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t bits = magnitude_bits(x[i]);
    const std::int32_t magnitude = bits > kInfinityBits ? 0 : bits;
    largest = largest > magnitude ? largest : magnitude;
  }
  return std::bit_cast<float>(largest);
}

/// Of each group; the last may have fewer elements.
inline void largest_magnitudes(const float* x, std::int64_t count, std::int64_t group,
                               float* amax) {
  call_for_group(group, count, [&](auto size, std::int64_t groups) {
    for (std::int64_t g = 0; g < groups; ++g) amax[g] = largest_magnitude(x + g * size, size);
  });
  const std::int64_t whole = count / group * group;
  if (whole < count) amax[count / group] = largest_magnitude(x + whole, count - whole);
}

/// Scale of a row, or of a group of one, with f32 scales or power-of-two ones of e4m3 groups.
inline float block_scale(float amax, const QuantKey& key) {
  if (key.value == DType::kI8) return int8_scale(amax, key.full_range);
  if (key.value == DType::kI16) return int16_scale(amax);
  if (key.group.cols < 0) return e4m3_row_scale(amax);
  return e4m3_group_scale(amax, key.scale == DType::kE8M0);
}

/// Whether elements are divided by the factors, else multiplied.
inline bool divides(const QuantKey& key) {
  return key.full_range || (key.value == DType::kE4M3 && !is_mx(key) && !per_tensor(key));
}

/// What the elements of that block are multiplied or divided by.
inline float block_factor(float amax, const QuantKey& key) {
  if (divides(key)) return block_scale(amax, key);
  if (key.value == DType::kI8) return int8_factor(amax);
  return 1.0F / int16_scale(amax);
}

/// The scales of groups, from number `first` of a row on, and the factors of their elements.
/// `global_scale` is NVFP4's.
inline void make_scales(const float* amax, std::int64_t groups, const QuantKey& key,
                        float global_scale, void* scales, std::int64_t first, float* factors) {
  auto* codes = static_cast<std::uint8_t*>(scales) + first;
  if (is_nvfp4(key)) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const Nvfp4Scale scale = nvfp4_scale(amax[g], global_scale);
      codes[g] = scale.code;
      factors[g] = scale.factor;
    }
  } else if (is_mx(key)) {
    const bool e2m1 = key.value == DType::kE2M1;
    for (std::int64_t g = 0; g < groups; ++g) {
      codes[g] = mx_scale_code(amax[g], e2m1, key.scale_rule);
      const bool is_zero = e2m1 ? codes[g] == 0 : amax[g] == 0;
      // 2^(127 - code), exact in fp32 for every code.
      factors[g] = is_zero ? 0.0F : 1.0F / e8m0_value(codes[g]);
    }
  } else {
    for (std::int64_t g = 0; g < groups; ++g) {
      const float scale = block_scale(amax[g], key);
      factors[g] = block_factor(amax[g], key);
      if (key.scale == DType::kE8M0) {
        codes[g] = static_cast<std::uint8_t>(e8m0_code(scale));
      } else {
        static_cast<float*>(scales)[first + g] = scale;
      }
    }
  }
}

/// Elements times or over the factors of their groups.
inline void scale_elements(const float* x, std::int64_t count, std::int64_t group,
                           const float* factors, bool divide, float* scaled) {
  const auto scale = [&](std::int64_t begin, auto size, float factor) {
    if (divide) {
      for (std::int64_t i = 0; i < size; ++i) scaled[begin + i] = x[begin + i] / factor;
    } else {
      for (std::int64_t i = 0; i < size; ++i) scaled[begin + i] = x[begin + i] * factor;
    }
  };
  call_for_group(group, count, [&](auto size, std::int64_t groups) {
    for (std::int64_t g = 0; g < groups; ++g) scale(g * size, size, factors[g]);
  });
  const std::int64_t whole = count / group * group;
  if (whole < count) scale(whole, count - whole, factors[count / group]);
}

/// What published kernels write for an MX block whose scale counts as zero: zeros; but NaN stays.
inline void clear_zero_blocks(std::int64_t count, std::int64_t group, const float* factors,
                              float* scaled) {
  for (std::int64_t begin = 0; begin < count; begin += group) {
    if (factors[begin / group] != 0) continue;
    for (std::int64_t i = begin; i < begin + group && i < count; ++i) {
      if (scaled[i] == scaled[i]) scaled[i] = 0;
    }
  }
}

/// Elements scaled at a time: few enough for the L1, and even, so that E2M1 ends with a whole byte.
inline constexpr std::int64_t kChunk = 1024;

/// Codes of scaled elements, at most kChunk.
inline void write_codes(const float* scaled, std::int64_t count, const QuantKey& key,
                        std::uint8_t* codes) {
  if (key.value == DType::kE4M3) {
    for (std::int64_t i = 0; i < count; ++i) codes[i] = e4m3_code(scaled[i]);
  } else if (key.value == DType::kI16) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int16_t code = int16_code(scaled[i]);
      std::memcpy(codes + 2 * i, &code, 2);
    }
  } else if (key.full_range) {
    for (std::int64_t i = 0; i < count; ++i) {
      codes[i] = static_cast<std::uint8_t>(full_int8_code(scaled[i]));
    }
  } else if (key.value == DType::kI8) {
    for (std::int64_t i = 0; i < count; ++i) {
      codes[i] = static_cast<std::uint8_t>(int8_code(scaled[i]));
    }
  } else {
    std::uint8_t nibbles[kChunk];
    for (std::int64_t i = 0; i < count; ++i) nibbles[i] = e2m1_code(scaled[i]);
    for (std::int64_t i = 0; i < count / 2; ++i) {
      codes[i] = static_cast<std::uint8_t>(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
    }
    if (count % 2 != 0) codes[count / 2] = nibbles[count - 1];
  }
}

/// Codes of elements, with the factors of their groups.
inline void write_elements(const float* x, std::int64_t count, std::int64_t group,
                           const float* factors, const QuantKey& key, std::uint8_t* codes) {
  float scaled[kChunk];
  const bool divide = divides(key);
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t part = count - begin < kChunk ? count - begin : kChunk;
    scale_elements(x + begin, part, group < part ? group : part, factors + begin / group, divide,
                   scaled);
    if (is_mx(key)) clear_zero_blocks(part, group, factors + begin / group, scaled);
    write_codes(scaled, part, key, codes + bytes(key.value, begin));
  }
}

/// quantize_row() of quantize.h.
inline void quantize_row_here(const float* x, std::int64_t count, const QuantKey& key, float scale,
                              std::uint8_t* codes, void* scales) {
  if (per_tensor(key)) {
    // A tensor of zeros has scale 0; a reciprocal beyond fp32 means values that count as zero.
    const float inverse = 1.0F / scale;
    const float factor = inverse > FLT_MAX || inverse < -FLT_MAX ? 0 : inverse;
    return write_elements(x, count, count, &factor, key, codes);
  }
  if (count == 0) return;
  const std::int64_t group = key.group.cols < 0 ? count : key.group.cols;
  const std::int64_t groups_at_once = group < kChunk ? kChunk / group : 1;
  float amax[kChunk], factors[kChunk];
  for (std::int64_t begin = 0; begin < count; begin += groups_at_once * group) {
    const std::int64_t left = count - begin;
    const std::int64_t part = left < groups_at_once * group ? left : groups_at_once * group;
    largest_magnitudes(x + begin, part, group, amax);
    make_scales(amax, (part + group - 1) / group, key, scale, scales, begin / group, factors);
    write_elements(x + begin, part, group, factors, key, codes + bytes(key.value, begin));
  }
}

/// Values of codes, at most kChunk of them; E2M1 two to a byte.
inline void read_codes(const std::uint8_t* codes, std::int64_t count, DType type, float* values) {
  if (type == DType::kE4M3) {
    for (std::int64_t i = 0; i < count; ++i) values[i] = e4m3_value(codes[i]);
  } else if (type == DType::kI16) {
    for (std::int64_t i = 0; i < count; ++i) {
      std::int16_t code;
      std::memcpy(&code, codes + 2 * i, 2);
      values[i] = code;
    }
  } else if (type == DType::kI8) {
    for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<std::int8_t>(codes[i]);
  } else {
    std::uint8_t nibbles[kChunk];
    for (std::int64_t i = 0; i < (count + 1) / 2; ++i) {
      nibbles[2 * i] = codes[i] & 15;
      nibbles[2 * i + 1] = codes[i] >> 4;
    }
    for (std::int64_t i = 0; i < count; ++i) values[i] = e2m1_value(nibbles[i]);
  }
}

/// values[i] = value of code i times scales[i / group]. With `to_bf16` the values are bf16, which
/// must hold each product exactly; else fp32.
inline void expand_codes(const std::uint8_t* codes, std::int64_t count, DType type,
                         const float* scales, std::int64_t group, bool to_bf16, void* values) {
  float unscaled[kChunk], scaled[kChunk];
  for (std::int64_t begin = 0, part = 0; begin < count; begin += part) {
    // Whole groups, or a part of one.
    part = group < kChunk ? kChunk / group * group : group - begin % group;
    if (part > kChunk) part = kChunk;
    if (part > count - begin) part = count - begin;
    read_codes(codes + bytes(type, begin), part, type, unscaled);
    float* products = to_bf16 ? scaled : static_cast<float*>(values) + begin;
    scale_elements(unscaled, part, group < part ? group : part, scales + begin / group, false,
                   products);
    if (!to_bf16) continue;
    auto* halves = static_cast<std::uint16_t*>(values) + begin;
    for (std::int64_t i = 0; i < part; ++i) {
      halves[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(scaled[i]) >> 16);
    }
  }
}

}  // namespace
}  // namespace fusedmoe::core
