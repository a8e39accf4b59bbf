// The end of a tile: its accumulators become rows, by the warpgroups that have multiplied it or by
// the epilogue warpgroup.
#pragma once

#include "cuda/mlp/epilogue_groups.cuh"
#include "cuda/sm90/join_group.cuh"
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/store_side_by_side.cuh"

namespace fusedmoe::cuda::sm90 {

/// The warpgroup's own accumulators, before it goes on to the next tile.
template <typename K>
__device__ inline void store_tile(SharedMemory<K>& shared, const FusedMlpParams& p,
                                  const WorkTile& tile, const WarpgroupCoords<K>& coords,
                                  typename K::Accumulators& accumulators) {
  if constexpr (kStoresSideBySide<K>) {
    store_side_by_side(shared, p, tile, coords, accumulators);
  } else {
    const ScaleAndBias<K> factors = read_scale_and_bias(p.gemms[tile.gemm], tile, coords);
    store_results(shared, p, tile, coords, factors, [&](int chunk, Chunk<K>& values) {
      read_accumulators<K>(accumulators, chunk, values);
    });
  }
  // Nobody needs to wait here, but without it ptxas serializes the wgmma of some kernels.
  sync_warpgroup(coords);
}

/// A multiplying warpgroup's accumulators, for the epilogue warpgroup. `phase`: of the tile before.
template <typename K>
__device__ inline void publish_accumulators(SharedMemory<K>& shared, const WorkTile& tile,
                                            const WarpgroupCoords<K>& coords,
                                            const typename K::Accumulators& accumulators,
                                            std::uint32_t phase) {
  const int num_tokens = tile.num_tokens;
  wait(&shared.partials_free, phase);
#pragma unroll
  for (int i = 0; i < K::kPartialAccumulators; ++i) {
    if (i / 4 * 8 >= num_tokens) break;
    shared.partials[coords.warpgroup][i][coords.thread()] = accumulators[0][i];
  }
  arrive(&shared.partials_full);
}

/// The epilogue warpgroup's work on one tile.
template <typename K>
__device__ inline void store_published_tile(SharedMemory<K>& shared, const FusedMlpParams& p,
                                            const WorkTile& tile, std::uint32_t phase) {
  const WarpgroupCoords<K> coords{0};
  const ScaleAndBias<K> factors = read_scale_and_bias(p.gemms[tile.gemm], tile, coords);
  wait_for_previous(p);
  if (const std::int32_t* rows = p.gemms[tile.gemm].out_rows) {  // brings them to the L1
    int row;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(row) : "l"(rows + tile.first_row));
  }
  wait(&shared.partials_full, phase);
  store_results(shared, p, tile, coords, factors,
                [&](int chunk, Chunk<K>& values) { read_partials(shared, chunk, values); });
  arrive(&shared.partials_free);
  if constexpr (K::kJoinsGroups) {
    if (tile.gemm == 0 && p.pass.group_counters > 0) join_group<K>(p, tile);
  }
}

/// For a tile of the row pass, which has no accumulators: both sides meet as for others, so that
/// the epilogue warpgroup lets go of the tile only when all have looked at it.
template <typename K>
__device__ inline void publish_nothing(SharedMemory<K>& shared, std::uint32_t phase) {
  wait(&shared.partials_free, phase);
  arrive(&shared.partials_full);
}
template <typename K>
__device__ inline void accept_nothing(SharedMemory<K>& shared, std::uint32_t phase) {
  wait(&shared.partials_full, phase);
  arrive(&shared.partials_free);
}

}  // namespace fusedmoe::cuda::sm90
