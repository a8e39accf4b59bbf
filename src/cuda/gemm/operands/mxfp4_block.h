// The packed block of MXFP4 weights: 64 rows by 64 of K, 2048 bytes of codes, then 128 of scales,
// as wgmma's register operand A has them.
//
// Codes: thread t of 128 owns the 16 bytes at 16 t, word j for the j-th 16 of K. Of warp w,
// g = lane / 4 and q = lane % 4, the word has
//   low half: (row 16 w + g, K 2 q), (row + 8, K), (row, K + 8), (row + 8, K + 8)
//   high half: the same at K + 1
// with sign and exponent-mantissa bits of the four spread as code_bits() says, so that a shift and
// a mask leave each pair as two bf16 numbers (times 2^-126).
//
// Scales: 4 bytes for each (w, g), exponents f of rows (g, g + 8) of K 0-31, 32-63 in the order
// g:0, g:1, g+8:0, g+8:1. The multiplier is the bf16 with exponent field f: 2^126 times the E8M0
// scale over the expert's own power of two.
#pragma once

#include "core/host_device.h"
#include "cuda/gemm/packed_block.h"

namespace fusedmoe::cuda {

inline constexpr int kMxfp4BlockK = 64, kMxfp4Group = 32;
inline constexpr int kMxfp4CodeBytes = kBlockRows * kMxfp4BlockK / 2;
inline constexpr int kMxfp4BlockBytes = kMxfp4CodeBytes + kBlockRows * (kMxfp4BlockK / kMxfp4Group);

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
