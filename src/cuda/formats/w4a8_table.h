// W4A8 weights by look-up: the 16 weights e4m3((code - 8) * scale) of a row and its group of K are
// made once; then bytes are picked by code, four at a time.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fusedmoe::cuda {

/// The bytes of (high, low), numbered from the lowest, that the four low nibbles of `selector`
/// name. With bit 3 of a nibble: 8 times the byte's top bit.
FUSEDMOE_HD inline std::uint32_t pick_bytes(std::uint32_t low, std::uint32_t high,
                                            std::uint32_t selector) {
#ifdef __CUDA_ARCH__
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
#else
  const std::uint64_t bytes = std::uint64_t{high} << 32 | low;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t nibble = selector >> (4 * i) & 0xF;
    const auto byte = static_cast<std::uint32_t>(bytes >> (8 * (nibble & 7)) & 0xFF);
    result |= (nibble < 8 ? byte : (byte >> 7) * 0xFF) << (8 * i);
  }
  return result;
#endif
}

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
