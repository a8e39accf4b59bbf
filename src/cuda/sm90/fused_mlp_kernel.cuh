// The fused MLP kernel: persistent, warp-specialised, both GEMMs of a layer in one launch. Its
// roles stand below in the order in which data passes them:
//
//   schedule_and_load_weights  one thread  draws tile indexes from a counter, in order, tells the
//                                          others of the work tiles, and streams their weights
//   load_activations           one thread  brings the token rows of each tile
//   load_scales                a warp      brings scales, where each K block has its own
//   multiply_tiles             warpgroups  multiply; without an epilogue warpgroup they also store
//   multiply_token_tiles       warpgroups  the same with tokens as rows (TileShape)
//   run_epilogues              a warpgroup stores small tiles while the next is multiplied
//   publish_tiles              one thread  tells other thread blocks which tiles are stored
//
// Who stores tiles may also quantize rows between the GEMMs (row_pass.cuh, join_group.cuh).
//
// Weights never wait for activations: those of GEMM 2 are under way while the last tiles of GEMM 1
// are still computed. Only activation loads wait: GEMM 2's for the GEMM 1 tiles that produce them,
// GEMM 1's for rows that still come from other GPUs.
// Tile indexes are drawn in order, and rows come by blocks that run before this launch may begin.
// So a thread block that waits always waits for blocks that run: no order of launches can lock up.
//
// The blocks of a cluster take neighbouring row tiles of the same tokens: each loads a part of the
// token rows for all. Its first block draws the tile index, and tells the others.
//
// Files: kernel.cuh (sizes, shared memory, barriers), copies.cuh, mainloop*.cuh, store_tile.cuh,
// row_pass.cuh, join_group.cuh (what the roles do for one tile), token_rows.cuh and
// store_token_rows.cuh (the same where tokens are the rows of a tile). mlp/ has what sm80/ shares:
// tile_scheduler.cuh (which tile is next), epilogue*.cuh, stored_rows.cuh.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "cuda/mlp/row_pass.cuh"
#include "cuda/mlp/stored_rows.cuh"
#include "cuda/mlp/tile_scheduler.cuh"
#include "cuda/sm90/copies.cuh"
#include "cuda/sm90/mainloop.cuh"
#include "cuda/sm90/share_index.cuh"
#include "cuda/sm90/store_tile.cuh"
#include "cuda/sm90/store_token_rows.cuh"
#include "cuda/sm90/token_rows.cuh"

namespace fusedmoe::cuda::sm90 {

template <typename K>
__device__ inline void schedule_and_load_weights(SharedMemory<K>& shared, const FusedMlpParams& p,
                                                 int rank) {
  StageState<K> stage;
  TileState<K> slot;
  // A launch of one GEMM cannot deadlock, as no tile waits for another. So block i starts with tile
  // i and streams its weights before the counters are there. A launch of both draws every tile.
  const bool owns_first = p.num_gemms == 1;
  const int num_owned = owns_first ? static_cast<int>(gridDim.x) / K::kCluster : 0;
  const auto draw = [&] { return rank == 0 ? num_owned + atomicAdd(p.counters, 1) : 0; };
  bool waits_for_counters = p.order >= LaunchOrder::kBesideRouting;
  // Else, while the counters are still made, each block brings some tile's first packed blocks
  // near, for whichever draws it: 1 to 3 % of one token. In the loop: code is slow when it runs for
  // the first time.
  bool is_ahead = waits_for_counters && !owns_first;
  int drawn = is_ahead || owns_first ? static_cast<int>(blockIdx.x) / K::kCluster : draw();
  while (true) {
    int index = drawn;
    if (!is_ahead) {
      index = share_index(shared, slot, rank, drawn);
      wait(&shared.tile_free[slot.index], slot.phase ^ 1);
    }
    const WorkTile tile = make_tile(shared, p, index, rank);
    if (is_ahead) {
      prefetch_weights<K>(p, tile);
      wait_for_previous_launch();
      if (p.order == LaunchOrder::kFirstBesideRouting) let_next_launch_begin();
      drawn = draw();
      is_ahead = waits_for_counters = false;
      continue;
    }
    shared.tiles[slot.index] = tile;
    arrive(&shared.tile_full[slot.index]);
    slot.advance();
    if (tile.gemm < 0) {
      // A block without tiles, too: this launch must not end before that one.
      wait_for_previous_launch();
      return;
    }
    if (!waits_for_counters) drawn = draw();  // its latency hides behind the stream
    if (!is_row_pass<K>(tile)) copy_weights(shared, p, tile, stage);
    if (waits_for_counters) {
      wait_for_previous_launch();
      if (p.order == LaunchOrder::kFirstBesideRouting) let_next_launch_begin();
      drawn = draw();
      waits_for_counters = false;
    }
  }
}

template <typename K>
__device__ inline void load_activations(SharedMemory<K>& shared, const FusedMlpParams& p,
                                        const ActivationMaps& maps, int rank) {
  StageState<K> stage;
  TileState<K> slot;
  ArrivingRows arriving(p);
  while (true) {
    wait(&shared.tile_full[slot.index], slot.phase);
    const WorkTile tile = shared.tiles[slot.index];
    arrive(&shared.tile_free[slot.index]);
    slot.advance();
    if (tile.gemm < 0) return;
    if (is_row_pass<K>(tile)) continue;

    wait_for_previous(p);
    if (tile.gemm == 1) {
      wait_for_rows<K>(p, tile);
      // They were stored by ordinary writes, and tensor copies read them.
      fence_bulk();
    } else {
      arriving.wait(p, tile);
    }
    copy_activations(shared, p, maps.boxes[tile.gemm], tile, rank, stage);
  }
}

template <typename K>
__device__ inline void load_scales(SharedMemory<K>& shared, const FusedMlpParams& p) {
  StageState<K> stage;
  TileState<K> slot;
  ArrivingRows arriving(p);
  wait_for_previous(p);
  while (true) {
    wait(&shared.tile_full[slot.index], slot.phase);
    const WorkTile tile = shared.tiles[slot.index];
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared.tile_free[slot.index]);
    slot.advance();
    if (tile.gemm < 0) return;
    if constexpr (!K::kTokensAreRows) {
      tile.gemm == 1 ? wait_for_rows<K>(p, tile) : arriving.wait(p, tile);
    }
    copy_scales(shared, p.gemms[tile.gemm], tile, stage);
  }
}

