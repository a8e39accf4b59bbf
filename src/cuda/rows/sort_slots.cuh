// A stable counting sort of slots by local expert, by one block or by all blocks of a cluster.
//
// Each warp owns a range of neighbouring slots and a counter for every expert, in shared memory. It
// counts its slots; prefix sums over the warps (and blocks) before it turn each counter into the
// number of the warp's first slot among those of the expert; then the warp goes over its slots
// again, in order, and numbers them. Every id is read twice, whatever the number of experts.
#pragma once

#include <cstdint>

#include "cuda/device/cluster.cuh"

namespace fusedmoe::cuda {

/// Shared memory of sort_slots().
struct SlotCounters {
  int num_experts;
  int warps;       ///< that own slots; the other warps help with the sums
  int* of_warp;    ///< (warps, num_experts)
  int* totals;     ///< (num_experts): slots of this block
  int* offsets;    ///< (num_experts + 1): first row of each expert; last: rows
  int* warp_sums;  ///< (32)

  __host__ __device__ static int words(int num_experts, int warps) {
    return (warps + 2) * num_experts + 1 + 32;
  }
  __device__ SlotCounters(int experts, int counting_warps, int* memory)
      : num_experts(experts),
        warps(counting_warps),
        of_warp(memory),
        totals(memory + warps * experts),
        offsets(totals + experts),
        warp_sums(offsets + experts + 1) {}
};

/// Replaces `count` values in shared memory by the sums of those before; returns the sum of all.
/// All threads of a block.
__device__ inline int exclusive_sums(int* values, int count, int* warp_sums) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32, num_warps = threads / 32;
  int sum = 0;
  for (int first = 0; first < count; first += threads) {
    const int i = first + thread;
    const int value = i < count ? values[i] : 0;
    int inclusive = value;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    const int of_warp = lane < num_warps ? warp_sums[lane] : 0;
    const int before = __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
    if (i < count) values[i] = sum + before + inclusive - value;
    sum += __reduce_add_sync(~0u, of_warp);
    __syncthreads();
  }
  return sum;
}

/// Calls place(slot, expert, number) for every slot in [begin, end): the local expert, and the
/// number of the slot among all of that expert; expert -1 where there is none. `expert_of(slot)` is
/// called twice for a slot. counters.offsets are complete when place is first called. All threads
/// of a block, or of all kCluster blocks of a cluster: then each has its range of slots, in the
/// order of the ranks.
template <int kCluster, typename ExpertOf, typename Place>
__device__ void sort_slots(const SlotCounters& counters, std::int64_t begin, std::int64_t end,
                           const ExpertOf& expert_of, const Place& place) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32;
  const int num_experts = counters.num_experts, warps = counters.warps;
  const std::int64_t share = ((end - begin + warps - 1) / warps + 31) / 32 * 32;
  const std::int64_t first = min(begin + min(warp, warps) * share, end);
  const std::int64_t last = warp < warps ? min(first + share, end) : first;
  int* own = counters.of_warp + warp * num_experts;

  for (int i = thread; i < warps * num_experts; i += threads) counters.of_warp[i] = 0;
  __syncthreads();
#pragma unroll 4
  for (std::int64_t slot = first + lane; slot < last; slot += 32) {
    const int expert = expert_of(slot);
    if (expert >= 0) atomicAdd(own + expert, 1);
  }
  __syncthreads();

  if constexpr (kCluster > 1) {
    for (int e = thread; e < num_experts; e += threads) {
      int total = 0;
      for (int w = 0; w < warps; ++w) total += counters.of_warp[w * num_experts + e];
      counters.totals[e] = total;
    }
    cluster_arrive();
    cluster_wait();
  }
  for (int e = thread; e < num_experts; e += threads) {
    int before = 0, all = 0;
    if constexpr (kCluster > 1) {
      const int rank = cluster_rank();
      for (int r = 0; r < kCluster; ++r) {
        const int total = *in_block(counters.totals + e, r);
        all += total;
        if (r < rank) before += total;
      }
    }
    for (int w = 0; w < warps; ++w) {
      int& counter = counters.of_warp[w * num_experts + e];
      const int count = counter;
      counter = before;
      before += count;
    }
    counters.offsets[e] = kCluster > 1 ? all : before;
  }
  if constexpr (kCluster > 1) cluster_arrive();  // has read the totals of the other blocks
  __syncthreads();
  const int rows = exclusive_sums(counters.offsets, num_experts, counters.warp_sums);
  if (thread == 0) counters.offsets[num_experts] = rows;
  __syncthreads();

  int next = first + lane < last ? expert_of(first + lane) : -1;
  for (std::int64_t group = first; group < last; group += 32) {
    const std::int64_t slot = group + lane;
    const int expert = next;
    next = slot + 32 < last ? expert_of(slot + 32) : -1;  // loads while this group is placed
    const unsigned same = __match_any_sync(~0u, expert);
    const unsigned before = same & ((1u << lane) - 1);
    const int number = expert >= 0 ? own[expert] + __popc(before) : -1;
    __syncwarp();
    if (expert >= 0 && before == 0) own[expert] += __popc(same);
    __syncwarp();
    if (slot < last) place(slot, expert, number);
  }
  // No block may end while others read its totals.
  if constexpr (kCluster > 1) cluster_wait();
}

}  // namespace fusedmoe::cuda
