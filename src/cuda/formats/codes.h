// Where the codes of a packed block lie. Thread t of 128 owns the codes of the register operand A,
// of wgmma and of mma.sync, that it multiplies: of warp w, g = lane / 4 and q = lane % 4 those of
// rows 16 w + g and 8 more, in each of the block's 4 steps of 16 of K. Pairs of a step, as
// registers have them:
//
//   0: (row g, K 2q and 2q + 1)   1: (row g + 8, the same K)
//   2: (row g, K 2q + 8 and 9)    3: (row g + 8, the same K)
//
// With FP8 activations a step is 32 of K, and four neighbours take the place of a pair: of K 4q to
// 4q + 3, and of 16 more.
//
// A thread reads four words at once, 16 bytes. Where its codes fill eight, the second four lie 2048
// bytes behind the first. The second code of a pair lies 16 bits above the first, so one mask
// leaves the pair in the two halves of a register.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fusedmoe::cuda {

/// A packed block in shared memory. Policies read their codes through such a type. The kernel of
/// one token gives them another, which reads from global memory (StreamedBlock).
struct StagedBlock {
  const std::uint8_t* bytes;
  template <typename T>
  FUSEDMOE_HD T read(int offset) const {
    return *reinterpret_cast<const T*>(bytes + offset);
  }
};

/// A bit of one of a thread's words.
struct BitPlace {
  int word, bit;
};

/// 4-bit codes in order of pairs.
struct NibbleCodes {
  static constexpr int kBits = 4;
  FUSEDMOE_HD static constexpr BitPlace place(int step, int pair, int element, int bit) {
    return {step, 4 * pair + 16 * element + bit};
  }
};

/// 4-bit codes with FP8 activations; a step has a word for each row. The low three bits of the
/// eight codes are in its eight nibbles. The fourth bits are the top ones of bytes, of the second
/// four codes once the word is shifted by 4.
struct W4a8Codes {
  static constexpr int kBits = 4;
  FUSEDMOE_HD static constexpr BitPlace place(int step, int pair, int element, int bit) {
    const int second = pair / 2;
    return {2 * step + pair % 2,
            bit < 3 ? 16 * second + 4 * element + bit : 8 * element + 7 - 4 * second};
  }
};

/// 8-bit codes, two pairs to a word.
struct ByteCodes {
  static constexpr int kBits = 8;
  FUSEDMOE_HD static constexpr BitPlace place(int step, int pair, int element, int bit) {
    return {2 * step + pair / 2, 8 * (pair % 2) + 16 * element + bit};
  }
};

/// E2M1 for bf16: a shift and a mask leave three of four pairs as bf16 numbers, times 2^-126. The
/// left-over bits of two words make up the fourth of both.
struct E2m1Codes {
  static constexpr int kBits = 4;
  FUSEDMOE_HD static constexpr BitPlace place(int step, int pair, int element, int bit) {
    const int even = step / 2 * 2, shift = 16 * element;
    if (pair < 3) return {step, (bit == 3 ? 15 : 6 + bit) - 3 * pair + shift};
    // Sign, exponent and mantissa: bits 3, 2 and 1, 0.
    const int of_even_step[4] = {13, 13, 14, 14}, of_odd_step[4] = {10, 10, 11, 11};
    const bool in_second = bit == 1 || bit == 2;
    return {even + (in_second ? 1 : 0),
            (step % 2 == 0 ? of_even_step[bit] : of_odd_step[bit]) + shift};
  }
};

/// E4M3 for bf16: a mask leaves the first pair of a word as bf16 numbers, times 2^-120; two shifts
/// and masks make the second.
struct E4m3Codes {
  static constexpr int kBits = 8;
  FUSEDMOE_HD static constexpr BitPlace place(int step, int pair, int element, int bit) {
    const int first = bit == 7 ? 15 : bit + 4;
    const int second = bit == 7 ? 11 : bit > 3 ? bit + 8 : bit;
    return {2 * step + pair / 2, (pair % 2 == 0 ? first : second) + 16 * element};
  }
};

}  // namespace fusedmoe::cuda
