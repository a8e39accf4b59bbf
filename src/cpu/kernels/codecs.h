// Decoding of packed codes, in registers. A codec turns one block of a stream
// (kernels.h) into steps of a dot product, for one vector of columns at a time; those here are for
// fp32 dot products and exact. Included by isa_*.cpp only.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/kernels/rows.h"
#include "cpu/kernels/scales.h"

namespace fusedmoe::cpu {
namespace {

// ---- Codecs for fp32 dot products ---------------------------------------------------------------

/// Values that need no decoding.
template <class S>
struct F32Codec {
  static constexpr int kK = 1, kSteps = 1;
  explicit F32Codec(const TileFormat&) {}
  void decode(const std::byte* block, const std::byte*, int v, typename S::F (&steps)[1]) const {
    steps[0] = S::load(reinterpret_cast<const float*>(block) + S::kWidth * v);
  }
};

/// bf16 pairs (k even, k odd) as two steps.
template <class S>
inline void expand_pairs(typename S::I pairs, typename S::F& even, typename S::F& odd) {
  even = S::as_float(pairs << 16);
  odd = S::as_float(pairs & static_cast<std::int32_t>(0xFFFF0000u));
}

template <class S>
struct Bf16Codec {
  static constexpr int kK = 2, kSteps = 2;
  explicit Bf16Codec(const TileFormat&) {}
  void decode(const std::byte* block, const std::byte*, int v, typename S::F (&steps)[2]) const {
    expand_pairs<S>(S::load_words(block + 4 * S::kWidth * v), steps[0], steps[1]);
  }
};

template <class S>
struct F16Codec {
  static constexpr int kK = 2, kSteps = 2;
  explicit F16Codec(const TileFormat&) {}
  void decode(const std::byte* block, const std::byte*, int v, typename S::F (&steps)[2]) const {
    for (int i = 0; i < 2; ++i) {
      steps[i] = S::load_f16(block + i * kStepBytes / 2 + 2 * S::kWidth * v);
    }
  }
};

/// 8-bit integers. 2^23 + code is the fp32 number whose last bits are the code.
template <class S>
class Int8Codec {
 public:
  static constexpr int kK = 4, kSteps = 4;
  explicit Int8Codec(const TileFormat& format)
      : zero_(S::set1(8388608.0f + static_cast<float>(implied_zero(format)))) {}

  void decode(const std::byte* block, const std::byte*, int v, typename S::F (&steps)[4]) const {
    const auto words = S::load_words(block + 4 * S::kWidth * v);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      steps[i] = S::as_float(((words >> (8 * i)) & 255) | 0x4B000000) - zero_;
    }
  }

 private:
  typename S::F zero_;
};

/// 4-bit codes by arithmetic, for instruction sets without a shuffle of bytes.
template <class S, Codes kCodes>
class ArithmeticNibbles {
 public:
  static constexpr int kK = 8, kSteps = 8;
  explicit ArithmeticNibbles(const TileFormat& format)
      : zero_(S::set1(8388608.0f + static_cast<float>(implied_zero(format)))) {}

  void decode(const std::byte* block, const std::byte*, int v, typename S::F (&steps)[8]) const {
    const auto words = S::load_words(block + 4 * S::kWidth * v);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      const auto code = (words >> (16 * (k % 2) + 2 * (k - k % 2))) & 15;
      if constexpr (kCodes == Codes::kInt4) {
        steps[k] = S::as_float(code | 0x4B000000) - zero_;
      } else if constexpr (kCodes == Codes::kIq4) {
        for (int i = 0; i < S::kWidth; ++i) {
          steps[k][i] = core::iq4_value(static_cast<std::uint8_t>(code[i]));
        }
      } else {
        const auto magnitude = code & 7;
        const auto small = S::select(magnitude == 0, magnitude, (magnitude & 0) + (126 << 23));
        const auto value = S::select(magnitude < 2, small, (magnitude << 22) + (126 << 23));
        steps[k] = S::as_float(value | ((code & 8) << 28));
      }
    }
  }

 private:
  typename S::F zero_;
};

/// E4M3 by arithmetic on 32-bit words.
template <class S>
struct ArithmeticE4m3 {
  static constexpr int kK = 4, kSteps = 4;
  explicit ArithmeticE4m3(const TileFormat&) {}

