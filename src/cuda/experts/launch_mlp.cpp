#include "cuda/experts/launch_mlp.h"

#include <algorithm>

#include "core/check.h"

namespace fusedmoe::cuda {

void fused_mlp(const FusedMlpParams& params, const KernelFamily& family, const WeightFormat& format,
               const TileShape& tile, const Stream& stream) {
  const auto check = [&](bool holds, const char* what) {
    if (!holds) throw Error::internal(core::format("the tile {} {}", to_string(tile), what));
  };
  const auto tiles = family.tiles(format);
  const auto found = std::find(tiles.begin(), tiles.end(), tile);
  check(found != tiles.end(), "is not compiled");
  check(!params.batch_invariant || family.keeps_order(format, tile),
        "does not add up rows in the order that batch invariance needs");
  const bool stores_groups = params.gemms[0].out_scales != nullptr;
  check(!stores_groups || tile.has_whole_groups(), "has no whole groups to quantize");
  check(params.pass.tiles == 0 || family.has_row_pass(format, tile), "has no row pass");
  const bool joins_groups = params.pass.group_counters > 0;
  check(!joins_groups || tile.has_parts_of_groups(), "has no parts of groups");
  const bool stores_codes = params.gemms[0].out_e4m3;
  check(!stores_codes || (format.stores_codes() && !family.fp8_as_f16()),
        "does not store E4M3 codes");
  check(params.num_gemms == 1 || !format.coded_rows() || stores_groups || stores_codes ||
            joins_groups || params.pass.tiles > 0,
        "does not quantize the rows between the GEMMs");
  const auto all = family.launches();
  const auto of_format = std::find_if(all.begin(), all.end(), [&](const FormatLaunches& launches) {
    return launches.format == format.name;
  });
  check(of_format != all.end(), "is not linked");
  of_format->launches[static_cast<std::size_t>(found - tiles.begin())](params, stream);
}

}  // namespace fusedmoe::cuda
