// Bytes of two words by number, on the host too.
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

}  // namespace fusedmoe::cuda