  void decode(const std::byte* block, const std::byte*, int v, typename S::F (&steps)[4]) const {
    static_assert(S::kWidth == 4);  // 16 bytes hold four columns
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const auto codes = S::load_u16(block + 16 * v + 8 * pair);
      steps[2 * pair] = e4m3_values<S>(codes & 0xFF);
      steps[2 * pair + 1] = e4m3_values<S>(codes >> 8);
    }
  }
};

// ---- Codecs by look-up of 16-bit words: bf16 values, or integers --------------------------------

inline std::uint16_t bf16_word(float value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

/// By byte shuffle: two look-ups give the low and the high byte of each word.
template <class S>
struct WordTables {
  typename S::Table low, high;

  /// `word_of(i)` is entry i of 16.
  template <class WordOf>
  static WordTables of(WordOf word_of) {
    std::uint8_t low[16], high[16];
    for (std::uint32_t i = 0; i < 16; ++i) {
      const std::uint16_t word = word_of(i);
      low[i] = static_cast<std::uint8_t>(word);
      high[i] = static_cast<std::uint8_t>(word >> 8);
    }
    return {S::table(low), S::table(high)};
  }
};

/// The word whose four bytes are all `byte`.
constexpr std::int32_t bytes4(std::uint8_t byte) {
  return static_cast<std::int32_t>(0x01010101u * byte);
}

template <class S>
concept PermutesWords = requires(typename S::I table, typename S::I indices) {
  S::permute_words(table, indices);
};

/// 4-bit codes to pairs of words (k even, k odd).
template <class S>
class NibbleWords {
 public:
  static constexpr int kK = 8, kSteps = 4;
  template <class WordOf>
  explicit NibbleWords(WordOf word_of)
      : words_(WordTables<S>::of(word_of)),
        order_(S::table({0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15})) {}

  void decode(const std::byte* block, const std::byte*, int v, typename S::I (&pairs)[4]) const {
    using I = typename S::I;
    // Of each four columns, first the bytes with k = 0 to 3, then those with k = 4 to 7.
    const I words =
        S::lookup((typename S::Table)S::load_words(block + 4 * S::kWidth * v), (I)order_);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const I codes = (half ? words >> 4 : words) & bytes4(15);
      const I low = S::lookup(words_.low, codes), high = S::lookup(words_.high, codes);
      pairs[half] = S::unpack_low(low, high);
      pairs[2 + half] = S::unpack_high(low, high);
    }
  }

 private:
  WordTables<S> words_;
  typename S::Table order_;
};

/// For instruction sets that look words up by one instruction. It takes five bits of each lane as
/// the index. Codes have four, so the fifth belongs to the next code and may be anything: the table
/// holds the 16 words twice.
template <PermutesWords S>
class NibbleWords<S> {
 public:
  static constexpr int kK = 8, kSteps = 4;
  template <class WordOf>
  explicit NibbleWords(WordOf word_of) {
    alignas(64) std::uint16_t words[32];
    for (std::uint32_t i = 0; i < 32; ++i) words[i] = word_of(i % 16);
    std::memcpy(&table_, words, sizeof(table_));
  }

  template <class B>
  void decode(const std::byte* block, const std::byte*, int v, B (&pairs)[4]) const {
    const auto codes = load(block, v);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) pairs[j] = (B)step(codes, j);
  }

 protected:
  static typename S::I load(const std::byte* block, int v) {
    return S::load_words(block + 4 * S::kWidth * v);
  }
  typename S::I step(typename S::I codes, int j) const {
    return S::permute_words(table_, codes >> (4 * j));
  }

 private:
  typename S::I table_;
};

/// 4-bit codes to bf16 pairs.
template <class S, Codes kCodes>
struct NibblePairs : NibbleWords<S> {
  explicit NibblePairs(const TileFormat& format)
      : NibbleWords<S>([&](std::uint32_t code) {
          return bf16_word(nibble_value<kCodes>(code, implied_zero(format)));
        }) {}
};

/// A table of 16 fp32 values that one instruction looks up with the last four bits of each lane.
template <class S, Codes kCodes>
class PermutedNibbles {
 public:
  static constexpr int kK = 8, kSteps = 8;
  explicit PermutedNibbles(const TileFormat& format) {
    alignas(64) float values[16];
    for (std::uint32_t code = 0; code < 16; ++code) {
      values[code] = nibble_value<kCodes>(code, implied_zero(format));
    }
    values_ = S::load(values);
  }

