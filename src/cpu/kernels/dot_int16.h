// int16 dot products: each 32-bit lane adds two products to an int32. 4-bit integer weights become
// 16-bit integers; E2M1 weights, some of which are halves, become twice their value. Activations
// are those of keys::int16_group, in memory as they come. Included by isa_*.cpp only.
#pragma once

#include "cpu/kernels/dot_integers.h"

namespace fusedmoe::cpu {
namespace {

/// Without an instruction that adds to the accumulator, too.
template <class S>
struct PairProducts {
  static typename S::I dot(typename S::I acc, typename S::I b, typename S::I a) {
    return acc + S::multiply_words(b, a);
  }
};

/// The 16-bit integers of 4-bit codes.
template <Codes kCodes>
inline std::uint16_t nibble_integer(std::uint32_t code, const TileFormat& format) {
  const float value = nibble_value<kCodes>(code, implied_zero(format));
  return static_cast<std::uint16_t>(
      static_cast<std::int16_t>(kCodes == Codes::kE2M1 ? 2 * value : value));
}

/// 4-bit codes to pairs of integers.
template <class S, Codes kCodes>
struct NibblesToI16 : NibbleWords<S> {
  explicit NibblesToI16(const TileFormat& format)
      : NibbleWords<S>([&](std::uint32_t code) { return nibble_integer<kCodes>(code, format); }) {}
};
template <PermutesWords S, Codes kCodes>
struct NibblesToI16<S, kCodes> : NibbleWords<S> {
  using NibbleWords<S>::load, NibbleWords<S>::step;
  explicit NibblesToI16(const TileFormat& format)
      : NibbleWords<S>([&](std::uint32_t code) { return nibble_integer<kCodes>(code, format); }) {}
};

/// Adds int16 dot products to a table.
template <class S, class Products>
void add_int16_kernels(Kernels& table) {
  using D = DotIntegers<S, Products, 2>;
  const auto set = [&](Codes codes, void (*multiply)(const TileJob&)) {
    table.multiply[static_cast<int>(codes)][static_cast<int>(Compute::kInt16)] = multiply;
  };
  set(Codes::kMxfp4, multiply_grouped<D, NibblesToI16<S, Codes::kE2M1>>);
  set(Codes::kE2M1, multiply_grouped<D, NibblesToI16<S, Codes::kE2M1>>);
  set(Codes::kInt4, multiply_grouped<D, NibblesToI16<S, Codes::kInt4>>);
  table.flops[static_cast<int>(Compute::kInt16)] = flops<D>;
}

}  // namespace
}  // namespace fusedmoe::cpu
