// int8 dot products: unsigned weight codes times signed activations, four products a lane, added in
// int32. The initial accumulators (RowScales::initial) subtract the zero points. Included by
// isa_*.cpp only.
#pragma once

#include "cpu/kernels/dot_integers.h"

namespace fusedmoe::cpu {
namespace {

/// Without an instruction for it: two products are added in 16 bits, which hold those of codes of
/// up to 7 bits.
template <class S>
struct SmallProducts {
  static typename S::I dot(typename S::I acc, typename S::I b, typename S::I a) {
    return acc + S::add_pairs(S::multiply_bytes(b, a), 1);
  }
};

/// 8-bit codes as 16 x high + low.
template <class S>
struct WideProducts {
  static typename S::I dot(typename S::I acc, typename S::I b, typename S::I a) {
    const auto low = S::multiply_bytes(b & bytes4(15), a);
    const auto high = S::multiply_bytes((b >> 4) & bytes4(15), a);
    return acc + S::add_pairs(low, 1) + S::add_pairs(high, 16);
  }
};

/// Decodes 4-bit codes to unsigned bytes: integers as they are, E2M1 as 2 x value + 12. The two
/// steps of a block hold k = 0, 4, 1, 5 and 2, 6, 3, 7; GemmRows permutes activations alike.
template <class S, Codes kCodes>
class NibblesToU8 {
 public:
  static constexpr int kK = 8, kSteps = 2;

  explicit NibblesToU8(const TileFormat&) {
    std::uint8_t table[16];
    for (std::uint8_t i = 0; i < 16; ++i) {
      table[i] = static_cast<std::uint8_t>(2 * core::e2m1_value(i) + 12);
    }
    table_ = S::table(table);
  }

  void decode(const std::byte* block, const std::byte*, int v, typename S::I (&steps)[2]) const {
    const auto words = S::load_words(block + 4 * S::kWidth * v);
    steps[0] = words & bytes4(15);
    steps[1] = (words >> 4) & bytes4(15);
    if constexpr (kCodes == Codes::kE2M1) {
      for (auto& step : steps) step = S::lookup(table_, step);
    }
  }

 private:
  typename S::Table table_;
};

/// Codes that are their own decoding.
template <class S>
struct Int8AsIs {
  static constexpr int kK = 4, kSteps = 1;
  explicit Int8AsIs(const TileFormat&) {}
  void decode(const std::byte* block, const std::byte*, int v, typename S::I (&steps)[1]) const {
    steps[0] = S::load_words(block + 4 * S::kWidth * v);
  }
};

/// W8A8: all of k is one group, and many rows read the stream as it is.
template <Dot D>
void multiply_w8a8(const TileJob& job) {
  if (stream_few_rows<D, Int8AsIs<typename D::Simd>, Scaling::kGroups, D::Simd::kTuning.most_w8a8>(
          job))
    return;
  for (int tile = 0; tile < job.num_tiles; ++tile) {
    multiply_groups_tile<D, WholePanel<D>>(job, tile, job.k);
  }
}

/// Adds int8 dot products to a table. `Small` products take weight codes of up to 4 bits, `Wide` of
/// 8 bits.
template <class S, class Small, class Wide = Small>
void add_int8_kernels(Kernels& table) {
  constexpr std::int64_t kMost = S::kTuning.most_nibbles;
  using D = DotIntegers<S, Small, 4>;
  const auto set = [&](Codes codes, void (*multiply)(const TileJob&)) {
    table.multiply[static_cast<int>(codes)][static_cast<int>(Compute::kInt8)] = multiply;
  };
  set(Codes::kMxfp4, multiply_grouped<D, NibblesToU8<S, Codes::kE2M1>, kMost>);
  set(Codes::kE2M1, multiply_grouped<D, NibblesToU8<S, Codes::kE2M1>, kMost>);
  set(Codes::kInt4, multiply_grouped<D, NibblesToU8<S, Codes::kInt4>, kMost>);
  set(Codes::kInt8, multiply_w8a8<DotIntegers<S, Wide, 4>>);
  table.flops[static_cast<int>(Compute::kInt8)] = flops<D>;
}

}  // namespace
}  // namespace fusedmoe::cpu