  void decode(const std::byte* block, const std::byte*, int v, typename S::F (&steps)[8]) const {
    const auto words = load(block, v);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) steps[k] = step(words, k);
  }

  // Or one step at a time: the codes of a vector, and step k of them.
  static typename S::I load(const std::byte* block, int v) {
    return S::load_words(block + 4 * S::kWidth * v);
  }
  typename S::F step(typename S::I codes, int k) const {
    return S::permute(values_, codes >> (16 * (k % 2) + 2 * (k - k % 2)));
  }

 private:
  typename S::F values_;
};

/// Where one instruction tells whether any byte has its top bit set.
template <class S>
concept TestsTopBits = requires(typename S::I bytes) {
  S::any_top_bit(bytes);
};

/// The bf16 form of a normal E4M3 value is its magnitude shifted by 4 bits, plus a constant.
/// Zero and subnormal values are then corrected by look-up, NaN by arithmetic. The corrections take
/// as long as everything else, and few weights need them. So a vector of weights skips them if none
/// of its weights is zero, subnormal or NaN.
template <class S>
class E4m3Pairs {
 public:
  static constexpr int kK = 4, kSteps = 2;
  explicit E4m3Pairs(const TileFormat&)
      : corrections_(WordTables<S>::of([](std::uint32_t i) {
          // Subnormal values need a correction. Entry 8 + m is the XOR of two bit patterns: what
          // the formula for normal values gives for magnitude m, and the right value.
          const std::uint32_t magnitude = i % 8;
          const std::uint32_t shifted = (magnitude << 20) + (120u << 23);
          const float value = core::e4m3_value(static_cast<std::uint8_t>(magnitude));
          return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(value) ^ shifted) >> 16);
        })),
        high_(S::table({0x3C, 0x3D, 0x3E, 0x3F, 0x40, 0x41, 0x42, 0x43,  //
                        0xBC, 0xBD, 0xBE, 0xBF, 0xC0, 0xC1, 0xC2, 0xC3})) {}

  void decode(const std::byte* block, const std::byte*, int v, typename S::I (&pairs)[2]) const {
    using I = typename S::I;
    const I codes = S::load_words(block + 4 * S::kWidth * v);
    I low = (codes << 4) & bytes4(0xF0);
    I high = S::lookup(high_, (codes >> 4) & bytes4(15));
    const I magnitude = codes & bytes4(0x7F);
    const I after_nan = S::add(magnitude, I{} + bytes4(1));  // has its top bit set for NaN only
    if constexpr (TestsTopBits<S>) {
      // So has magnitude - 8, modulo 256, for zero and subnormal values only.
      const I small = S::subtract_bytes(magnitude, I{} + bytes4(8));
      if (S::any_top_bit(small | after_nan)) [[unlikely]] {
        correct(magnitude, after_nan, low, high);
      }
    } else {
      correct(magnitude, after_nan, low, high);
    }
    pairs[0] = S::unpack_low(low, high);
    pairs[1] = S::unpack_high(low, high);
  }

 private:
  void correct(typename S::I magnitude, typename S::I after_nan, typename S::I& low,
               typename S::I& high) const {
    using I = typename S::I;
    // Entry 8 + magnitude for subnormal values; a look-up gives 0 for the indices of others.
    const I index = S::add(magnitude, I{} + bytes4(S::kEntry8OrZero));
    const I nan = after_nan & bytes4(0x80);
    low ^= S::lookup(corrections_.low, index);
    high = (high ^ S::lookup(corrections_.high, index)) | S::subtract(nan, (nan >> 7) & bytes4(1));
  }

  WordTables<S> corrections_;
  typename S::Table high_;  // bytes by the first four bits of a code
};

/// bf16 pairs of another codec as twice as many fp32 steps.
template <class S, class Pairs>
class PairsToF32 {
 public:
  static constexpr int kK = Pairs::kK, kSteps = 2 * Pairs::kSteps;
  explicit PairsToF32(const TileFormat& format) : codec_(format) {}
  void decode(const std::byte* block, const std::byte* header, int v,
              typename S::F (&steps)[kSteps]) const {
    typename S::I pairs[Pairs::kSteps];
    codec_.decode(block, header, v, pairs);
#pragma GCC unroll 4
    for (int j = 0; j < Pairs::kSteps; ++j) {
      expand_pairs<S>(pairs[j], steps[2 * j], steps[2 * j + 1]);
    }
  }

