#include "cuda/mlp/tile_shape.h"

#include "core/format.h"
#include "cuda/formats/packed_block.h"

namespace fusedmoe::cuda {

std::string to_string(const TileShape& tile) {
  const std::string row_blocks = tile.tokens_are_rows  ? "t"
                                 : tile.row_blocks > 1 ? core::format("r{}", tile.row_blocks)
                                                       : std::string();
  const std::string stages = tile.stages == 0  ? core::format("c{}", tile.cluster)
                             : tile.depth == 1 ? core::format("s{}", tile.stages)
                                               : core::format("s{}d{}", tile.stages, tile.depth);
  return core::format("{}x{}k{}{}{}", tile.tile_row_blocks() * kBlockRows, tile.max_tokens,
                      tile.k_groups, stages, row_blocks);
}

}  // namespace fusedmoe::cuda
