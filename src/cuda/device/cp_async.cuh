// How data come to a warp: cp.async copies from global to shared memory while the thread goes on;
// ldmatrix loads matrices from there into the registers that mma.sync reads.
#pragma once

#include <cstdint>

namespace fusedmoe::cuda {

/// The first `bytes` of 16, and zeros behind them. Both addresses are multiples of 16; `to` is one
/// of shared memory.
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_async(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
/// Closes the group of the thread's copies since the one before.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Until of the thread's groups all but the last kLeft are there.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

/// Four 8 x 8 matrices of 16 bits. Lane 8 i + r gives the address of row r of matrix i; of each
/// matrix it gets elements 2 (lane % 4) and the next of row lane / 4.
__device__ __forceinline__ void load_matrices(std::uint32_t address, std::uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

}  // namespace fusedmoe::cuda
