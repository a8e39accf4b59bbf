// Numbers to E4M3 codes and back. Since compute capability 8.9 there are instructions for it; for
// earlier GPUs cuda_fp8.h takes some 60 instructions and branches for a code, and the functions
// "by hand" below a quarter of them. A test compares both for all numbers and all codes.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "core/host_device.h"
#include "cuda/device/e4m3_f16.cuh"
#include "cuda/device/pick_bytes.h"
#include "quant/quantize_elements.h"

namespace fusedmoe::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
inline constexpr bool kConvertsE4m3 = true;
#else
inline constexpr bool kConvertsE4m3 = false;
#endif

FUSEDMOE_HD inline std::uint16_t to_e4m3_by_hand(float first, float second) {
  return static_cast<std::uint16_t>(core::e4m3_code(first) | core::e4m3_code(second) << 8);
}
/// The codes of two numbers, of `first` in the low byte: the nearest, of two the even one; at most
/// +-448. NaN becomes 0x7F.
__device__ __forceinline__ std::uint16_t to_e4m3(float first, float second) {
  if constexpr (kConvertsE4m3) {
    return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
  } else {
    return to_e4m3_by_hand(first, second);
  }
}

__device__ __forceinline__ __half2 from_e4m3_by_hand(std::uint32_t codes) {
  const __half2 small = small_e4m3(pick_bytes(codes, 0, 0x1404));
  // NaN looks like 480: times this it becomes infinite, and 448, the largest number, does not.
  const __half2 large = __hmul2(small, __float2half2_rn(36000));
  return __hfma2(large, __float2half2_rn(0), __hmul2(small, __float2half2_rn(256)));
}
/// The numbers of the codes in the two low bytes, exactly.
__device__ __forceinline__ __half2 from_e4m3(std::uint32_t codes) {
  if constexpr (kConvertsE4m3) {
    return __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3));
  } else {
    return from_e4m3_by_hand(codes);
  }
}

}  // namespace fusedmoe::cuda
