#include "cuda/gemm/weight_format.h"

#include <algorithm>
#include <array>

#include "core/check.h"
#include "cuda/gemm/operands/formats.h"

namespace fusedmoe::cuda {

std::string to_string(const TileShape& tile) {
  return core::format("{}x{}k{}c{}", tile.tile_row_blocks() * kBlockRows, tile.max_tokens,
                      tile.k_groups, tile.cluster);
}

std::span<const WeightFormat> weight_formats() {
  static const std::array formats = {bf16_format(), f16_format(), mxfp4_format()};
  return formats;
}

const WeightFormat* find_weight_format(const QuantScheme& scheme) {
  const auto formats = weight_formats();
  const auto found = std::find_if(formats.begin(), formats.end(), [&](const WeightFormat& format) {
    return format.scheme == scheme;
  });
  return found == formats.end() ? nullptr : &*found;
}

void fused_mlp(const FusedMlpParams& params, const WeightFormat& format, const TileShape& tile,
               const Stream& stream) {
  const auto found = std::find(format.tiles.begin(), format.tiles.end(), tile);
  FUSEDMOE_CHECK(found != format.tiles.end(), "tile", to_string(tile), "one that is compiled");
  FUSEDMOE_CHECK(!params.batch_invariant || format.keeps_order(tile), "tile", to_string(tile),
                 "one that adds up rows in one order: batch invariance");
  format.launches[static_cast<std::size_t>(found - format.tiles.begin())](params, stream);
}

}  // namespace fusedmoe::cuda
