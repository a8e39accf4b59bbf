// 8 x 8 matrices of 16-bit numbers between shared memory and the registers of a warp. There lane l
// holds elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1), in the low and the high half of a
// register for each matrix.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

namespace fusedmoe::cuda {

/// Four: lane 8 i + r gives the address of row r of matrix i.
__device__ __forceinline__ void load_matrices(std::uint32_t address, std::uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

/// Four, of Hopper and later: row r of matrix i goes to the 16 bytes that lane 8 i + r names.
__device__ inline void store_matrices(void* shared_address, const std::uint32_t (&m)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   cute::cast_smem_ptr_to_uint(shared_address)),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
#endif
}

/// Four, of Hopper and later: column c of matrix i goes to the 16 bytes that lane 8 i + c names.
__device__ inline void store_transposed(void* shared_address, const std::uint32_t (&m)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   cute::cast_smem_ptr_to_uint(shared_address)),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
#endif
}

/// Two: column c of matrix i goes to the 16 bytes that lane 8 i + c names; lanes from 16 on may
/// name any.
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
