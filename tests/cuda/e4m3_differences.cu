#include "e4m3_differences.h"

#include "cuda/device/check.h"
#include "cuda/device/e4m3_convert.cuh"

namespace fusedmoe::testing {
namespace {

__device__ unsigned long long differences[3];

__device__ bool differ(float first, float second) {
  const float2 both{first, second};
  return cuda::to_e4m3_by_hand(first, second) !=
         __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, __NV_E4M3);
}
__device__ bool same_number(std::uint16_t a, std::uint16_t b) {
  const bool is_nan = (a & 0x7FFF) > 0x7C00;
  return is_nan ? (b & 0x7FFF) > 0x7C00 : a == b;
}

/// By 2^16 threads.
__global__ void count_kernel() {
  const std::uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long of_f32 = 0;
  for (std::uint32_t low = 0; low < 1U << 16; ++low) {
    const std::uint32_t bits = thread << 16 | low;
    of_f32 += differ(__uint_as_float(bits), __uint_as_float(~bits));
  }
  atomicAdd(&differences[0], of_f32);

  const auto half_bits = static_cast<std::uint16_t>(thread);
  const __half2_raw halves{half_bits, static_cast<std::uint16_t>(~half_bits)};
  const float2 both = __half22float2(__half2(halves));
  if (cuda::to_e4m3_by_hand(both.x, both.y) !=
      __nv_cvt_halfraw2_to_fp8x2(halves, __NV_SATFINITE, __NV_E4M3)) {
    atomicAdd(&differences[1], 1);
  }

  const __half2_raw by_hand = cuda::from_e4m3_by_hand(thread);
  const __half2_raw wanted = __nv_cvt_fp8x2_to_halfraw2(half_bits, __NV_E4M3);
  if (!same_number(by_hand.x, wanted.x) || !same_number(by_hand.y, wanted.y)) {
    atomicAdd(&differences[2], 1);
  }
}

}  // namespace

bool can_count_e4m3_differences() {
  cudaFuncAttributes attributes;
  const bool has_code = cudaFuncGetAttributes(&attributes, count_kernel) == cudaSuccess;
  cudaGetLastError();
  return has_code;
}

E4m3Differences count_e4m3_differences() {
  unsigned long long counts[3] = {};
  FUSEDMOE_CUDA_CHECK(cudaMemcpyToSymbol(differences, counts, sizeof(counts)));
  count_kernel<<<(1 << 16) / 128, 128>>>();
  FUSEDMOE_CUDA_CHECK(cudaGetLastError());
  FUSEDMOE_CUDA_CHECK(cudaMemcpyFromSymbol(counts, differences, sizeof(counts)));
  return {counts[0], counts[1], counts[2]};
}

}  // namespace fusedmoe::testing
