// The rows of the table of weight formats, each made beside its policy.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "cuda/gemm/weight_format.h"

namespace fusedmoe::cuda {

WeightFormat bf16_format();
WeightFormat f16_format();
WeightFormat fp8_format();
WeightFormat fp8_rows_format();
WeightFormat fp8_f16_format();
WeightFormat w4a8_format();
WeightFormat mxfp4_bf16_format();
WeightFormat mxfp4_quantized_format();
WeightFormat mxfp4_f16_format();
WeightFormat mxfp4_fp8_format();
WeightFormat nvfp4_bf16_format();
WeightFormat nvfp4_f16_format();
WeightFormat int4_symmetric_format();
WeightFormat int4_g32_symmetric_format();
WeightFormat int4_bf16_format();
WeightFormat int4_f16_format();
WeightFormat int4_g32_bf16_format();
WeightFormat int4_g32_f16_format();
WeightFormat int8_bf16_format();
WeightFormat int8_f16_format();
WeightFormat decoded_e4m3_format();
WeightFormat scaled_e4m3_format();

/// Defined by the generated file of the policy (cmake/FusedmoeKernels.cmake).
template <typename Operands, int kIndex>
void launch_kernel(const FusedMlpParams& params, const Stream& stream);

template <typename Operands>
void launch_one_token(const OneTokenParams& params, const OneTokenShape& shape,
                      const Stream& stream);

template <typename Operands>
inline constexpr auto kLaunches = []<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
  return std::array<WeightFormat::Launch, sizeof...(kIndex)>{
      &launch_kernel<Operands, static_cast<int>(kIndex)>...};
}
(std::make_index_sequence<Operands::kTiles.size()>());

/// What a row takes from its policy.
template <typename Operands>
WeightFormat format_of() {
  constexpr std::span<const TileShape> kTiles = Operands::kTiles;
  static_assert(kTiles.size() <= kMaxTiles);
  static_assert(kTiles[0].k_groups > 1 && kTiles[1].has_epilogue_warpgroup() &&
                !kTiles[2].has_epilogue_warpgroup());
  static_assert(std::is_sorted(kTiles.begin(), kTiles.end(), [](const auto& a, const auto& b) {
    return a.max_tokens < b.max_tokens;
  }));
  WeightFormat format;
  format.row_dtype = Operands::kRowDType;
  format.block = Operands::kBlock;
  format.decodes = Operands::kDecodes;
  format.k_scales = Operands::kHasKScales;
  format.mma_sync_tokens = Operands::kMmaSyncTokens;
  format.weights_rows = Operands::Output::kWeightsRows;
  format.quantizes_rows = Operands::Output::kQuantizes;
  format.tiles = kTiles;
  format.launches = kLaunches<Operands>;
  format.one_token = &launch_one_token<Operands>;
  return format;
}

}  // namespace fusedmoe::cuda