/// A tile of the row pass, by the warpgroups that store tiles.
template <typename K>
__device__ __forceinline__ void pass_rows(SharedMemory<K>& shared, const FusedMlpParams& p,
                                          const WorkTile& tile, int group) {
  wait_for_previous(p);
  wait_until_stored<true>(p, tile, count_needed<K>(p, tile));
  quantize_rows<K>(shared, p.pass.rows, tile, group);
}

template <typename K>
__device__ __forceinline__ void multiply_tiles(SharedMemory<K>& shared, const FusedMlpParams& p) {
  const WarpgroupCoords<K> coords{__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0)};
  StageState<K> stage;
  constexpr unsigned kSlots = K::kTileSlots;
  for (unsigned count = 0;; ++count) {  // one register, where TileState takes two
    const unsigned slot = count % kSlots;
    wait(&shared.tile_full[slot], count / kSlots % 2);
    const WorkTile& tile = shared.tiles[slot];  // read where needed: registers are scarce
    if (tile.gemm < 0) return;
    if (is_row_pass<K>(tile)) {
      if constexpr (K::kHasEpilogueWarpgroup) {
        publish_nothing(shared, count % 2 ^ 1);
      } else if constexpr (K::kHasRowPass) {
        pass_rows(shared, p, tile, coords.row_group());
        arrive(&shared.tile_stored[slot]);
      }
      continue;
    }
    if constexpr (!K::kHasEpilogueWarpgroup) {
      prefetch_scale_and_bias<K>(p.gemms[tile.gemm], tile, coords);
    }
    typename K::Accumulators accumulators;
    multiply_tile(shared, p, tile, coords, stage, accumulators);
    if constexpr (K::kHasEpilogueWarpgroup) {
      publish_accumulators(shared, tile, coords, accumulators, count % 2 ^ 1);
    } else {
      wait_for_previous(p);
      store_tile(shared, p, tile, coords, accumulators);
      arrive(&shared.tile_stored[slot]);
    }
  }
}

template <typename K>
__device__ __forceinline__ void multiply_token_tiles(SharedMemory<K>& shared,
                                                     const FusedMlpParams& p) {
  StageState<K> stage;
  constexpr unsigned kSlots = K::kTileSlots;
  for (unsigned count = 0;; ++count) {
    const unsigned slot = count % kSlots;
    wait(&shared.tile_full[slot], count / kSlots % 2);
    const WorkTile& tile = shared.tiles[slot];
    if (tile.gemm < 0) return;
    const GemmParams& gemm = p.gemms[tile.gemm];
    prefetch_column_factors<K>(gemm, tile);
    typename K::Accumulators accumulators;
    multiply_token_rows(shared, gemm, tile, stage, accumulators);
    wait_for_previous(p);
    store_token_rows(shared, p, tile, static_cast<int>(count % 2), accumulators);
    arrive(&shared.tile_stored[slot]);
  }
}

