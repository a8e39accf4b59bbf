// What kernels of the fused MLP of every architecture share: their work tiles, the coordinates of a
// warpgroup, and when they may begin. The templates of this folder are over a kernel K, a type with
// all compile-time sizes (sm90/kernel.cuh, sm80/kernel.cuh).
#pragma once

#include <cuda_runtime.h>

#include "cuda/device/overlap.cuh"
#include "cuda/mlp/fused_mlp.h"
#include "cuda/mlp/schedule.h"

namespace fusedmoe::cuda {

/// Shared memory of a kernel, which each architecture defines for its own. What is used here:
/// `rows`, `group_amax`, `partials`, `tile_prefix`.
template <typename K>
struct SharedMemory;

/// Slices of 8 rows of a packed block, each with one scale.
inline constexpr int kSlices = kBlockRows / 8;

/// One work tile, as every role needs it.
struct WorkTile {
  int gemm;  // as TileCoords
  int expert;
  int row_block;  // first of the tile
  int k_begin, k_end;
  int first_row;   // of the token rows of all experts
  int num_tokens;  // token rows of the tile; of the row pass: there may be none
  int split;
  int token_tile;  // of all experts: where is counted what of its rows is stored
};

/// Whether it belongs to the row pass: constant false in kernels without one.
template <typename K>
__device__ __forceinline__ bool is_row_pass(const WorkTile& tile) {
  return K::kHasRowPass && tile.gemm == kRowPass;
}

/// Whether this launch waits for the previous one before it does anything.
__device__ inline bool starts_behind(const FusedMlpParams& p) {
  return p.order <= LaunchOrder::kBehind;
}
/// Whether it waits only before it reads what the previous one wrote, or writes anything.
__device__ inline bool starts_early(const FusedMlpParams& p) {
  return p.order >= LaunchOrder::kBesideRows;
}
/// When a launch that starts early reads what the previous one wrote, or writes anything.
__device__ inline void wait_for_previous(const FusedMlpParams& p) {
  if (starts_early(p)) wait_for_previous_launch();
}

/// Which multiplying warpgroup a thread is in. The epilogue warpgroup takes the place of the first.
template <typename K>
struct WarpgroupCoords {
  int warpgroup;
  __device__ static int thread() { return threadIdx.x % 128; }
  __device__ int row_group() const { return warpgroup / K::kKGroups; }
  __device__ int k_group() const { return warpgroup % K::kKGroups; }
};

}  // namespace fusedmoe::cuda
