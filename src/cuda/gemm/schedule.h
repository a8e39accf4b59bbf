// Which work item is which tile. The same code runs in the kernel and, in tests, on the host.
//
// Items count through GEMM 1 and then GEMM 2; within one by expert, then by groups of
// kTokenTileGroup token tiles, then by row tile, and token tiles innermost: blocks that run at the
// same time share weights and rows in the L2.
#pragma once

#include <cstdint>

#include "cuda/gemm/records.h"

namespace fusedmoe::cuda {

inline constexpr int kTokenTileGroup = 16;

FUSEDMOE_HD constexpr int num_token_tiles(int rows, int max_tokens) {
  return (rows + max_tokens - 1) / max_tokens;
}

/// Rows of each tile but the last: an even cut, in steps of 8.
FUSEDMOE_HD constexpr int token_tile_size(int rows, int tiles) {
  return ((rows + tiles - 1) / tiles + 7) / 8 * 8;
}

/// Row tiles and splits of the two GEMMs.
struct PhaseShape {
  int row_tiles = 0;
  int splits = 1;
  FUSEDMOE_HD constexpr int items_per_token_tile() const { return row_tiles * splits; }
};

/// A tile: everything but what depends on the expert's rows.
struct TileIndex {
  int phase = -1;  // -1: no work left
  int expert = 0;
  int token_tile = 0;
  int row_tile = 0;
  int split = 0;
};

/// tile_prefix[e]: token tiles of the experts before e; (num_experts + 1).
FUSEDMOE_HD inline TileIndex find_tile(int item, const PhaseShape* shapes, int num_phases,
                                       const std::int32_t* tile_prefix, int num_experts) {
  const int total_tiles = tile_prefix[num_experts];
  TileIndex index;
  const int first_items = total_tiles * shapes[0].items_per_token_tile();
  const bool is_second = item >= first_items;
  // Not shapes[phase]: an array that is indexed would live in memory.
  const PhaseShape shape = is_second ? shapes[1] : shapes[0];
  if (is_second) item -= first_items;
  const int per_tile = shape.items_per_token_tile();
  if (is_second && (num_phases == 1 || item >= total_tiles * per_tile)) return index;

  const int tile = item / per_tile;
  int low = 0, high = num_experts;  // prefix[low] <= tile < prefix[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tile_prefix[middle] <= tile ? low : high) = middle;
  }
  const int local = item - tile_prefix[low] * per_tile;
  const int tiles = tile_prefix[low + 1] - tile_prefix[low];
  index.phase = is_second ? 1 : 0;
  index.expert = low;
  int row_and_split = local;
  if (tiles > 1) {  // else without the divisions
    const int group = local / (kTokenTileGroup * per_tile);
    const int in_group = local - group * kTokenTileGroup * per_tile;
    const int left = tiles - group * kTokenTileGroup;
    const int group_tiles = left < kTokenTileGroup ? left : kTokenTileGroup;
    row_and_split = in_group / group_tiles;
    index.token_tile = group * kTokenTileGroup + in_group - row_and_split * group_tiles;
  }
  index.split = row_and_split / shape.row_tiles;
  index.row_tile = row_and_split - index.split * shape.row_tiles;
  return index;
}

/// K blocks [begin, end) of one split.
FUSEDMOE_HD constexpr int split_begin(int k_blocks, int splits, int split) {
  return k_blocks * split / splits;
}

}  // namespace fusedmoe::cuda
