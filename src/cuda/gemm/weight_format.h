// The formats of weights that the fused MLP kernel runs: one table, a row for each policy of
// operands/. What is known here needs neither a device nor CUDA's headers; format_kernels.h has
// what runs.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "cuda/gemm/fused_mlp.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

struct WeightFormat {
  std::string_view name;
  /// Whether weights of this key are packed so.
  bool (*holds)(const QuantKey& weights) = nullptr;
  DType row_dtype = DType::kBF16;  ///< of hidden states and results
  PackedBlock block;
  /// Scales in packed blocks: columns that have the same one, at least; 0: none are there. All
  /// other scales multiply results.
  int group_k = 0;
  DType block_scales = DType::kU8;  ///< their type, as unpacked
  /// They are relative to the largest of their row, by which results are multiplied.
  bool relative_scales = false;
  int fixed_exponent = 0;  ///< results are multiplied by 2 to the power of it

  /// Weights are decoded in registers, which takes the same time for any number of tokens.
  bool decodes = false;
  /// Tokens of a tile up to which mma.sync multiplies decoded weights faster than wgmma; 0: never.
  int mma_sync_tokens = 0;
  /// GEMM 2 can apply router weights, see FusedMlpParams::topk_weights.
  bool weights_rows = false;
  /// Activations are E4M3, with scales in fp32.
  bool fp8_rows = false;
  /// The kernel multiplies the sums of each K block by scales.
  bool k_scales = false;
  /// GEMM 1 can quantize and decode what it stores, see FusedMlpParams::quantizer.
  bool quantizes_rows = false;

  /// From few tokens to many: first one with K groups, then one with an epilogue warpgroup, then
  /// those without.
  std::span<const TileShape> tiles;

  BlockGrid grid(std::int64_t width, std::int64_t k, bool gated) const {
    return block_grid(width, k, gated, block.k);
  }
  /// Whether tiles of this shape add up a row in the order of all other such shapes. K groups do
  /// not, nor does mma.sync, which rounds otherwise than wgmma: where tiles with an epilogue
  /// warpgroup have no other instruction.
  bool keeps_order(const TileShape& tile) const {
    return tile.k_groups == 1 && !(mma_sync_tokens > 0 && tile.has_epilogue_warpgroup());
  }
  /// Whether tiles of this shape can quantize rows between the GEMMs: FusedMlpParams::pass.
  bool has_row_pass(const TileShape& tile) const {
    return fp8_rows && !k_scales && tile.has_epilogue_warpgroup();
  }
};

/// Most tiles of a format.
inline constexpr int kMaxTiles = 8;

std::span<const WeightFormat> weight_formats();
/// The one that runs the scheme on rows of this dtype; null where there is none.
const WeightFormat* find_weight_format(const QuantScheme& scheme, DType row_dtype);

}  // namespace fusedmoe::cuda
