// Shapes of a thread block's tile: each is one compiled kernel.
#pragma once

#include <algorithm>
#include <string>

namespace fusedmoe::cuda {

/// Features that share an FP8 scale, and the row blocks of a gated w13 that have them.
inline constexpr int kGroupFeatures = 128, kBlocksOfGroup = 4;

/// row_groups * k_groups warpgroups multiply. Each row group has row_blocks blocks of 64 weight
/// rows; its K groups take the K blocks in turns, and the epilogue adds their accumulators in
/// order.
///
/// With tokens as rows the operands change places: tokens are wgmma's 64 rows and weight rows its
/// columns.
struct TileShape {
  int max_tokens = 0;  ///< token rows of one expert in a tile, at most
  int row_groups = 0;
  int k_groups = 0;
  int row_blocks = 0;
  int cluster = 1;  ///< thread blocks side by side that share the same token rows
  bool tokens_are_rows = false;
  int stages = 0;  ///< of its ring of operands; 0: as many as shared memory holds, and roles
  int depth = 1;   ///< with stages: K blocks of a stage for each K group

  constexpr int warpgroups() const { return row_groups * k_groups; }
  /// Tiles of an expert are cut in steps of so many tokens; sm80 also multiplies in these steps:
  /// 70 tokens cost what 96 do.
  constexpr int token_step() const {
    if (stages > 0) return std::min(max_tokens, 32);
    return tokens_are_rows ? 64 : 8;
  }
  /// Whether a warpgroup of its own runs the epilogue while the others multiply the next tile.
  constexpr bool has_epilogue_warpgroup() const {
    return stages == 0 && row_blocks == 1 && max_tokens <= 32;
  }
  /// Whether a gated tile of GEMM 1 has the 128 features of a group that shares an FP8 scale.
  constexpr bool has_whole_groups() const {
    return stages == 0 && tile_row_blocks() == kBlocksOfGroup;
  }
  /// Whether a gated tile of GEMM 1 has fewer features than such a group, and its epilogue runs
  /// beside the next tile.
  constexpr bool has_parts_of_groups() const {
    return has_epilogue_warpgroup() && tile_row_blocks() < kBlocksOfGroup;
  }
  constexpr int tile_row_blocks() const { return row_groups * row_blocks; }
  constexpr bool operator==(const TileShape&) const = default;
};

/// "128x288k1c2", "256x144k1c2r2", "256x128k1c2t": weight rows x tokens of a block, K groups,
/// blocks of a cluster, row blocks of a row group if there are several, t: tokens are rows.
/// "128x64k1s4r2", "128x16k1s4d2r2": stages instead of a cluster, and their depth.
std::string to_string(const TileShape& tile);

}  // namespace fusedmoe::cuda
