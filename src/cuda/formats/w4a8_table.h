// W4A8 weights by look-up: the 16 weights e4m3((code - 8) * scale) of a row and its group of K are
// made once; then bytes are picked by code, four at a time.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "cuda/device/pick_bytes.h"

namespace fusedmoe::cuda {

/// The weights of a row's group, four bytes to a word: of codes 0 to 7, which are negative, and of
/// 8 to 15.
struct alignas(16) W4a8Table {
  std::uint32_t low[2], high[2];

  /// From the bytes of 1 to 8 times the scale, four to a word.
  FUSEDMOE_HD static W4a8Table of_multiples(std::uint32_t first, std::uint32_t second) {
    constexpr std::uint32_t kSigns = 0x80808080;
    return {
        {pick_bytes(first, second, 0x4567) ^ kSigns, pick_bytes(first, second, 0x0123) ^ kSigns},
        {first << 8, pick_bytes(first, second, 0x6543)}};
  }

  /// Four weights of the codes whose low three bits are in the low nibbles of `indexes`, and whose
  /// top bits, as bytes of ones, in `is_high`.
  FUSEDMOE_HD std::uint32_t pick(std::uint32_t indexes, std::uint32_t is_high) const {
    return (pick_bytes(low[0], low[1], indexes) & ~is_high) |
           (pick_bytes(high[0], high[1], indexes) & is_high);
  }
  /// The weights of the eight codes of a word, as W4a8Codes places them.
  FUSEDMOE_HD void decode(std::uint32_t word, std::uint32_t& first, std::uint32_t& second) const {
    constexpr std::uint32_t kTopBits = 0xBA98;  // of four bytes
    const std::uint32_t indexes = word & 0x77777777;
    first = pick(indexes, pick_bytes(word, 0, kTopBits));
    second = pick(indexes >> 16, pick_bytes(word << 4, 0, kTopBits));
  }
};

}  // namespace fusedmoe::cuda
