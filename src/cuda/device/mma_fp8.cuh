// mma.sync of FP8 with fp32 accumulators, from compute capability 8.9 on. Other GPUs than 8.9 and
// 12.x convert both operands to f16 for each of them, which is slow.
#pragma once

#include <cuda_fp8.h>

#include "cuda/device/mma_sync.cuh"

namespace fusedmoe::cuda {

/// (16, 32) by (32, 8).
template <>
struct MmaSyncAtom<__nv_fp8_e4m3> {
  __device__ static void fma(float& d0, float& d1, float& d2, float& d3, std::uint32_t a0,
                             std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                             std::uint32_t b1, float c0, float c1, float c2, float c3) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
  }
};

}  // namespace fusedmoe::cuda
