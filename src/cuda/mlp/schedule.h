// The order of work tiles. The same code runs in the kernel and, in tests, on the host.
//
// Tile indexes count through GEMM 1, the row pass (which quantizes what GEMM 1 stores) if there is
// one, and GEMM 2; within one by expert, then by groups of kTokenTileGroup token tiles, then by row
// tile, and token tiles innermost: thread blocks that run at the same time share weights and token
// rows in the L2.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fusedmoe::cuda {

inline constexpr int kTokenTileGroup = 16;

FUSEDMOE_HD constexpr int num_token_tiles(int rows, int max_tokens) {
  return (rows + max_tokens - 1) / max_tokens;
}

/// Rows of each tile but the last: an even cut, in steps of TileShape::token_step().
FUSEDMOE_HD constexpr int token_tile_size(int rows, int tiles, int step) {
  return ((rows + tiles - 1) / tiles + step - 1) / step * step;
}

/// Row tiles and splits of the two GEMMs.
struct GemmTiles {
  int row_tiles = 0;
  int splits = 1;
  FUSEDMOE_HD constexpr int per_token_tile() const { return row_tiles * splits; }
};

/// Instead of a GEMM's number: a tile of the row pass.
inline constexpr int kRowPass = 2;

/// The tiles of a launch.
struct TileOrder {
  GemmTiles gemms[2];  // the second is empty where there is one GEMM
  int pass_tiles = 0;  // of the row pass for each token tile; 0: there is none
};

/// Which tile an index stands for: everything but what depends on the expert's rows.
struct TileCoords {
  int gemm = -1;  // 0 or 1; kRowPass; -1: no work left
  int expert = 0;
  int token_tile = 0;
  int row_tile = 0;
  int split = 0;
};

/// tile_prefix[e]: token tiles of the experts before e; (num_experts + 1).
FUSEDMOE_HD inline TileCoords find_tile(int index, const TileOrder& order,
                                        const std::int32_t* tile_prefix, int num_experts) {
  const int total_tiles = tile_prefix[num_experts];
  TileCoords tile;
  int gemm = 0;
  GemmTiles shape = order.gemms[0];  // no array of all, as one that is indexed lives in memory
  const auto is_behind = [&] { return index >= total_tiles * shape.per_token_tile(); };
  const auto go_on = [&](int to, const GemmTiles& with) {
    index -= total_tiles * shape.per_token_tile();
    gemm = to;
    shape = with;
  };
  if (is_behind()) go_on(kRowPass, {order.pass_tiles, 1});
  if (gemm == kRowPass && is_behind()) go_on(1, order.gemms[1]);
  if (gemm == 1 && is_behind()) return tile;

  const int per_tile = shape.per_token_tile();
  const int token_tile = index / per_tile;
  int low = 0, high = num_experts;  // prefix[low] <= token_tile < prefix[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tile_prefix[middle] <= token_tile ? low : high) = middle;
  }
  const int local = index - tile_prefix[low] * per_tile;
  const int tiles = tile_prefix[low + 1] - tile_prefix[low];
  tile.gemm = gemm;
  tile.expert = low;
  int row_and_split = local;
  if (tiles > 1) {  // else without the divisions
    const int group = local / (kTokenTileGroup * per_tile);
    const int in_group = local - group * kTokenTileGroup * per_tile;
    const int left = tiles - group * kTokenTileGroup;
    const int group_tiles = left < kTokenTileGroup ? left : kTokenTileGroup;
    row_and_split = in_group / group_tiles;
    tile.token_tile = group * kTokenTileGroup + in_group - row_and_split * group_tiles;
  }
  tile.split = row_and_split / shape.row_tiles;
  tile.row_tile = row_and_split - tile.split * shape.row_tiles;
  return tile;
}

/// K blocks [begin, end) of one split.
FUSEDMOE_HD constexpr int split_begin(int k_blocks, int splits, int split) {
  return k_blocks * split / splits;
}

}  // namespace fusedmoe::cuda
