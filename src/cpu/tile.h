// Packs 64 rows of weight matrices to one tile of the layout in kernels.h, and unpacks it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cpu {

/// The source of one tile column: a row of a weight matrix, or null for padding.
struct Column {
  const WeightMatrix* matrix = nullptr;
  std::int64_t row = 0;
};
using Columns = std::array<Column, kTileColumns>;

/// What the tiles of one GEMM have in common.
struct TileShape {
  TileFormat format;
  QuantKey key;
  std::int64_t k = 0;         // inner size
  std::int64_t padded_k = 0;  // the same, up to a multiple of kGroup
};

/// Writes every byte of the tile. Throws Error for MXFP4 scales that the kernels cannot use.
void pack_tile(const TileShape& shape, const Columns& columns, std::byte* tile);

/// Writes values, group scales and zero points of the columns' matrices, which are as WeightMatrix
/// describes and writable. Scales per channel or tensor are not in tiles.
void unpack_tile(const TileShape& shape, const Columns& columns, const std::byte* tile);

}  // namespace fusedmoe::cpu
