// The layout in which the Hopper GEMMs stream weights: records of 64 rows by 64 of K, each a
// contiguous block of memory that one bulk copy brings to shared memory as the tensor cores want
// it. A matrix is records[row_block][k_block], rows and K padded to 64 with zeros.
//
//   bf16, f16   (64, 64) rows of 128 bytes, the 16-byte chunk c of row r at chunk c ^ (r % 8): the
//               128-byte swizzle of wgmma's shared-memory operands
//   mxfp4       2048 bytes of codes, then 128 of scales, as wgmma's register operand A has them:
//               thread t of 128 owns the 16 bytes at 16 t, word j for the j-th 16 of K; of warp w,
//               g = lane / 4 and q = lane % 4, the word has
//                 low half: (row 16 w + g, K 2 q), (row + 8, K), (row, K + 8), (row + 8, K + 8)
//                 high half: the same at K + 1
//               with sign and exponent-mantissa bits of the four spread as code_bits() says, so
//               that a shift and a mask leave each pair as two bf16 numbers (times 2^-126). Scales:
//               4 bytes for each (w, g): exponents f of rows (g, g + 8) of K 0-31, 32-63 in the
//               order g:0, g:1, g+8:0, g+8:1; the multiplier is the bf16 with exponent field f,
//               2^126 times the E8M0 scale over the expert's own power of two.
//
// Rows of a gated w13: blocks of 16, 8 of gate and then the same 8 of up, so that one thread has
// both. Non-gated w13 and w2: as they are.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fusedmoe::cuda {

enum class WeightFormat { kBF16, kF16, kMXFP4 };

/// Whether records hold codes that become bf16 on their way to the tensor cores.
FUSEDMOE_HD constexpr bool is_decoded(WeightFormat format) {
  return format == WeightFormat::kMXFP4;
}

inline constexpr int kRecordRows = 64;
inline constexpr int kRecordK = 64;
inline constexpr int kMxfp4CodeBytes = kRecordRows * kRecordK / 2;

FUSEDMOE_HD constexpr int record_bytes(WeightFormat format) {
  return is_decoded(format) ? kMxfp4CodeBytes + kRecordRows * 2 : kRecordRows * kRecordK * 2;
}

FUSEDMOE_HD constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Where the matrix row of a gated, interleaved w13 comes from: feature and whether it is `up`.
FUSEDMOE_HD constexpr std::int64_t gated_feature(std::int64_t row) {
  return row / 16 * 8 + row % 8;
}
FUSEDMOE_HD constexpr bool gated_is_up(std::int64_t row) {
  return row % 16 >= 8;
}

/// Extent of one packed matrix.
struct RecordGrid {
  std::int64_t row_blocks = 0;
  std::int64_t k_blocks = 0;

  FUSEDMOE_HD constexpr std::int64_t bytes(WeightFormat format) const {
    return row_blocks * k_blocks * record_bytes(format);
  }
};

/// `width`: outputs that remain, that is, after gating.
FUSEDMOE_HD constexpr RecordGrid record_grid(std::int64_t width, std::int64_t k, bool gated) {
  return {ceil_div(width, gated ? kRecordRows / 2 : kRecordRows), ceil_div(k, kRecordK)};
}

/// A bit of a 16-bit half of one of two neighbouring words.
struct CodeBit {
  int word, bit;
};
/// Bits that hold the code of `pair` (0 to 3) of word `word` (0 or 1) of two: sign, the exponent's
/// high and low bit, mantissa.
struct CodeBits {
  CodeBit sign, exponent_high, exponent_low, mantissa;
};
FUSEDMOE_HD constexpr CodeBits code_bits(int word, int pair) {
  if (pair < 3) {
    const int shift = 3 * pair;
    return {{word, 15 - shift}, {word, 8 - shift}, {word, 7 - shift}, {word, 6 - shift}};
  }
  return word == 0 ? CodeBits{{0, 14}, {1, 14}, {1, 13}, {0, 13}}
                   : CodeBits{{0, 11}, {1, 11}, {1, 10}, {0, 10}};
}

}  // namespace fusedmoe::cuda
