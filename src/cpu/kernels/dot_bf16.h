// bf16 dot products: each 32-bit lane adds two products to fp32. `Products` is the instruction that
// an instruction set has for them. Included by isa_*.cpp only.
#pragma once

#include "cpu/kernels/dot_f32.h"

namespace fusedmoe::cpu {
namespace {

template <class S, class Products>
struct DotBf16 {
  using Simd = S;
  using B = typename Products::B;
  static constexpr Compute kCompute = Compute::kBF16;
  static constexpr int kPerStep = 2;
  static constexpr int kStepsPerGroup = kGroup / 2;
  static constexpr int kRows = S::kTuning.rows;
  static constexpr int kPasses = kTileColumns / (S::kTuning.vectors * S::kWidth);
  static constexpr auto multiply_block = multiply_panel_rows<DotBf16>;

  static B load_b(const std::byte* p) { return (B)S::load_words(p); }
  static void store_b(std::byte* p, B value) { S::store_words(p, (typename S::I)value); }
  static B broadcast(const std::byte* p) {
    std::int32_t pair;
    std::memcpy(&pair, p, 4);
    return (B)S::set1_words(pair);
  }

  using Acc = typename S::F;
  static Acc dot(Acc acc, B b, B a) { return Products::dot(acc, b, a); }
  static Acc zero() { return Acc{}; }
  static Acc initial(typename S::F value) { return value; }
  static typename S::F to_float(Acc acc) { return acc; }
  static void store_element(std::byte* row, std::int64_t column, typename S::F value,
                            Epilogue::Rounding) {
    Products::store(reinterpret_cast<std::uint16_t*>(row) + column, value);
  }
};

/// Weights that are bf16 pairs already.
template <class S>
struct Bf16AsIs {
  static constexpr int kK = 2, kSteps = 1;
  explicit Bf16AsIs(const TileFormat&) {}
  template <class B>
  void decode(const std::byte* block, const std::byte*, int v, B (&steps)[kSteps]) const {
    steps[0] = (B)S::load_words(block + 4 * S::kWidth * v);
  }
};

}  // namespace
}  // namespace fusedmoe::cpu
