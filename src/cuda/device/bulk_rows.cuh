// Bulk copies from global to shared memory, which complete on a barrier there, and back. For code
// of 9.0 and later.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fusedmoe::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* memory) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(memory));
}

/// For phases that one thread begins by expect_bulk_bytes(). The first is phase 0.
__device__ __forceinline__ void init_bulk_barrier(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// What the calling thread sees in global memory its bulk copies see behind this, too.
__device__ __forceinline__ void fence_bulk() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
/// How many bytes the copies of the phase bring, also if they have been issued before.
__device__ __forceinline__ void expect_bulk_bytes(std::uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
/// Addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
/// Until all bytes of the phase, 0 or 1 by turns, are here.
__device__ __forceinline__ void wait_for_bulk(std::uint64_t* barrier, std::uint32_t phase) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
  }
}

/// What the calling thread sees in shared memory its bulk copies see behind this, too.
__device__ __forceinline__ void fence_bulk_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
/// Until all that the calling thread has stored is there.
__device__ __forceinline__ void wait_for_bulk_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace fusedmoe::cuda
