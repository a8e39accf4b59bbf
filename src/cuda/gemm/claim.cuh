// Which work a block of the grouped GEMM kernel does: rows and tiles of each expert, and the items
// behind the numbers that blocks claim.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "cuda/gemm/schedule.h"
#include "cuda/gemm/tile.cuh"

namespace fusedmoe::cuda {

template <typename Weights, TileConfig kTile>
struct Claims : GemmTypes<Weights, kTile> {
  using Base = GemmTypes<Weights, kTile>;
  using Base::kClusterRowBlocks;
  using typename Base::Config;
  using typename Base::ItemState;
  using typename Base::Shared;

  /// First row of each expert where blocks count by themselves; behind the tile prefixes.
  __device__ static std::int32_t* row_prefix(Shared& shared) {
    return shared.tile_prefix + kMaxExperts / 2 + 1;
  }

  /// Rows of an expert; in the batched format the caller's word for it, within the capacity.
  __device__ static int read_rows(const GroupedGemm& p, int expert) {
    const int rows = p.expert_num_tokens[expert];
    return p.expert_offsets ? rows : max(0, min(rows, static_cast<int>(p.capacity)));
  }

  /// The local expert of this thread's slot where blocks count by themselves, else -1. To be asked
  /// for first: it comes from memory.
  __device__ static int read_expert(const GroupedGemm& p) {
    const int thread = threadIdx.x;
    return p.topk_ids && thread < p.num_slots ? p.local_experts(p.topk_ids[thread]) : -1;
  }

  /// tile_prefix, and row_prefix where this block counts by itself; all threads.
  __device__ static void count_tiles(Shared& shared, const GroupedGemm& p, int expert) {
    std::int32_t* tiles = shared.tile_prefix;  // until the sums, [e + 1] are the rows of e
    const int thread = threadIdx.x;
    for (int e = thread; e < p.num_experts; e += Config::kThreads) {
      tiles[e + 1] = p.topk_ids ? 0 : read_rows(p, e);
    }
    __syncthreads();
    if (p.topk_ids) {
      if (expert >= 0) atomicAdd(&tiles[expert + 1], 1);
      __syncthreads();
    }
    if (thread < 32) sum_up(tiles, p.topk_ids ? row_prefix(shared) : nullptr, p.num_experts);
    __syncthreads();
  }

  /// tiles[e + 1], so far the rows of e -> token tiles of the experts up to e; `rows`, if there,
  /// the same sums of rows. One warp: each lane has neighbouring experts, for one scan over all.
  __device__ static void sum_up(std::int32_t* tiles, std::int32_t* rows, int num_experts) {
    const int lane = threadIdx.x;
    const int share = (num_experts + 31) / 32;
    const int begin = min(lane * share, num_experts), end = min(begin + share, num_experts);
    int2 sum{};  // of this lane's experts; from the scan on, up to some expert
#pragma unroll 4
    for (int e = begin; e < end; ++e) {
      const int count = tiles[e + 1];
      sum = {sum.x + num_token_tiles(count, kTile.max_tokens), sum.y + count};
    }
    const int2 own = sum;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int x = __shfl_up_sync(~0u, sum.x, distance);
      const int y = __shfl_up_sync(~0u, sum.y, distance);
      if (lane >= distance) sum = {sum.x + x, sum.y + y};
    }
    sum = {sum.x - own.x, sum.y - own.y};
#pragma unroll 4
    for (int e = begin; e < end; ++e) {
      const int count = tiles[e + 1];
      sum = {sum.x + num_token_tiles(count, kTile.max_tokens), sum.y + count};
      tiles[e + 1] = sum.x;
      if (rows) rows[e + 1] = sum.y;
    }
    if (lane == 0) {
      tiles[0] = 0;
      if (rows) rows[0] = 0;
    }
  }

  __device__ static Item make_item(Shared& shared, const GroupedGemm& p, int number, int rank) {
    PhaseShape shapes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shapes[i] = {static_cast<int>(ceil_div(p.phases[i].row_blocks, kClusterRowBlocks)),
                   p.phases[i].splits};
    }
    const TileIndex tile =
        find_tile(number, shapes, p.num_phases, shared.tile_prefix, p.num_experts);
    Item item{};
    item.phase = tile.phase;
    if (tile.phase < 0) return item;
    const GemmPhase& phase = p.phases[tile.phase];
    const std::int32_t* counted = row_prefix(shared) + tile.expert;
    const int rows = p.topk_ids ? counted[1] - counted[0] : read_rows(p, tile.expert);
    const int expert_row = p.topk_ids         ? counted[0]
                           : p.expert_offsets ? p.expert_offsets[tile.expert]
                                              : static_cast<int>(tile.expert * p.capacity);
    const int first_tile = shared.tile_prefix[tile.expert];
    const int size = token_tile_size(rows, shared.tile_prefix[tile.expert + 1] - first_tile);
    const int begin = tile.token_tile * size;
    item.expert = tile.expert;
    item.row_block = tile.row_tile * kClusterRowBlocks + rank * kTile.tile_row_blocks();
    item.k_begin = split_begin(phase.k_blocks, phase.splits, tile.split);
    item.k_end = split_begin(phase.k_blocks, phase.splits, tile.split + 1);
    item.first_row = expert_row + begin;
    item.num_tokens = min(size, rows - begin);
    item.split = tile.split;
    item.counter = first_tile + tile.token_tile;
    return item;
  }

  /// As wait(), for what other blocks of the cluster wrote.
  __device__ static void wait_in_cluster(const std::uint64_t* barrier, std::uint32_t phase) {
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

  /// The number that the first block of the cluster claimed, for all of its blocks.
  __device__ static int share_number(Shared& shared, const ItemState& slot, int rank, int number) {
    if constexpr (kTile.cluster > 1) {
      std::uint64_t* full = &shared.number_full[slot.index];
      std::uint64_t* free = &shared.number_free[slot.index];
      if (rank == 0) {
        wait(free, slot.phase ^ 1);
        for (int r = 1; r < kTile.cluster; ++r) {
          const std::uint32_t target =
              cute::set_block_rank(cute::cast_smem_ptr_to_uint(&shared.numbers[slot.index]), r);
          const std::uint32_t barrier = cute::set_block_rank(cute::cast_smem_ptr_to_uint(full), r);
          asm volatile(
              "st.shared::cluster.s32 [%0], %1;\n"
              "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%2];" ::"r"(target),
              "r"(number), "r"(barrier)
              : "memory");
        }
      } else {
        wait_in_cluster(full, slot.phase);
        number = *static_cast<volatile int*>(&shared.numbers[slot.index]);
        Barrier::arrive(free, 0, true);
      }
    }
    return number;
  }
};

}  // namespace fusedmoe::cuda
