// Blocks of a cluster: they run at the same time and reach each other's shared memory. Code for
// GPUs that have no clusters is not launched (may_cluster), it only has to compile.
#pragma once

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FUSEDMOE_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define FUSEDMOE_CLUSTER(blocks)
#endif

namespace fusedmoe::cuda {

__device__ inline int cluster_rank() {
  unsigned rank = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}

/// The two halves of a barrier of all threads of a cluster: what a thread wrote before it arrived,
/// others see after they have waited.
__device__ inline void cluster_arrive() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/// The same place in the shared memory of the block of rank `rank`.
template <typename T>
__device__ T* in_block(T* shared, int rank) {
  T* there = nullptr;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
#endif
  return there;
}

}  // namespace fusedmoe::cuda
