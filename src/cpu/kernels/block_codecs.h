// Codecs of llama.cpp's blocks: codes of any of the formats in block_codes(), scaled in registers.
// Included by isa_*.cpp only.
#pragma once

#include "cpu/kernels/codecs.h"

namespace fusedmoe::cpu {
namespace {

/// The codec of a block's codes, before scales.
template <class S, Codes kElements>
struct BlockElements {
  using Codec = Nibbles<S, kElements>;
};
template <class S>
struct BlockElements<S, Codes::kInt8> {
  using Codec = Int8Codec<S>;
};

/// The scale of the group that `block` is in, and the negative offset of formats that have offsets.
template <class S, Codes kCodes>
inline void load_block_scales(const std::byte* block, const std::byte* header, int v,
                              typename S::F& scale, typename S::F& offset) {
  constexpr BlockCodes kBlocks = block_codes(kCodes);
  constexpr int kK = kBlocks.elements == Codes::kInt8 ? 4 : 8, kKinds = kBlocks.kinds();
  const std::int64_t group =
      (block - header - kBlocks.header_bytes()) / (kBlocks.group / kK * kStepBytes);
  const std::byte* scales = header + kKinds * (2 + group) * kTileColumns + S::kWidth * v;
  const std::byte* factors = header + 2 * S::kWidth * v;
  const auto bytes = S::load_u8(scales);
  if constexpr (kBlocks.offsets) {
    scale = S::load_f16(factors) * S::to_float(bytes);
    offset =
        S::load_f16(factors + 2 * kTileColumns) * S::to_float(-S::load_u8(scales + kTileColumns));
  } else {
    scale = S::load_f16(factors) * S::to_float((bytes ^ 128) - 128);
  }
}

/// code * scale - offset, rounded once: products of a factor and an integer are exact.
template <class S, Codes kCodes>
class BlockCodec {
  static constexpr BlockCodes kBlocks = block_codes(kCodes);
  using Elements = typename BlockElements<S, kBlocks.elements>::Codec;

 public:
  static constexpr int kK = Elements::kK, kSteps = Elements::kSteps;
  explicit BlockCodec(const TileFormat&)
      : codes_({.codes = kBlocks.elements, .zeros = kBlocks.offsets}) {}

  void decode(const std::byte* block, const std::byte* header, int v,
              typename S::F (&steps)[kSteps]) const {
    codes_.decode(block, nullptr, v, steps);
    typename S::F scale, offset;
    load_block_scales<S, kCodes>(block, header, v, scale, offset);
#pragma GCC unroll 8
    for (auto& step : steps) {
      if constexpr (kBlocks.offsets) {
        step = S::fma(step, scale, offset);
      } else {
        step = step * scale;
      }
    }
  }

 private:
  Elements codes_;
};

}  // namespace
}  // namespace fusedmoe::cpu
