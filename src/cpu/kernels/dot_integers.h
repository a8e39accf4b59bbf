// Dot products of integers, added in int32: what int8 and int16 ones share. `Products` is the
// instruction that an instruction set has for them. Included by isa_*.cpp only.
#pragma once

#include "cpu/kernels/dot_f32.h"

namespace fusedmoe::cpu {
namespace {

/// A 32-bit lane takes kProducts weights times as many activations.
template <class S, class Products, int kProducts>
struct DotIntegers {
  using Simd = S;
  using B = typename S::I;
  static constexpr Compute kCompute = kProducts == 4 ? Compute::kInt8 : Compute::kInt16;
  static constexpr int kPerStep = kProducts;
  static constexpr int kRows = S::kTuning.rows;

  static B load_b(const std::byte* p) { return S::load_words(p); }
  static void store_b(std::byte* p, B value) { S::store_words(p, value); }
  static B broadcast(const std::byte* p) {
    std::int32_t word;
    std::memcpy(&word, p, 4);
    return S::set1_words(word);
  }
  static B dot(B acc, B b, B a) { return Products::dot(acc, b, a); }
  /// Two steps at once, only where that takes fewer instructions.
  static B dot2(B acc, const B (&b)[2], const B (&a)[2]) requires requires {
    Products::dot2(acc, b, a);
  }
  { return Products::dot2(acc, b, a); }
  /// Only where the products come by matrices.
  template <int R, int kVectors>
  static void add_products(B (&acc)[R][kVectors], const std::byte* b,
                           const std::byte* const (&rows)[R], std::int64_t a,
                           std::int64_t steps) requires requires {
    Products::add_matrices(acc, b, rows, a, steps);
  }
  { Products::add_matrices(acc, b, rows, a, steps); }

  using Acc = B;
  static Acc zero() { return B{}; }
  static Acc initial(typename S::F value) { return __builtin_convertvector(value, B); }
  static typename S::F to_float(Acc acc) { return S::to_float(acc); }
  static constexpr auto store_element = store_rounded<S>;
};

}  // namespace
}  // namespace fusedmoe::cpu
