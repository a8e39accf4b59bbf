// The formats of weights that the fused MLP kernel runs, as the host sees them: one table, a row
// for each policy of operands/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "cuda/gemm/fused_mlp.h"
#include "cuda/one_token/one_token.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cuda {

/// One matrix of an expert (gate and up of a gated w13 count as one) in device memory, contiguous.
struct PackSource {
  const void* values = nullptr;  ///< as WeightMatrix::values; rows of gate, then of up
  std::int64_t row_bytes = 0;    ///< of `values`
  const void* scales = nullptr;  ///< as WeightMatrix::scales, gate's then up's; or null
  const std::uint8_t* zero_points = nullptr;  ///< shaped like `scales`, or null:
  int zero_point = 0;                         ///< all have this one
  DType scale_dtype = DType::kF32;
  /// The largest magnitude of a row of `scales`, or 1, as WeightFormat::relative_scales says; else
  /// null.
  const float* largest_scales = nullptr;
  std::int64_t group_k = -1;    ///< columns that share a scale; -1: all
  std::int64_t first_col = 0;   ///< of `values`, in its first group
  std::int64_t scale_cols = 0;  ///< of a row of `scales`
  std::int64_t width = 0;       ///< rows of one of the matrices
  std::int64_t k = 0;
  bool gated = false;      ///< 2 width rows
  int exponent_shift = 0;  ///< of WeightFormat::exponent_shift

  /// The source row of a packed row; -1 for padding.
  FUSEDMOE_HD std::int64_t source_row(std::int64_t row) const {
    if (!gated) return row < width ? row : -1;
    const std::int64_t feature = gated_feature(row);
    if (feature >= width) return -1;
    return gated_is_up(row) ? width + feature : feature;
  }
  /// Place in `scales` of the scale of a source row and column.
  FUSEDMOE_HD std::int64_t scale_index(std::int64_t row, std::int64_t column) const {
    return row * scale_cols + (group_k < 0 ? 0 : (first_col + column) / group_k);
  }
};

/// The packed blocks of one matrix in host memory, 4-byte aligned.
struct PackedView {
  const std::byte* blocks = nullptr;
  std::int64_t k_blocks = 0;
  std::int64_t k = 0;
  int exponent_shift = 0;
  std::int64_t group_k = -1;   ///< columns that share a scale; -1: all
  std::int64_t first_col = 0;  ///< in the first group
};

/// A row as WeightMatrix has it. Null: the format's blocks do not hold it.
struct UnpackedRow {
  void* values = nullptr;
  void* scales = nullptr;
  std::uint8_t* zero_points = nullptr;
  float largest_scale = 1;  ///< of the row, with relative scales
};

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
  using Launch = void (*)(const FusedMlpParams&, const Stream&);
  std::span<const Launch> launches;  ///< of the tiles
  /// Enqueues the experts of one token.
  void (*one_token)(const OneTokenParams&, const OneTokenShape&, const Stream&) = nullptr;

  /// The kernel can multiply by scales of a limited range only. Returns the exponent s so that all
  /// scales of the matrices, divided by 2^s, lie in it; results are multiplied by 2^s again. Throws
  /// Error where there is none. `up` is null unless gated. Null: always 0.
  int (*exponent_shift)(const WeightMatrix& gate, const WeightMatrix* up) = nullptr;
  /// Throws Error for scales that a packed block cannot hold. Null: it holds all.
  void (*check_scales)(const WeightMatrix& gate, const WeightMatrix* up) = nullptr;
  /// Writes the packed blocks of a matrix to device memory. Asynchronous.
  void (*pack)(const PackSource& source, const BlockGrid& grid, void* blocks,
               const Stream& stream) = nullptr;
  /// Makes the scales, by packed row, of rows with a NaN code NaN: for operands that decode such a
  /// code to a number. A NaN weight makes the row's results NaN, whatever it is multiplied by.
  /// Null: no code is NaN, or it stays one. Asynchronous.
  void (*mark_nan_rows)(const PackSource& source, const BlockGrid& grid, float* scales,
                        const Stream& stream) = nullptr;
  /// Row `row` of a packed matrix, as WeightMatrix has it.
  void (*unpack_row)(const PackedView& source, std::int64_t row,
                     const UnpackedRow& target) = nullptr;

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

/// Enqueues both GEMMs. Throws Error for a tile shape that is not compiled.
void fused_mlp(const FusedMlpParams& params, const WeightFormat& format, const TileShape& tile,
               const Stream& stream);

}  // namespace fusedmoe::cuda
