// The row transforms on the device, a warp at a time: neighbouring lanes have neighbouring units of
// one row, also behind its end.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/device/e4m3_convert.cuh"
#include "cuda/device/e4m3_f16.cuh"
#include "cuda/rows/row_quantizer.cuh"
#include "cuda/rows/row_transform.h"
#include "fusedmoe/error.h"

namespace fusedmoe::cuda {

inline constexpr int kUnitBytes = 16;
/// Units that a warp has at a time.
inline constexpr int kSpanUnits = 32;
/// Neighbours, of 8 values each, that share the scale of a group.
inline constexpr int kGroupLanes = 16;

__device__ __forceinline__ int units_of(const RowTransform& t) {
  return static_cast<int>(t.row_bytes / kUnitBytes);
}

/// Zeros behind the end of the row.
__device__ __forceinline__ uint4 read_unit(const RowTransform& t, std::int64_t row, int unit) {
  if (unit >= units_of(t)) return {};
  return reinterpret_cast<const uint4*>(static_cast<const char*>(t.rows) + row * t.row_pitch)[unit];
}

/// The values of a unit.
using UnitValues = float2[4];
__device__ __forceinline__ void read_values(bool from_f16, const uint4& raw, UnitValues& values) {
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  if (from_f16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = __half22float2(reinterpret_cast<const __half2&>(words[i]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(words[i]));
    }
  }
}
/// NaN counts as 0.
__device__ __forceinline__ float amax_of_values(const UnitValues& values) {
  float amax = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    amax = fmaxf(amax, fmaxf(fabsf(values[i].x), fabsf(values[i].y)));
  }
  return amax;
}

/// Of the units of a row that a thread of `kThreads` reads.
template <typename Pair, int kThreads>
__device__ __forceinline__ float amax_of_units(const RowTransform& t, std::int64_t row) {
  Pair largest(0.0F, 0.0F);
  for (int unit = static_cast<int>(threadIdx.x % kThreads); unit < units_of(t); unit += kThreads) {
    take_larger(read_unit(t, row, unit), largest);
  }
  return larger(largest);
}

/// The largest magnitude of a row, to all threads of a warp; NaN counts as 0. With several warps
/// all threads of the block must call it, once in a kernel: it uses shared memory.
template <int kWarps = 1>
__device__ __forceinline__ float amax_of_row(const RowTransform& t, std::int64_t row) {
  constexpr int kThreads = 32 * kWarps;
  float amax = t.from_f16 ? amax_of_units<__half2, kThreads>(t, row)
                          : amax_of_units<__nv_bfloat162, kThreads>(t, row);
  amax = amax_of_lanes<32>(amax);
  if constexpr (kWarps > 1) {
    __shared__ float of_warps[kWarps];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (const float of_warp : of_warps) amax = fmaxf(amax, of_warp);
  }
  return amax;
}

/// The same of a row whose units a warp has in registers.
template <int kSpans>
__device__ __forceinline__ float amax_of_units(const RowTransform& t,
                                               const uint4 (&units)[kSpans]) {
  const auto amax = [&](auto largest) {
#pragma unroll
    for (const uint4& unit : units) take_larger(unit, largest);
    return larger(largest);
  };
  return amax_of_lanes<32>(t.from_f16 ? amax(__half2(0.0F, 0.0F))
                                      : amax(__nv_bfloat162(0.0F, 0.0F)));
}

using RowKind = RowTransform::Kind;
/// On the host: function(kind), a constant, for kinds that are no copies.
template <typename Function>
void with_kind(RowKind kind, const Function& function) {
  switch (kind) {
    case RowKind::kQuantizeAndDecode:
      return function(std::integral_constant<RowKind, RowKind::kQuantizeAndDecode>{});
    case RowKind::kFp8:
      return function(std::integral_constant<RowKind, RowKind::kFp8>{});
    case RowKind::kFp8AsF16:
      return function(std::integral_constant<RowKind, RowKind::kFp8AsF16>{});
    case RowKind::kInt8:
      return function(std::integral_constant<RowKind, RowKind::kInt8>{});
    case RowKind::kCopy:
      break;
  }
  throw Error::internal("copies of rows have kernels of their own");
}

/// What the codes of a row follow from, by its largest magnitude: of FP8 the scale, of INT8 that
/// magnitude itself.
template <RowKind kKind>
__device__ __forceinline__ float row_scale(float amax) {
  return kKind == RowKind::kInt8 ? amax : core::e4m3_row_scale(amax);
}

/// The same of a row in memory; 1 where groups have their own. By threads as amax_of_row().
template <RowKind kKind, int kWarps = 1>
__device__ __forceinline__ float scale_of_row(const RowTransform& t, std::int64_t row) {
  if constexpr (kKind >= RowKind::kFp8) {
    switch (t.fp8.scale) {
      case Fp8Quantizer::Scale::kStatic:
        return t.fp8.static_scale;
      case Fp8Quantizer::Scale::kTensor:
        return __uint_as_float(*t.fp8.amax) / core::kE4M3Max;
      case Fp8Quantizer::Scale::kRow:
        return row_scale<kKind>(amax_of_row<kWarps>(t, row));
      case Fp8Quantizer::Scale::kGroup:
        break;
    }
  }
  return 1;
}

/// A unit on its way out: 16 bytes, of codes the first 8; and the scale of its codes.
struct Converted {
  uint4 data;
  float scale;
};

/// function(value) for each value.
template <typename Function>
__device__ __forceinline__ void transform_values(UnitValues& values, const Function& function) {
#pragma unroll
  for (float2& pair : values) pair = make_float2(function(pair.x), function(pair.y));
}

