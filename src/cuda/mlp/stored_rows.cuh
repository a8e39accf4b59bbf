// What thread blocks tell each other of stored rows: counters that say how much of a token tile
// GEMM 1, or the row pass, has stored, and how many rows of GEMM 1 the launch before has brought.
#pragma once

#include "cuda/device/bulk_rows.cuh"
#include "cuda/mlp/work_tile.cuh"

namespace fusedmoe::cuda {

/// By how much a stored tile moves the counter of its token tile: by its row blocks of GEMM 1 where
/// GEMM 2 follows, by 1 for a tile of the row pass.
template <typename K>
__device__ inline int count_of(const FusedMlpParams& p, const WorkTile& tile) {
  if (is_row_pass<K>(tile)) return 1;
  if (tile.gemm != 0 || p.num_gemms == 1) return 0;
  return max(0, min(K::kTileRowBlocks, p.gemms[0].row_blocks - tile.row_block));
}

/// With a release: what the calling thread knows to be stored, others see after
/// wait_until_stored().
__device__ inline void count_stored(const FusedMlpParams& p, int token_tile, int count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p.counters + 1 + token_tile),
               "r"(count)
               : "memory");
}

/// What a counter counts is stored, and the calling thread sees it.
__device__ inline int read_count(const std::int32_t* counter) {
  int stored = 0;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(stored) : "l"(counter) : "memory");
  return stored;
}
/// The counter of a token tile.
__device__ inline int count_of_stored(const FusedMlpParams& p, const WorkTile& tile) {
  return read_count(p.counters + 1 + tile.token_tile);
}

/// How a thread waits for the rows of GEMM 1, with LaunchOrder::kBesideArrivals.
class ArrivingRows {
 public:
  __device__ explicit ArrivingRows(const FusedMlpParams& p)
      : all_here_(p.order != LaunchOrder::kBesideArrivals) {}

  /// Returns when those of a tile are here: the calling thread, and its tensor copies, see them.
  __device__ void wait(const FusedMlpParams& p, const WorkTile& tile) {
    if (all_here_) return;
    while (!are_here(p, tile)) __nanosleep(20);
    fence_bulk();
  }

 private:
  __device__ bool are_here(const FusedMlpParams& p, const WorkTile& tile) {
    constexpr int kRows = RowArrivals::kRows;
    const RowArrivals& arrivals = p.arrivals;
    all_here_ = read_count(arrivals.counts) == arrivals.warps;
    if (all_here_) return true;
    const int end = tile.first_row + tile.num_tokens;
    for (int part = tile.first_row / kRows; part * kRows < end; ++part) {
      if (read_count(arrivals.counts + 1 + part) < kRows) return false;
    }
    return true;
  }

  bool all_here_;
};

/// The count of its token tile from which on the rows that a tile reads are there: those that GEMM
/// 1 stores for one of the row pass, those that the pass stores for one of GEMM 2.
template <typename K>
__device__ inline int count_needed(const FusedMlpParams& p, const WorkTile& tile) {
  const int count = p.gemms[0].row_blocks;
  return K::kHasRowPass && tile.gemm == 1 ? count + p.pass.tiles : count;
}

/// Returns once the counter of the token tile has come so far. A build with assertions gives up
/// after some seconds: another forward uses the same workspace at the same time. It traps, as a
/// call of assert() would have ptxas serialize all wgmma. `kByWarp`: all lanes of a warp together.
template <bool kByWarp = false>
__device__ inline void wait_until_stored(const FusedMlpParams& p, const WorkTile& tile, int count) {
  for (int tries = 0;; ++tries) {
    int stored = count_of_stored(p, tile);
    if constexpr (kByWarp) stored = __shfl_sync(~0U, stored, 0);
    if (stored >= count) return;
#ifndef NDEBUG
    if (tries == 1 << 24) __trap();
#endif
    __nanosleep(20);
  }
}

/// For a tile of GEMM 2.
template <typename K>
__device__ inline void wait_for_rows(const FusedMlpParams& p, const WorkTile& tile) {
  wait_until_stored(p, tile, count_needed<K>(p, tile));
}

}  // namespace fusedmoe::cuda
