// A thread's place in its warpgroup, as epilogues of wide tiles ask for it.
#pragma once

#include "cuda/sm90/kernel.cuh"

namespace fusedmoe::cuda::sm90 {

/// Read anew wherever it is needed: what depends on it would otherwise be computed before the first
/// tile and occupy registers in all main loops.
template <typename K>
struct TileThread {
  unsigned index;  // without a sign, so that dividing it takes one instruction
  int row_group;
  __device__ __forceinline__ TileThread() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    row_group = static_cast<int>(index / 128) - 1;
    index %= 128;
  }
  /// The first row block of its row group in a tile.
  __device__ int first_row_block(const WorkTile& tile) const {
    return tile.row_block + row_group * K::kRowBlocks;
  }
  __device__ int lane() const { return static_cast<int>(index % 32); }
  /// The first of its warp's 16 tokens, in a block of 64.
  __device__ int warp_token() const { return static_cast<int>(index / 32 * 16); }
  /// The first of its own two tokens.
  __device__ int token() const { return warp_token() + static_cast<int>(index % 32 / 4); }
};

}  // namespace fusedmoe::cuda::sm90