template <typename K>
__device__ __forceinline__ void run_epilogues(SharedMemory<K>& shared, const FusedMlpParams& p) {
  constexpr unsigned kSlots = K::kTileSlots;
  for (unsigned count = 0;; ++count) {
    const unsigned slot = count % kSlots;
    wait(&shared.tile_full[slot], count / kSlots % 2);
    const WorkTile& tile = shared.tiles[slot];
    if (tile.gemm < 0) return;
    if (is_row_pass<K>(tile)) {
      if constexpr (K::kHasRowPass) pass_rows(shared, p, tile, 0);
      accept_nothing(shared, count % 2);
    } else {
      store_published_tile(shared, p, tile, count % 2);
    }
    arrive(&shared.tile_stored[slot]);
  }
}

/// Counts what is stored with a release, so that the storing warps need not fence.
template <typename K>
__device__ inline void publish_tiles(SharedMemory<K>& shared, const FusedMlpParams& p) {
  TileState<K> slot;
  while (true) {
    wait(&shared.tile_full[slot.index], slot.phase);
    const WorkTile& tile = shared.tiles[slot.index];
    if (tile.gemm < 0) return;
    const int token_tile = tile.token_tile, step = count_of<K>(p, tile);
    wait(&shared.tile_stored[slot.index], slot.phase);
    arrive(&shared.tile_free[slot.index]);
    slot.advance();
    if (step > 0) count_stored(p, token_tile, step);
  }
}

/// K is a Kernel<Operands, index of the tile shape>.
template <typename K>
__global__ __launch_bounds__(K::kThreads,
                             1) void fused_mlp_kernel(const __grid_constant__ FusedMlpParams params,
                                                      const __grid_constant__ ActivationMaps maps) {
  extern __shared__ __align__(1024) std::uint8_t memory[];
  SharedMemory<K>& shared = *reinterpret_cast<SharedMemory<K>*>(memory);
  const int rank = K::kCluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0;

  const int expert = read_expert(params);
  init_barriers(shared, uses_k_scales<K>(params));
  if constexpr (K::kTokensAreRows) clear_scales(shared);
  shared.tables.make(threadIdx.x, K::kThreads);
  if (threadIdx.x == 0) {
    for (int i = 0; i < params.num_gemms; ++i) {
      constexpr int kFirst = K::kWideCopies ? 0 : ActivationMaps::first_box(K::kMaxTokens);
      cute::prefetch_tma_descriptor(&maps.boxes[i][kFirst]);
    }
  }
  // The first launch of a forward was made without PDL, so what came before it has completed. What
  // it writes itself must be waited for here, or later by those who read it.
  if (starts_behind(params)) wait_for_previous_launch();
  if (params.order != LaunchOrder::kFirstBesideRouting) let_next_launch_begin();
  count_tiles(shared, params, expert);
  if constexpr (K::kCluster > 1) cute::cluster_sync();

  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<K::kLoadRegisters>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0 && cute::elect_one_sync()) {
      schedule_and_load_weights(shared, params, rank);
    } else if (warp == 1 && cute::elect_one_sync()) {
      load_activations(shared, params, maps, rank);
    } else if (warp == 2 && cute::elect_one_sync()) {
      publish_tiles(shared, params);
    } else if (warp == 3 && uses_k_scales<K>(params)) {
      if constexpr (K::Operands::kHasKScales) load_scales(shared, params);
    }
  } else if (!K::kHasEpilogueWarpgroup || threadIdx.x < K::kThreads - 128) {
    cutlass::arch::warpgroup_reg_alloc<K::kMultiplyRegisters>();
    if constexpr (K::kTokensAreRows) {
      multiply_token_tiles(shared, params);
    } else {
      multiply_tiles(shared, params);
    }
  } else {
    if constexpr (K::kHasEpilogueWarpgroup) {
      cutlass::arch::warpgroup_reg_alloc<K::kEpilogueRegisters>();
      run_epilogues(shared, params);
    }
  }
  if constexpr (K::kCluster > 1) {  // others may still arrive at this block's barriers
    __syncwarp();
    cute::cluster_sync();
  }
}

}  // namespace fusedmoe::cuda::sm90
