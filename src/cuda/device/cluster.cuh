// Blocks of a cluster: they run at the same time and reach each other's shared memory.
#pragma once

namespace fusedmoe::cuda {

__device__ inline int cluster_rank() {
  unsigned rank = 0;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

/// The two halves of a barrier of all threads of a cluster: what a thread wrote before it arrived,
/// others see after they have waited.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

/// The same place in the shared memory of the block of rank `rank`.
template <typename T>
__device__ T* in_block(T* shared, int rank) {
  T* there = nullptr;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
  return there;
}

}  // namespace fusedmoe::cuda
