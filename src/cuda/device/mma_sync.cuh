// mma.sync with fp32 accumulators.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/mma_sm80.hpp>

#include "cuda/device/matrices.cuh"

namespace fusedmoe::cuda {

/// mma.sync of one warp: (16, 16) by (16, 8).
template <typename Element>
struct MmaSyncAtom;
template <>
struct MmaSyncAtom<__nv_bfloat16> : cute::SM80_16x8x16_F32BF16BF16F32_TN {};
template <>
struct MmaSyncAtom<__half> : cute::SM80_16x8x16_F32F16F16F32_TN {};

/// sums += A (16, 32) B (32, 8), by one warp with two instructions. `a`: the lane's registers of A,
/// four for each instruction. `b`: the row in shared memory that the lane hands to ldmatrix, which
/// loads B as four 8 x 8 matrices.
template <typename Element>
__device__ inline void multiply_8(const std::uint32_t (&a)[2][4], const std::uint8_t* b,
                                  float* sums) {
  std::uint32_t k[4];
  load_matrices(cute::cast_smem_ptr_to_uint(b), k);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    MmaSyncAtom<Element>::fma(sums[0], sums[1], sums[2], sums[3], a[i][0], a[i][1], a[i][2],
                              a[i][3], k[2 * i], k[2 * i + 1], sums[0], sums[1], sums[2], sums[3]);
  }
}

}  // namespace fusedmoe::cuda
