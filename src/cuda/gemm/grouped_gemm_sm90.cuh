// The grouped GEMM kernel: persistent, warp-specialised, both GEMMs of a layer in one launch.
//
// Warpgroup 0 loads. One of its threads claims tiles in order from a counter and streams their
// weights (bulk copies of records); another brings the rows of the tile (tensor copies in the
// 128-byte swizzle); a third tells other blocks of tiles that are stored. The other warpgroups
// multiply and store; with few tokens to a tile one of them finishes what the others have
// multiplied, so that they need not wait. Weights never wait for rows: those of GEMM 2 are under
// way while the last tiles of GEMM 1 are still computed, and only the rows wait until the tile of
// GEMM 1 that they are is complete. Tiles are claimed in order, so a block that waits always waits
// for blocks that run: no order of launches can lock up.
//
// The blocks of a cluster take neighbouring row tiles of the same tokens: each loads a part of the
// rows for all. Its first block claims, and tells the others.
//
// Files: tile.cuh (sizes, shared memory), claim.cuh (who does what), load.cuh, multiply.cuh,
// store.cuh (the roles), and here the kernel.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "cuda/gemm/load.cuh"
#include "cuda/gemm/multiply.cuh"
#include "cuda/gemm/store.cuh"

namespace fusedmoe::cuda {

/// The multiplying warpgroups: item by item.
template <typename Weights, TileConfig kTile>
__device__ __forceinline__ void multiply_tiles(typename GemmTypes<Weights, kTile>::Shared& shared,
                                               const GroupedGemm& p) {
  using Types = GemmTypes<Weights, kTile>;
  using Multiply = Multiplier<Weights, kTile>;
  using Stores = Store<Weights, kTile>;
  const typename Types::Place place{__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0)};
  typename Types::StageState stage;
  constexpr unsigned kSlots = Types::Config::kItemSlots;
  for (unsigned count = 0;; ++count) {  // one register, where ItemState takes two
    const unsigned slot = count % kSlots;
    wait(&shared.item_full[slot], count / kSlots % 2);
    const Item& item = shared.items[slot];  // read where needed: registers are scarce
    if (item.phase < 0) return;
    if constexpr (!Types::Config::kHasEpilogueWarpgroup) {
      Stores::prefetch_scale_and_bias(p.phases[item.phase], item, place);
    }
    typename Types::Sums sums;
    Multiply::multiply_tile(shared, p, item, place, stage, sums);
    if constexpr (Types::Config::kHasEpilogueWarpgroup) {
      Stores::hand_over(shared, item, place, sums, count % 2 ^ 1);
    } else {
      if (p.topk_ids) cudaGridDependencySynchronize();
      Stores::store_tile(shared, p, item, place, sums);
      if (place.thread() == 0) arrive(&shared.item_stored[slot]);
    }
  }
}

/// The epilogue warpgroup of tiles that have one.
template <typename Weights, TileConfig kTile>
__device__ __forceinline__ void run_epilogues(typename GemmTypes<Weights, kTile>::Shared& shared,
                                              const GroupedGemm& p) {
  constexpr unsigned kSlots = GemmTypes<Weights, kTile>::Config::kItemSlots;
  for (unsigned count = 0;; ++count) {
    const unsigned slot = count % kSlots;
    wait(&shared.item_full[slot], count / kSlots % 2);
    const Item& item = shared.items[slot];
    if (item.phase < 0) return;
    Store<Weights, kTile>::run_epilogue(shared, p, item, count % 2);
    if (threadIdx.x % 128 == 0) arrive(&shared.item_stored[slot]);
  }
}

/// By a thread of each of some warps, as each barrier takes a while.
template <typename Weights, TileConfig kTile>
__device__ __forceinline__ void init_barriers(typename GemmTypes<Weights, kTile>::Shared& shared) {
  using Config = typename GemmTypes<Weights, kTile>::Config;
  if (threadIdx.x % 32 != 0) return;
  const auto init = [](auto& barriers, int arrivals) {
    for (std::uint64_t& barrier : barriers) Barrier::init(&barrier, arrivals);
  };
  switch (threadIdx.x / 32) {
    case 1:
      init(shared.stage_full, 2);  // weights and rows
      break;
    case 2:
      init(shared.stage_free, Config::kMultiplyThreads * kTile.cluster);
      break;
    case 3:
      init(shared.item_full, 1);
      break;
    case 4:
      init(shared.item_stored, Config::kStorers);
      break;
    case 5:
      init(shared.item_free, 2);  // rows loaded, sums stored
      break;
    case 6:
      Barrier::init(&shared.parts_full, Config::kMultiplyThreads);
      Barrier::init(&shared.parts_free, 128);
      break;
    case 7:
      if constexpr (kTile.cluster > 1) {
        init(shared.number_full, 1);
        init(shared.number_free, kTile.cluster - 1);
      }
      break;
    default:
      return;
  }
  cutlass::arch::fence_barrier_init();
}

/// kTile by its number: nvcc cannot name kernels with class-type template arguments.
template <typename Weights, int kConfig>
__global__ __launch_bounds__((GemmConfig<Weights, kTileConfigs[kConfig]>::kThreads),
                             1) void grouped_gemm_kernel(const __grid_constant__ GroupedGemm
                                                             problem,
                                                         const __grid_constant__ RowMaps maps) {
  constexpr TileConfig kTile = kTileConfigs[kConfig];
  using Load = Loaders<Weights, kTile>;
  using Config = typename Load::Config;
  extern __shared__ __align__(1024) std::uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Load::Shared*>(memory);
  const int rank = kTile.cluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0;

  const int expert = Load::read_expert(problem);
  init_barriers<Weights, kTile>(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < problem.num_phases; ++i) {
      constexpr int kFirst = Config::kWideCopies ? 0 : RowMaps::first_box(kTile.max_tokens);
      cute::prefetch_tma_descriptor(&maps.boxes[i][kFirst]);
    }
  }
  // What the kernels before the one that makes the routing data wrote is there: that waited for it.
  if (!problem.topk_ids) cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  Load::count_tiles(shared, problem, expert);
  if constexpr (kTile.cluster > 1) cute::cluster_sync();

  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoadRegisters>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0 && cute::elect_one_sync()) {
      Load::load_weights(shared, problem, rank);
    } else if (warp == 1 && cute::elect_one_sync()) {
      Load::load_tokens(shared, problem, maps, rank);
    } else if (warp == 2 && cute::elect_one_sync()) {
      Load::release_tiles(shared, problem);
    }
  } else if (!Config::kHasEpilogueWarpgroup || threadIdx.x < Config::kThreads - 128) {
    cutlass::arch::warpgroup_reg_alloc<Config::kMultiplyRegisters>();
    multiply_tiles<Weights, kTile>(shared, problem);
  } else {
    if constexpr (Config::kHasEpilogueWarpgroup) {
      cutlass::arch::warpgroup_reg_alloc<Config::kEpilogueRegisters>();
      run_epilogues<Weights, kTile>(shared, problem);
    }
  }
  if constexpr (kTile.cluster > 1) {  // others may still arrive at this block's barriers
    __syncwarp();
    cute::cluster_sync();
  }
}

}  // namespace fusedmoe::cuda
