#include "cuda/gemm/format_kernels.h"

#include <algorithm>
#include <array>

#include "core/check.h"
#include "cuda/gemm/operands/formats.h"

namespace fusedmoe::cuda {

const FormatKernels& kernels_of(const WeightFormat& format) {
  static const std::array kAll = {bf16_kernels(),           f16_kernels(),
                                  fp8_rows_kernels(),       fp8_kernels(),
                                  fp8_f16_kernels(),        w4a8_kernels(),
                                  mxfp4_bf16_kernels(),     mxfp4_quantized_kernels(),
                                  mxfp4_f16_kernels(),      mxfp4_fp8_kernels(),
                                  nvfp4_bf16_kernels(),     nvfp4_f16_kernels(),
                                  int4_symmetric_kernels(), int4_g32_symmetric_kernels(),
                                  int4_bf16_kernels(),      int4_f16_kernels(),
                                  int4_g32_bf16_kernels(),  int4_g32_f16_kernels(),
                                  int8_bf16_kernels(),      int8_f16_kernels(),
                                  decoded_e4m3_kernels(),   scaled_e4m3_kernels()};
  const auto found = std::find_if(kAll.begin(), kAll.end(), [&](const FormatKernels& kernels) {
    return kernels.format.name == format.name;
  });
  if (found == kAll.end()) throw Error::internal(core::format("no kernels of {}", format.name));
  return *found;
}

void fused_mlp(const FusedMlpParams& params, const FormatKernels& kernels, const TileShape& tile,
               const Stream& stream) {
  const WeightFormat& format = kernels.format;
  const auto check = [&](bool holds, const char* what) {
    if (!holds) throw Error::internal(core::format("the tile {} {}", to_string(tile), what));
  };
  const auto found = std::find(format.tiles.begin(), format.tiles.end(), tile);
  check(found != format.tiles.end(), "is not compiled");
  check(!params.batch_invariant || format.keeps_order(tile),
        "does not add up rows in the order that batch invariance needs");
  const bool stores_groups = params.gemms[0].out_scales != nullptr;
  check(!stores_groups || tile.has_whole_groups(), "has no whole groups to quantize");
  check(params.pass.tiles == 0 || format.has_row_pass(tile), "has no row pass");
  // Tiles with tokens as rows have neither.
  check(params.num_gemms == 1 || !format.fp8_rows || stores_groups || params.pass.tiles > 0,
        "does not quantize the rows between the GEMMs");
  kernels.launches[static_cast<std::size_t>(found - format.tiles.begin())](params, stream);
}

}  // namespace fusedmoe::cuda
