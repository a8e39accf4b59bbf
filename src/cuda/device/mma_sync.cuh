// mma.sync with fp32 accumulators, or int32 of INT8.
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
/// (16, 32) by (32, 8): as many bytes.
template <>
struct MmaSyncAtom<std::int8_t> {
  __device__ static void fma(int& d0, int& d1, int& d2, int& d3, std::uint32_t a0, std::uint32_t a1,
                             std::uint32_t a2, std::uint32_t a3, std::uint32_t b0, std::uint32_t b1,
                             int c0, int c1, int c2, int c3) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
  }
};

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
