// The formats of weights that the fused MLP kernel runs, as the host sees them: one table, a row
// for each policy of operands/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/gemm/fused_mlp.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cuda {

/// One matrix of an expert (gate and up of a gated w13 count as one) in device memory, contiguous.
struct PackSource {
  const void* values = nullptr;          ///< as WeightMatrix::values; rows of gate, then of up
  const std::uint8_t* scales = nullptr;  ///< as WeightMatrix::scales, where the format has any
  std::int64_t width = 0;                ///< rows of one of the matrices
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
};

/// The packed blocks of one matrix in host memory, 4-byte aligned.
struct PackedView {
  const std::byte* blocks = nullptr;
  std::int64_t k_blocks = 0;
  std::int64_t k = 0;
  int exponent_shift = 0;
};

struct WeightFormat {
  QuantScheme scheme;
  DType row_dtype = DType::kBF16;  ///< of hidden states, activated rows and results
  PackedBlock block;

  // How a WeightMatrix holds a row:
  DType values = DType::kBF16;
  int codes_per_value = 1;  ///< K is a multiple of it
  int scale_group = 0;      ///< elements of K that share a scale byte; 0: there are none

  /// Weights are decoded in registers, which takes the same time for any number of tokens.
  bool decodes = false;
  /// Tokens of a tile up to which mma.sync multiplies decoded weights faster than wgmma; 0: never.
  int mma_sync_tokens = 0;
  /// GEMM 2 can apply router weights, see FusedMlpParams::topk_weights.
  bool weights_rows = false;

  /// From few tokens to many: first one with K groups, then one with an epilogue warpgroup, then
  /// those without.
  std::span<const TileShape> tiles;
  using Launch = void (*)(const FusedMlpParams&, const Stream&);
  std::span<const Launch> launches;  ///< of the tiles

  /// The kernel can multiply by scales of a limited range only. Returns the exponent s so that all
  /// scales of the matrices, divided by 2^s, lie in it; GemmParams::scales multiply by 2^s again.
  /// Throws Error for matrices that cannot be packed. `up` is null unless gated.
  int (*exponent_shift)(const WeightMatrix& gate, const WeightMatrix* up) = nullptr;
  /// Writes the packed blocks of a matrix to device memory. Asynchronous.
  void (*pack)(const PackSource& source, const BlockGrid& grid, void* blocks,
               const Stream& stream) = nullptr;
  /// Row `row` of a packed matrix, as WeightMatrix has it; an odd k leaves the last high nibble 0.
  void (*unpack_row)(const PackedView& source, std::int64_t row, void* values,
                     std::uint8_t* scales) = nullptr;

  BlockGrid grid(std::int64_t width, std::int64_t k, bool gated) const {
    return block_grid(width, k, gated, block.k);
  }
  /// Whether tiles of this shape add up a row in the order of all other such shapes. K groups do
  /// not, nor does mma.sync, which rounds otherwise than wgmma: where tiles with an epilogue
  /// warpgroup have no other instruction.
  bool keeps_order(const TileShape& tile) const {
    return tile.k_groups == 1 && !(mma_sync_tokens > 0 && tile.has_epilogue_warpgroup());
  }
};

/// Most tiles of a format.
inline constexpr int kMaxTiles = 8;

std::span<const WeightFormat> weight_formats();
/// Null where there is none.
const WeightFormat* find_weight_format(const QuantScheme& scheme);

/// Enqueues both GEMMs. Throws Error for a tile shape that is not compiled.
void fused_mlp(const FusedMlpParams& params, const WeightFormat& format, const TileShape& tile,
               const Stream& stream);

}  // namespace fusedmoe::cuda
