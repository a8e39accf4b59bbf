// How data come near while a thread goes on: to shared memory by cp.async, or to the L2.
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
/// Four bytes, through the L1. Both addresses are multiples of 4.
__device__ __forceinline__ void copy_async_4(std::uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
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

/// Asks for the 128-byte line at `address` in the L2 cache. May come before
/// wait_for_previous_launch(): what an earlier kernel still writes there is seen all the same.
__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace fusedmoe::cuda