 private:
  Pairs codec_;
};

/// fp32 steps of another codec as bf16 pairs; exact, as no weight has more than 8 significant bits.
template <class S>
inline typename S::I join_pairs(typename S::F even, typename S::F odd) {
  using I = typename S::I;
  return ((reinterpret_cast<I>(even) >> 16) & 0xFFFF) |
         (reinterpret_cast<I>(odd) & static_cast<std::int32_t>(0xFFFF0000u));
}

template <class S, class Codec>
class F32ToPairs {
 public:
  static constexpr int kK = Codec::kK, kSteps = Codec::kSteps / 2;
  explicit F32ToPairs(const TileFormat& format) : codec_(format) {}
  template <class B>
  void decode(const std::byte* block, const std::byte* header, int v, B (&pairs)[kSteps]) const {
    typename S::F values[Codec::kSteps];
    codec_.decode(block, header, v, values);
#pragma GCC unroll 4
    for (int j = 0; j < kSteps; ++j) {
      pairs[j] = (B)join_pairs<S>(values[2 * j], values[2 * j + 1]);
    }
  }

 private:
  Codec codec_;
};

// ---- The best codec of an instruction set -------------------------------------------------------

template <class S>
concept ShufflesBytes = requires {
  typename S::Table;
};
template <class S>
concept PermutesFloats = requires(typename S::F table, typename S::I indices) {
  S::permute(table, indices);
};

template <class S, Codes kCodes>
struct BestNibbles {
  using Codec = ArithmeticNibbles<S, kCodes>;
};
template <ShufflesBytes S, Codes kCodes>
struct BestNibbles<S, kCodes> {
  using Codec = PairsToF32<S, NibblePairs<S, kCodes>>;
};
template <class S, Codes kCodes>
requires(ShufflesBytes<S>&& PermutesFloats<S>) struct BestNibbles<S, kCodes> {
  using Codec = PermutedNibbles<S, kCodes>;
};
template <class S, Codes kCodes>
using Nibbles = typename BestNibbles<S, kCodes>::Codec;

template <class S>
struct BestE4m3 {
  using Codec = ArithmeticE4m3<S>;
};
template <ShufflesBytes S>
struct BestE4m3<S> {
  using Codec = PairsToF32<S, E4m3Pairs<S>>;
};
template <class S>
using E4m3 = typename BestE4m3<S>::Codec;

// ---- W4A8 ---------------------------------------------------------------------------------------

/// e4m3(code * factor), nearest, ties to even, with a factor for each column in the group's header.
///
/// A product p has at most 7 significant bits; E4M3 keeps 4 of them. The fp32 sum p 2^20 + p has
/// no room for the others, so it rounds p as E4M3 does, and taking p 2^20 away is exact. Factors
/// are E4M3 values themselves: below 2^-6 a product is a multiple of 2^-9 with at most 3 bits,
/// which E4M3 holds exactly.
template <class S>
class W4A8Codec {
 public:
  static constexpr int kK = 8, kSteps = 8;
  explicit W4A8Codec(const TileFormat& format) : codes_(format) {}

  void decode(const std::byte* block, const std::byte* header, int v,
              typename S::F (&steps)[8]) const {
    codes_.decode(block, nullptr, v, steps);
    const auto factor = S::load_bf16(header + 2 * S::kWidth * v);
    const auto large = factor * S::set1(0x1p20f), sum = factor * S::set1(0x1p20f + 1);
#pragma GCC unroll 8
    for (auto& step : steps) step = S::fma(-large, step, step * sum);
    // A code is -8 to 7, so only factors above 56 saturate.
    if (S::any_greater(factor * factor, S::set1(56.0f * 56))) [[unlikely]] {
#pragma GCC unroll 8
      for (auto& step : steps) step = S::max(S::set1(-448.0f), S::min(S::set1(448.0f), step));
    }
  }

 private:
  Nibbles<S, Codes::kInt4> codes_;
};

}  // namespace
}  // namespace fusedmoe::cpu
