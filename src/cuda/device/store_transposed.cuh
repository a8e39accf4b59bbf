// 8 x 8 blocks of 16-bit numbers from the registers of a warp to shared memory, transposed.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

namespace fusedmoe::cuda {

/// Two blocks. Of block b, lane l holds element (l / 4, 2 (l % 4)) in the low and
/// (l / 4, 2 (l % 4) + 1) in the high half of its b-th number; column c of the block becomes the 16
/// bytes at the address that lane 8 b + c gives. Lanes from 16 on may give any.
__device__ inline void store_transposed(void* shared_address, std::uint32_t block0,
                                        std::uint32_t block1) {
  const std::uint32_t address = cute::cast_smem_ptr_to_uint(shared_address);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(block0), "r"(block1)
               : "memory");
#else
  const int lane = threadIdx.x % 32;
  const std::uint32_t blocks[2] = {block0, block1};
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    // A lane then has two neighbours of column lane / 4.
    std::uint32_t pair;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(pair) : "r"(blocks[b]));
    const std::uint32_t column = __shfl_sync(~0U, address, 8 * b + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(column + lane % 4 * 4), "r"(pair) : "memory");
  }
#endif
}

}  // namespace fusedmoe::cuda
