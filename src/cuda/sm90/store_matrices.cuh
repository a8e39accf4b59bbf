// stmatrix: 8 x 8 blocks of 16-bit numbers from the registers of a warp to shared memory.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

namespace fusedmoe::cuda::sm90 {

/// Four blocks. Of block b, lane l holds element (l / 4, 2 (l % 4)) in the low and
/// (l / 4, 2 (l % 4) + 1) in the high half of its b-th number; row r of the block becomes the 16
/// bytes at the address that lane 8 b + r gives.
__device__ inline void store_matrices(void* shared_address, const std::uint32_t (&blocks)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   cute::cast_smem_ptr_to_uint(shared_address)),
               "r"(blocks[0]), "r"(blocks[1]), "r"(blocks[2]), "r"(blocks[3])
               : "memory");
}

}  // namespace fusedmoe::cuda::sm90
