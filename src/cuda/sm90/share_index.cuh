// How the thread blocks of a cluster get the tile index that their first block draws.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "cuda/sm90/kernel.cuh"

namespace fusedmoe::cuda::sm90 {

/// As wait(), for what other blocks of the cluster wrote.
__device__ inline void wait_in_cluster(const std::uint64_t* barrier, std::uint32_t phase) {
  std::uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(phase)
        : "memory");
  }
}

/// The tile index that the first block of the cluster drew, for all of its blocks.
template <typename K>
__device__ inline int share_index(SharedMemory<K>& shared, const TileState<K>& slot, int rank,
                                  int index) {
  if constexpr (K::kCluster > 1) {
    std::uint64_t* full = &shared.index_full[slot.index];
    std::uint64_t* free = &shared.index_free[slot.index];
    if (rank == 0) {
      wait(free, slot.phase ^ 1);
      for (int r = 1; r < K::kCluster; ++r) {
        const std::uint32_t target =
            cute::set_block_rank(cute::cast_smem_ptr_to_uint(&shared.tile_indexes[slot.index]), r);
        const std::uint32_t barrier = cute::set_block_rank(cute::cast_smem_ptr_to_uint(full), r);
        asm volatile(
            "st.shared::cluster.s32 [%0], %1;\n"
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%2];" ::"r"(target),
            "r"(index), "r"(barrier)
            : "memory");
      }
    } else {
      wait_in_cluster(full, slot.phase);
      index = *static_cast<volatile int*>(&shared.tile_indexes[slot.index]);
      Barrier::arrive(free, 0, true);
    }
  }
  return index;
}

}  // namespace fusedmoe::cuda::sm90
