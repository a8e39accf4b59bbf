// Packed blocks: the layout in which weights stream to tensor cores. A block is 64 rows by one K
// block of a matrix, contiguous, so that one bulk copy brings it to shared memory as the tensor
// cores want it. A matrix is blocks[row_block][k_block], rows and K padded with zeros. The policies
// of this folder say what a block of their weights holds.
//
// Rows of a gated w13 come in turns, 8 of gate and then the same 8 of up, so that one thread gets
// both. Those of non-gated w13 and of w2 stay as they are.
#pragma once

#include <cstdint>

#include "core/ceil_div.h"
#include "core/host_device.h"

namespace fusedmoe::cuda {

inline constexpr int kBlockRows = 64;
/// A row of activations of a K block: what the swizzle of operands permutes.
inline constexpr int kSwizzleBytes = 128;

using core::ceil_div;

/// Where the matrix row of a gated, interleaved w13 comes from: feature and whether it is `up`.
FUSEDMOE_HD constexpr std::int64_t gated_feature(std::int64_t row) {
  return row / 16 * 8 + row % 8;
}
FUSEDMOE_HD constexpr bool gated_is_up(std::int64_t row) {
  return row % 16 >= 8;
}

/// Size and K of a packed block.
struct PackedBlock {
  int bytes = 0;
  int k = 0;
};

/// Extent of one packed matrix.
struct BlockGrid {
  std::int64_t row_blocks = 0;
  std::int64_t k_blocks = 0;
  FUSEDMOE_HD constexpr std::int64_t count() const { return row_blocks * k_blocks; }
};

/// `width`: outputs that remain, that is, after gating.
FUSEDMOE_HD constexpr BlockGrid block_grid(std::int64_t width, std::int64_t k, bool gated,
                                           int block_k) {
  return {ceil_div(width, gated ? kBlockRows / 2 : kBlockRows), ceil_div(k, block_k)};
}

}  // namespace fusedmoe::cuda
