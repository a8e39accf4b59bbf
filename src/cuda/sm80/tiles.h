// The tile shapes that are compiled of mma.sync. Each takes at most 80 KiB of shared memory, so
// that one thread block fits a multiprocessor with 100 KiB and two fit one with 164: no tile
// depends on the GPU.
#pragma once

#include "cuda/formats/packed_block.h"
#include "cuda/mlp/tile_shape.h"

namespace fusedmoe::cuda::sm80 {

// A warp has 16 rows of each of two row blocks, so that it reads token rows once for both.

/// Of weights with 16 bits, from few tokens to many.
inline constexpr TileShape kTiles16Bit[] = {
    {16, 1, 2, 1, 1, false, 3}, {16, 1, 1, 2, 1, false, 4},  {32, 1, 1, 2, 1, false, 3},
    {64, 1, 1, 2, 1, false, 3}, {128, 1, 1, 2, 1, false, 2},
};

/// Of 8-bit weights, which are decoded.
inline constexpr TileShape kTiles8Bit[] = {
    {16, 1, 2, 1, 1, false, 4},
    {16, 1, 1, 2, 1, false, 5},
    {32, 1, 1, 2, 1, false, 5},
    {64, 1, 1, 2, 1, false, 4},
};

/// Of 4-bit weights, which are decoded. Decoders leave no registers for more tokens.
inline constexpr TileShape kTiles4Bit[] = {
    {16, 1, 4, 1, 1, false, 3},
    {16, 1, 1, 2, 1, false, 4, 2},
    {32, 1, 1, 2, 1, false, 4, 2},
    {64, 1, 1, 2, 1, false, 4},
};

/// Of shared memory: token rows, then packed blocks of so many bytes, both of neighbouring K blocks
/// for each K group.
constexpr int stage_bytes(const TileShape& tile, int block_bytes) {
  const int of_k_block = tile.max_tokens * kSwizzleBytes + tile.tile_row_blocks() * block_bytes;
  return static_cast<int>(ceil_div(tile.k_groups * tile.depth * of_k_block, kSwizzleBytes) *
                          kSwizzleBytes);
}

/// Thread blocks of a multiprocessor, by the registers that a thread needs.
constexpr int most_blocks(const TileShape& tile, bool decodes) {
  const int accumulators = tile.row_blocks * tile.max_tokens / 2;
  const int threads = accumulators >= 128 ? 256 : accumulators < 64 ? 512 : decodes ? 256 : 384;
  const int of_block = 128 * tile.warpgroups();
  return threads > of_block ? threads / of_block : 1;
}

}  // namespace fusedmoe::cuda::sm80
