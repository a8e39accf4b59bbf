// Codecs for few rows that convert integers to fp32 rather than look them up. These codecs decode
// one step of a block at a time. Their values may be kUnit (a power of two) times the weight, and
// the scales divide by kUnit again: results are bit for bit those of the codecs of panels
// (codecs.h) while a group's sum stays below 2^99, its scale is at least 2^-98 and no product is
// subnormal. Included by isa_*.cpp only.
#pragma once

#include "cpu/kernels/block_codecs.h"
#include "cpu/kernels/policies.h"

namespace fusedmoe::cpu {
namespace {

/// What the weights of a codec are multiples of.
template <class Codec>
inline constexpr float kUnit = 1;
template <class Codec>
requires requires {
  Codec::kUnit;
}
inline constexpr float kUnit<Codec> = Codec::kUnit;

/// Integers of 4 or 8 bits, moved to the top of a 32-bit word and converted: so much is what the
/// weights are multiples of. With zero points in the stream (kZeros) codes are unsigned and end
/// below the sign bit.
template <class S, int kBits, bool kZeros>
class ConvertedIntegers {
 public:
  static constexpr int kK = 32 / kBits, kSteps = kK;
  static constexpr int kTop = 32 - kBits - (kZeros ? 1 : 0);
  static constexpr float kUnit = static_cast<float>(1u << kTop);
  explicit ConvertedIntegers(const TileFormat&)
      : mask_(S::set1_words(static_cast<std::int32_t>(kMost << kTop))),
        flip_(S::set1_words(static_cast<std::int32_t>(kBits == 4 ? 0x88888888u : 0x80808080u))) {}

  typename S::I load(const std::byte* block, int v) const {
    const auto words = S::load_words(block + 4 * S::kWidth * v);
    return kZeros ? words : words ^ flip_;
  }
  typename S::F step(typename S::I codes, int k) const {
    const int bit = kBits == 4 ? 16 * (k % 2) + 2 * (k - k % 2) : 8 * k;
    auto moved = bit > kTop ? codes >> (bit - kTop) : codes << (kTop - bit);
    if (kZeros || bit > 0) moved &= mask_;
    return S::to_float(moved);
  }

 private:
  static constexpr std::uint32_t kMost = (1u << kBits) - 1;
  typename S::I mask_, flip_;
};

/// As W4A8Codec. What the factors of a group yield is made once, and kept in the L1.
template <class S>
class W4A8Groups {
 public:
  static constexpr int kK = 8, kSteps = 8, kGroupK = kGroup;
  explicit W4A8Groups(const TileFormat& format) : codes_(format) {}

  void prepare(const std::byte*, const std::byte* header, int first, int count) {
    saturates_ = false;
    for (int v = first; v < first + count; ++v) {
      const auto factor = S::load_bf16(header + 2 * S::kWidth * v);
      saturates_ |= S::any_greater(factor * factor, S::set1(56.0f * 56));
      S::store(large_ + S::kWidth * v, factor * S::set1(-0x1p20f / Integers::kUnit));
      S::store(sums_ + S::kWidth * v, factor * S::set1((0x1p20f + 1) / Integers::kUnit));
    }
  }
  typename S::I load(const std::byte* block, int v) const { return codes_.load(block, v); }
  typename S::F step(typename S::I codes, int k, int v) const {
    const auto code = codes_.step(codes, k);
    auto value =
        S::fma(S::load(large_ + S::kWidth * v), code, code * S::load(sums_ + S::kWidth * v));
    if (saturates_) [[unlikely]] {
      value = S::max(S::set1(-448.0f), S::min(S::set1(448.0f), value));
    }
    return value;
  }

 private:
  using Integers = ConvertedIntegers<S, 4, false>;
  Integers codes_;
  bool saturates_ = false;
  alignas(64) float large_[kTileColumns], sums_[kTileColumns];
};

/// As BlockCodec, of integers. The scales of a group are made once, and kept in the L1.
template <class S, Codes kCodes>
class BlockGroups {
  static constexpr BlockCodes kBlocks = block_codes(kCodes);
  using Integers = ConvertedIntegers<S, kBlocks.elements == Codes::kInt8 ? 8 : 4, kBlocks.offsets>;

 public:
  static constexpr int kK = Integers::kK, kSteps = Integers::kSteps, kGroupK = kBlocks.group;
  explicit BlockGroups(const TileFormat& format) : codes_(format) {}

  void prepare(const std::byte* block, const std::byte* header, int first, int count) {
    for (int v = first; v < first + count; ++v) {
      typename S::F scale, offset;
      load_block_scales<S, kCodes>(block, header, v, scale, offset);
      S::store(scales_ + S::kWidth * v, scale * S::set1(1 / Integers::kUnit));
      if constexpr (kBlocks.offsets) S::store(offsets_ + S::kWidth * v, offset);
    }
  }
  typename S::I load(const std::byte* block, int v) const { return codes_.load(block, v); }
  typename S::F step(typename S::I codes, int k, int v) const {
    const auto scale = S::load(scales_ + S::kWidth * v);
    if constexpr (kBlocks.offsets) {
      return S::fma(codes_.step(codes, k), scale, S::load(offsets_ + S::kWidth * v));
    } else {
      return codes_.step(codes, k) * scale;
    }
  }

 private:
  Integers codes_;
  alignas(64) float scales_[kTileColumns], offsets_[kBlocks.offsets ? kTileColumns : 16];
};

}  // namespace
}  // namespace fusedmoe::cpu
