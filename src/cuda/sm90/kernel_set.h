// Which kernels Hopper has of each weight format: a row of the table is a policy's tile shapes.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "cuda/formats/weight_formats.h"
#include "cuda/mlp/kernel_config.h"
#include "cuda/sm90/tiles.h"

namespace fusedmoe::cuda::sm90 {

struct KernelSet {
  const WeightFormat* format = nullptr;
  /// In order of their tokens. The first has K groups, the second an epilogue warpgroup; all after
  /// it have neither.
  std::span<const TileShape> tiles;
  /// K blocks of a stage for each K group, in tiles of up to 64 tokens: what a stage costs beside
  /// them is shared.
  int blocks_per_group = 1;
  /// Tokens of a tile up to which mma.sync multiplies decoded weights faster than wgmma; 0: never.
  int mma_sync_tokens = 0;
  /// Columns of one row block with accumulators of their own, which are added to the others in fp32
  /// (promoted) after one or more K blocks; 0: no promotion.
  int promoted_columns = 0;

  /// Whether tiles of this shape add up a row in the order of all other such shapes. K groups do
  /// not, nor does mma.sync, which rounds otherwise than wgmma: where tiles with an epilogue
  /// warpgroup have no other instruction.
  constexpr bool keeps_order(const TileShape& tile) const {
    return tile.k_groups == 1 && !(mma_sync_tokens > 0 && tile.has_epilogue_warpgroup());
  }
  /// Whether tiles of this shape can quantize rows between the GEMMs: FusedMlpParams::pass.
  constexpr bool has_row_pass(const TileShape& tile) const {
    return format && format->fp8_rows && !format->k_scales && tile.row_blocks == 1 &&
           tile.max_tokens <= 64;
  }
};

/// Of weights that are decoded to 16 bits.
constexpr KernelSet decoded_set(const WeightFormat& format, int code_bits,
                                std::span<const TileShape> tiles = kTilesDecoded) {
  return {&format, tiles, code_bits == 4 ? 2 : 1, 24, 0};
}

inline constexpr std::array kKernelSets = {
    KernelSet{&formats::kBf16, kTiles16Bit},
    KernelSet{&formats::kF16, kTiles16Bit},
    KernelSet{&formats::kFp8, kTilesFp8, 1, 0, 96},
    KernelSet{&formats::kFp8Rows, kTilesFp8Rows, 1, 0, 96},
    KernelSet{&formats::kFp8F16, kTilesFp8F16, 1, 0, 96},
    KernelSet{&formats::kW4a8, kTilesDecodedFp8, 1, 0, 192},
    KernelSet{&formats::kMxfp4Fp8, kTilesDecodedFp8, 1, 0, 192},
    decoded_set(formats::kMxfp4Bf16, 4, kTiles16Bit),
    decoded_set(formats::kMxfp4Quantized, 4),
    decoded_set(formats::kMxfp4F16, 4),
    decoded_set(formats::kNvfp4Bf16, 4),
    decoded_set(formats::kNvfp4F16, 4),
    decoded_set(formats::kInt4Symmetric, 4),
    decoded_set(formats::kInt4G32Symmetric, 4),
    decoded_set(formats::kInt4Bf16, 4),
    decoded_set(formats::kInt4F16, 4),
    decoded_set(formats::kInt4G32Bf16, 4),
    decoded_set(formats::kInt4G32F16, 4),
    decoded_set(formats::kInt8Bf16, 8),
    decoded_set(formats::kInt8F16, 8),
    decoded_set(formats::kDecodedE4m3, 8),
    decoded_set(formats::kScaledE4m3, 8),
};

static_assert(std::all_of(kKernelSets.begin(), kKernelSets.end(), [](const KernelSet& set) {
  const auto& tiles = set.tiles;
  return tiles.size() <= kMaxTiles && tiles[0].k_groups > 1 && tiles[1].has_epilogue_warpgroup() &&
         !tiles[2].has_epilogue_warpgroup() &&
         std::is_sorted(tiles.begin(), tiles.end(), [](const TileShape& a, const TileShape& b) {
           return a.max_tokens < b.max_tokens;
         });
}));

/// Without tiles where there are no kernels of the format.
constexpr KernelSet kernel_set(const WeightFormat& format) {
  return row_of_format(kKernelSets, format);
}

}  // namespace fusedmoe::cuda::sm90