/// E4M3 codes.
__device__ __forceinline__ uint2 round_to_fp8(const UnitValues& values) {
  std::uint16_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) codes[i] = to_e4m3(values[i].x, values[i].y);
  uint2 result;
  memcpy(&result, codes, sizeof(codes));
  return result;
}

/// E4M3 codes of the values divided by the scale of their row or group. `inverse` is 1 / scale. It
/// is no normal number only where the largest value is infinite: then the scale is infinite, too,
/// or a power of two, and a product has the bits of the division.
__device__ __forceinline__ uint2 divide_to_fp8(UnitValues& values, float scale, float inverse) {
  constexpr float kLargestWithInverse = 0x1p126F;
  const bool has_inverse = scale <= kLargestWithInverse;
  transform_values(values, [&](float value) {
    return has_inverse ? core::quotient(value, scale, inverse) : value * inverse;
  });
  return round_to_fp8(values);
}

/// E4M3 codes of the values times a factor.
__device__ __forceinline__ uint2 multiply_to_fp8(UnitValues& values, float factor) {
  transform_values(values, [&](float value) { return value * factor; });
  return round_to_fp8(values);
}

__device__ __forceinline__ Converted to_fp8(const RowTransform& t, const uint4& raw, float scale) {
  using Scale = Fp8Quantizer::Scale;
  const Fp8Quantizer& fp8 = t.fp8;
  UnitValues values;
  read_values(t.from_f16, raw, values);
  if (fp8.scale == Scale::kGroup) {
    const float amax = amax_of_lanes<kGroupLanes>(amax_of_values(values));
    scale = core::e4m3_group_scale(amax, fp8.power_of_two);
  }
  uint2 codes;
  if (fp8.scale == Scale::kRow || fp8.scale == Scale::kGroup) {
    codes = divide_to_fp8(values, scale, 1.0F / scale);
  } else {
    codes = multiply_to_fp8(values, tensor_factor(scale));
  }
  return {{codes.x, codes.y, 0, 0}, scale};
}

/// INT8 codes, by the formulas of the CPU: quant/quantize_scales.h and quantize_elements.h.
__device__ __forceinline__ Converted to_int8(const RowTransform& t, const uint4& raw, float amax) {
  UnitValues values;
  read_values(t.from_f16, raw, values);
  const float scale = core::int8_scale(amax, t.full_range), factor = core::int8_factor(amax);
  const auto code = [&](float value) {
    const std::int8_t result = t.full_range ? core::full_int8_code(__fdiv_rn(value, scale))
                                            : core::int8_code(__fmul_rn(value, factor));
    return static_cast<std::uint32_t>(static_cast<std::uint8_t>(result));
  };
  std::uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i / 2] |= (code(values[i].x) | code(values[i].y) << 8) << i % 2 * 16;
  }
  return {{words[0], words[1], 0, 0}, scale};
}

/// By whole warps. `row_scale`: scale_of_row(). Each kind has kernels of its own: cold code takes
/// time.
template <RowKind kKind>
__device__ __forceinline__ Converted convert_unit(const RowTransform& t, const uint4& raw,
                                                  int expert, float row_scale) {
  if constexpr (kKind == RowKind::kQuantizeAndDecode) {
    return {quantize_and_decode(t.decoded, expert, raw, ~0U), 1};
  } else if constexpr (kKind == RowKind::kInt8) {
    return to_int8(t, raw, row_scale);
  } else {
    return to_fp8(t, raw, row_scale);
  }
}

/// Writes the numbers of a unit's codes as f16, in the order of e4m3_f16.cuh. Behind an odd last
/// unit, which is half of 16 columns, it writes zeros for the other half: `row` has room for them.
__device__ __forceinline__ void write_fp8_as_f16(char* row, int unit, int units,
                                                 const uint2& codes) {
  OddAndEven first = e4m3_to_f16(codes.x), second = e4m3_to_f16(codes.y);
  mark_nan(codes.x, first);
  mark_nan(codes.y, second);
  uint2* to = reinterpret_cast<uint2*>(row) + unit / 2 * 4 + unit % 2;
  to[0] = make_uint2(first.odd, second.odd);
  to[2] = make_uint2(first.even, second.even);
  if (unit % 2 == 0 && unit + 1 == units) to[1] = to[3] = make_uint2(0, 0);
}

template <RowKind kKind>
__device__ __forceinline__ void write_unit(const RowTransform& t, std::int64_t row, int unit,
                                           const Converted& value) {
  if (unit >= units_of(t)) return;
  char* to = static_cast<char*>(t.to) + row * t.to_pitch;
  if constexpr (kKind < RowKind::kFp8) {
    reinterpret_cast<uint4*>(to)[unit] = value.data;
  } else if constexpr (kKind == RowKind::kFp8AsF16) {
    write_fp8_as_f16(to, unit, units_of(t), make_uint2(value.data.x, value.data.y));
  } else {
    reinterpret_cast<uint2*>(to)[unit] = make_uint2(value.data.x, value.data.y);
  }
  if (kKind < RowKind::kFp8 || !t.scales) return;
  if (t.fp8.scale == Fp8Quantizer::Scale::kGroup) {
    if (unit % kGroupLanes == 0) {
      t.scales[unit / kGroupLanes * t.scale_pitch + row] = value.scale;
    }
  } else if (unit == 0) {
    t.scales[row] = value.scale;
  }
}

}  // namespace fusedmoe::cuda
