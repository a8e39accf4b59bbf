#include "cuda/gemm/weight_format.h"

#include <algorithm>
#include <array>

#include "core/check.h"
#include "cuda/gemm/operands/formats.h"

namespace fusedmoe::cuda {

std::string to_string(const TileShape& tile) {
  const std::string row_blocks = tile.tokens_are_rows() ? core::format("t{}", tile.teams)
                                 : tile.row_blocks > 1  ? core::format("r{}", tile.row_blocks)
                                                        : std::string();
  return core::format("{}x{}k{}c{}{}", tile.tile_row_blocks() * kBlockRows, tile.max_tokens,
                      tile.k_groups, tile.cluster, row_blocks);
}

std::span<const WeightFormat> weight_formats() {
  static const std::array formats = {bf16_format(),
                                     f16_format(),
                                     fp8_rows_format(),  // before the one that holds both
                                     fp8_format(),
                                     w4a8_format(),
                                     mxfp4_bf16_format(),
                                     mxfp4_quantized_format(),
                                     mxfp4_f16_format(),
                                     nvfp4_bf16_format(),
                                     nvfp4_f16_format(),
                                     int4_symmetric_format(),
                                     int4_g32_symmetric_format(),  // before those that hold both
                                     int4_bf16_format(),
                                     int4_f16_format(),
                                     int4_g32_bf16_format(),
                                     int4_g32_f16_format(),
                                     int8_bf16_format(),
                                     int8_f16_format(),
                                     decoded_e4m3_format(),
                                     scaled_e4m3_format(),
                                     fp8_f16_format(),
                                     mxfp4_fp8_format()};
  return formats;
}

namespace {

/// Whether rows quantized with the key are exact in bf16, up to a factor of the expert.
bool fits_bf16(const QuantKey& key) {
  return key.dynamic &&
         (key.value == DType::kE2M1 || (key.value == DType::kE4M3 && key.scale == DType::kE8M0 &&
                                        key.group == GroupShape{1, 32}));
}

/// Whether they are E4M3 with one scale for the tensor, a row, or a row of a K block that may have
/// scales.
bool is_fp8(const QuantKey& key, const WeightFormat& format) {
  return key.value == DType::kE4M3 &&
         (key.group.cols < 0 || (format.k_scales && key.group.cols == format.block.k));
}

/// Whether the kernel multiplies such activations by such weights.
bool multiplies(const WeightFormat& format, const std::optional<QuantKey>& key) {
  if (format.fp8_rows) return key && is_fp8(*key, format);
  return !key || (format.quantizes_rows && fits_bf16(*key));
}

}  // namespace

const WeightFormat* find_weight_format(const QuantScheme& scheme, DType row_dtype) {
  if (scheme.down) return nullptr;  // both GEMMs of a launch have one format
  const auto formats = weight_formats();
  const auto found = std::find_if(formats.begin(), formats.end(), [&](const WeightFormat& format) {
    return format.row_dtype == row_dtype && format.holds(scheme.weights) &&
           multiplies(format, scheme.activations);
  });
  return found == formats.end() ? nullptr : &*found;
}

void fused_mlp(const FusedMlpParams& params, const WeightFormat& format, const TileShape& tile,
               const Stream& stream) {
  const auto found = std::find(format.tiles.begin(), format.tiles.end(), tile);
  FUSEDMOE_CHECK(found != format.tiles.end(), "tile", to_string(tile), "one that is compiled");
  FUSEDMOE_CHECK(!params.batch_invariant || format.keeps_order(tile), "tile", to_string(tile),
                 "one that adds up rows in one order: batch invariance");
  const bool stores_groups = params.gemms[0].out_scales != nullptr;
  FUSEDMOE_CHECK(!stores_groups || tile.has_whole_groups(), "tile", to_string(tile),
                 "one that has whole groups, to quantize them");
  FUSEDMOE_CHECK(params.pass.tiles == 0 || format.has_row_pass(tile), "tile", to_string(tile),
                 "one that has a row pass");
  // Tiles with tokens as rows have neither.
  FUSEDMOE_CHECK(
      params.num_gemms == 1 || !format.fp8_rows || stores_groups || params.pass.tiles > 0, "tile",
      to_string(tile), "one that quantizes the rows between two GEMMs");
  format.launches[static_cast<std::size_t>(found - format.tiles.begin())](params, stream);
}

}  // namespace fusedmoe::cuda
