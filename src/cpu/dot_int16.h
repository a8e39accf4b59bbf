// int16 dot products: each 32-bit lane adds two products to an int32. 4-bit integer weights become
// 16-bit integers; E2M1 weights, some of which are halves, become twice their value. Activations
// are those of keys::int16_group, in memory as they come. Included by isa_*.cpp only.
#pragma once

#include "cpu/dot_f32.h"

namespace fusedmoe::cpu {
namespace {

template <class S, class Products>
struct DotInt16 {
  using Simd = S;
  using B = typename S::I;
  static constexpr int kPerStep = 2;
  static constexpr int kRows = S::kRows;
  static constexpr int kPasses = 1;

  static B load_b(const std::byte* p) { return S::load_words(p); }
  static void store_b(std::byte* p, B value) { S::store_words(p, value); }
  static B broadcast(const std::byte* p) {
    std::int32_t pair;
    std::memcpy(&pair, p, 4);
    return S::set1_words(pair);
  }
  static B dot(B acc, B b, B a) { return Products::dot(acc, b, a); }

  using Acc = B;
  static Acc zero() { return B{}; }
  static Acc initial(typename S::F value) { return __builtin_convertvector(value, B); }
  static typename S::F to_float(Acc acc) { return S::to_float(acc); }
  static constexpr auto store_element = store_rounded<S>;
};

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

/// Adds int16 dot products to a table. kMost: stream_few_rows.
template <class S, class Products, std::int64_t kMost = kStreamedRows>
void add_int16_kernels(Kernels& table) {
  using D = DotInt16<S, Products>;
  const auto set = [&](Codes codes, void (*multiply)(const TileJob&)) {
    table.multiply[static_cast<int>(codes)][static_cast<int>(Compute::kInt16)] = multiply;
  };
  set(Codes::kMxfp4, multiply_grouped<D, NibblesToI16<S, Codes::kE2M1>, kMost>);
  set(Codes::kE2M1, multiply_grouped<D, NibblesToI16<S, Codes::kE2M1>, kMost>);
  set(Codes::kInt4, multiply_grouped<D, NibblesToI16<S, Codes::kInt4>, kMost>);
  table.flops[static_cast<int>(Compute::kInt16)] = flops<D>;
}

}  // namespace
}  // namespace fusedmoe::cpu
