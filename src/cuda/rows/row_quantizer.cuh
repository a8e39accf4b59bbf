// Quantizes 8 neighbouring bf16 values of a row and decodes them again, by lanes whose neighbours
// have the rest of their group. Formulas: quant/quantize_scales.h.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/device/e4m3_convert.cuh"
#include "cuda/rows/row_transform.h"
#include "quant/quantize_scales.h"

namespace fusedmoe::cuda {

/// To the nearest E2M1 number, ties to the even code; saturates at +-6, NaN gives +6.
__device__ __forceinline__ float round_to_e2m1(float value) {
  if (isnan(value)) return core::kE2M1Max;
  const float magnitude = fminf(fabsf(value), core::kE2M1Max);
  // Adding 1.5 * 2^23 steps rounds to a multiple of the step.
  const float magic = magnitude < 2 ? 0x1.8p22F : magnitude < 4 ? 0x1.8p23F : 0x1.8p24F;
  return copysignf(__fsub_rn(__fadd_rn(magnitude, magic), magic), value);
}
__device__ __forceinline__ float e4m3_value(std::uint32_t code) {
  return __low2float(from_e4m3(code));
}
__device__ __forceinline__ float round_to_e4m3(float value) {
  return e4m3_value(to_e4m3(value, 0));
}

/// The largest of kLanes neighbours, a power of two, by the lanes in `mask`.
template <int kLanes>
__device__ __forceinline__ float amax_of_lanes(float amax, unsigned mask = ~0U) {
#pragma unroll
  for (int lane = 1; lane < kLanes; lane *= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(mask, amax, lane));
  }
  return amax;
}

/// Makes `largest` that of itself and the magnitudes of two values; NaN counts as 0 if it was none.
template <typename Pair>
__device__ __forceinline__ void take_larger(std::uint32_t values, Pair& largest) {
  largest = __hmax2(largest, __habs2(reinterpret_cast<const Pair&>(values)));
}
template <typename Pair>
__device__ __forceinline__ void take_larger(const uint4& values, Pair& largest) {
  for (const std::uint32_t pair : {values.x, values.y, values.z, values.w}) {
    take_larger(pair, largest);
  }
}
template <typename Pair>
__device__ __forceinline__ float larger(const Pair& pair) {
  return fmaxf(__low2float(pair), __high2float(pair));
}

/// The largest magnitude of a group of 8 * kLanes values, of which each lane has 8; NaN counts as
/// 0.
template <int kLanes>
__device__ __forceinline__ float group_amax(const __nv_bfloat162 (&pairs)[4], unsigned mask) {
  __nv_bfloat162 largest = __float2bfloat162_rn(0);
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = __hmax2(largest, __habs2(pairs[i]));
  return amax_of_lanes<kLanes>(larger(largest), mask);
}

/// Of an MX block: values are multiplied by `factor`, codes by `scale`.
struct MxScale {
  int code;
  float scale, factor;
  bool is_zero;  ///< values count as zero, too
};
__device__ __forceinline__ MxScale mx_scale(float amax, bool e2m1, MxScaleRule rule) {
  const int code = core::mx_scale_code(amax, e2m1, rule);
  const float scale = core::e8m0_value(code);
  return {code, scale, 1.0F / scale, e2m1 ? code == 0 : amax == 0};
}
/// What published kernels write for a block whose scale counts as zero: zeros; but NaN stays.
__device__ __forceinline__ float scaled(float value, float factor, bool is_zero) {
  return is_zero && !isnan(value) ? 0.0F : value * factor;
}

/// By the lanes in `mask`, which have whole groups: 4 lanes are one of MX, 2 of NVFP4.
__device__ __forceinline__ uint4 quantize_and_decode(const RowQuantizer& quantizer, int expert,
                                                     const uint4& unit, unsigned mask) {
  using Kind = RowQuantizer::Kind;
  __nv_bfloat162 pairs[4];
  memcpy(pairs, &unit, sizeof(pairs));
  float factor, scale;  // values are multiplied by the one, codes by the other
  bool is_zero = false;
  if (quantizer.kind == Kind::kNvfp4) {
    const core::Nvfp4Scale block =
        core::nvfp4_scale(group_amax<2>(pairs, mask), quantizer.global_scales[expert]);
    factor = block.factor;
    scale = core::e4m3_magnitude(block.code);
  } else {
    const MxScale block =
        mx_scale(group_amax<4>(pairs, mask), quantizer.kind == Kind::kMxfp4, quantizer.rule);
    factor = block.factor;
    scale = block.scale;
    is_zero = block.is_zero;
  }
  const auto convert = [&](float value) {
    const float code = scaled(value, factor, is_zero);
    return scale * (quantizer.kind == Kind::kMxfp8 ? round_to_e4m3(code) : round_to_e2m1(code));
  };
#pragma unroll
  for (__nv_bfloat162& pair : pairs) {
    pair = __floats2bfloat162_rn(convert(__low2float(pair)), convert(__high2float(pair)));
  }
  uint4 result;
  memcpy(&result, pairs, sizeof(result));
  return result;
}

}  // namespace fusedmoe::cuda
