// MXFP4 weights as E4M3 numbers, by look-up: the eight magnitudes of a group are made once; then
// bytes are picked by code, four at a time.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "cuda/formats/w4a8_table.h"
#include "quant/quantize_elements.h"

namespace fusedmoe::cuda {

/// A code and the field of its scale, as packed.
struct Mxfp4Packed {
  std::uint8_t code, field;
};

/// The magnitudes of a group with scale 2^(field - kLargestField), times 2^kLargestExponent, four
/// bytes to a word: 0, 0.5, 1, 1.5 and 2, 3, 4, 6.
struct Mxfp4Table {
  /// 6 x 2^6 = 384 is the largest E4M3 number of a weight.
  static constexpr int kLargestExponent = 6;
  /// With the smallest field, 1, 0.5 is the smallest normal E4M3 number, 2^-6.
  static constexpr int kLargestField = 12;
  std::uint32_t low, high;

  FUSEDMOE_HD explicit Mxfp4Table(std::uint32_t field)
      : low(field * 0x08080800 + 0x0C080000), high(field * 0x08080808 + 0x1C181410) {}

  /// The weights of the eight codes of a word, as W4a8Codes places them.
  FUSEDMOE_HD void decode(std::uint32_t word, std::uint32_t& first, std::uint32_t& second) const {
    constexpr std::uint32_t kMagnitudes = 0x77777777, kSigns = 0x80808080;
    const std::uint32_t indexes = word & kMagnitudes;
    first = pick_bytes(low, high, indexes) | (word & kSigns);
    second = pick_bytes(low, high, indexes >> 16) | (word << 4 & kSigns);
  }

  /// A code whose E8M0 scale is `scale`, in a row whose largest one is `largest`. Below the
  /// smallest field the code is rounded to a multiple of what that gives 0.5.
  FUSEDMOE_HD static Mxfp4Packed pack(std::uint8_t code, int scale, int largest) {
    const int field = kLargestField + scale - largest;
    if (field >= 1) return {code, static_cast<std::uint8_t>(field)};
    const int magnitude = code & 7;
    const float value = magnitude < 2 ? 0.5F * static_cast<float>(magnitude)
                                      : std::ldexp(1.0F + 0.5F * static_cast<float>(magnitude % 2),
                                                   magnitude / 2 - 1);
    const auto rounded = core::e2m1_code(std::ldexp(value, field - 1));
    return {static_cast<std::uint8_t>((code & 8) | rounded), 1};
  }
  /// The E8M0 scale again.
  FUSEDMOE_HD static int scale_of(int field, int largest) {
    return field - kLargestField + largest;
  }
};

/// The E8M0 code of a power of two.
FUSEDMOE_HD inline int e8m0_of(float power) {
  return static_cast<int>(std::bit_cast<std::uint32_t>(power) >> 23);
}

}  // namespace fusedmoe::cuda
