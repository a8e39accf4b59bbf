#include "cuda/sm90/fused_mlp.h"

#include <algorithm>

#include "core/check.h"
#include "cuda/sm90/kernel_set.h"

namespace fusedmoe::cuda {

void fused_mlp(const FusedMlpParams& params, const FormatKernels& kernels, const TileShape& tile,
               const Stream& stream) {
  const WeightFormat& format = kernels.format;
  const KernelSet& set = kernel_set(format);
  const auto check = [&](bool holds, const char* what) {
    if (!holds) throw Error::internal(core::format("the tile {} {}", to_string(tile), what));
  };
  const auto found = std::find(set.tiles.begin(), set.tiles.end(), tile);
  check(found != set.tiles.end(), "is not compiled");
  check(!params.batch_invariant || set.keeps_order(tile),
        "does not add up rows in the order that batch invariance needs");
  const bool stores_groups = params.gemms[0].out_scales != nullptr;
  check(!stores_groups || tile.has_whole_groups(), "has no whole groups to quantize");
  check(params.pass.tiles == 0 || set.has_row_pass(tile), "has no row pass");
  // Tiles with tokens as rows have neither.
  check(params.num_gemms == 1 || !format.fp8_rows || stores_groups || params.pass.tiles > 0,
        "does not quantize the rows between the GEMMs");
  kernels.launches[static_cast<std::size_t>(found - set.tiles.begin())](params, stream);
}

}  // namespace fusedmoe::cuda
