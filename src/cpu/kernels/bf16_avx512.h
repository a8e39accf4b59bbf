// The bf16 products of AVX-512 BF16, and the decoders for them. Included by isa_avx512_bf16.cpp
// and isa_amx.cpp only.
#pragma once

#include <bit>

#include "cpu/kernels/dot_bf16.h"
#include "cpu/kernels/simd_avx512.h"

namespace fusedmoe::cpu {
namespace {

struct Bf16Products {
  using B = __m512i;
  static __m512 dot(__m512 acc, B b, B a) {
    return _mm512_dpbf16_ps(acc, (__m512bh)b, (__m512bh)a);
  }
  static void store(std::uint16_t* codes, __m512 value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), (__m256i)_mm512_cvtneps_pbh(value));
  }
};

// ---- MXFP4 --------------------------------------------------------------------------------------

/// The bf16 values of the 16 E2M1 codes, twice: vpermw takes five bits as index, the fifth of which
/// belongs to the next code. Values are multiplied by 2^bias; -0 becomes 0.
inline __m512i e2m1_table(int bias) {
  static constexpr std::uint16_t kMagnitudes[8] = {0,      0x3F00, 0x3F80, 0x3FC0,
                                                   0x4000, 0x4040, 0x4080, 0x40C0};
  alignas(64) std::uint16_t table[32];
  for (int i = 0; i < 32; ++i) {
    const std::uint16_t magnitude = kMagnitudes[i & 7];
    table[i] = magnitude == 0
                   ? 0
                   : static_cast<std::uint16_t>((magnitude + (bias << 7)) | (i & 8 ? 0x8000 : 0));
  }
  return _mm512_load_si512(table);
}

/// Code J of the four in each 16-bit word, as a step of bf16 pairs.
template <int J>
inline __m512i decode(__m512i words, __m512i table) {
  return _mm512_permutexvar_epi16(J == 0 ? words : _mm512_srli_epi16(words, 4 * J), table);
}

/// Panels of MXFP4 with the scales multiplied in, which is exact. The table's values are multiplied
/// by 2^kBias, so that a scale can be applied as a subtraction from the exponent bits; it saturates
/// at 0, which leaves zeros alone.
class Mxfp4ToBf16 {
 public:
  Mxfp4ToBf16(const std::byte* stream, const TileFormat&) : groups_(stream + kMxfp4HeaderBytes) {
    for (int v = 0; v < 4; ++v) codes_[v] = (__m512i)Avx512::load_u8(stream + 16 * v);
  }

  const std::byte* panel(std::int64_t begin, std::int64_t count, std::byte* scratch) {
    const __m512i table = e2m1_table(kBias);
    std::byte* target = scratch;
    for (std::int64_t g = 0; g < count / kStepsPerGroup; ++g) {
      const std::byte* group = groups_ + (begin / kStepsPerGroup + g) * kMxfp4GroupBytes;
      __m512i excess[4];  // (127 + kBias - code) << 7 in both halves of each column
      for (int v = 0; v < 4; ++v) {
        const __m512i change =
            _mm512_sub_epi32((__m512i)Avx512::load_u8(group + 16 * v), _mm512_set1_epi32(127));
        codes_[v] = _mm512_sub_epi32(codes_[v], change);
        const __m512i shift =
            _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(127 + kBias), codes_[v]), 7);
        excess[v] = _mm512_or_si512(shift, _mm512_slli_epi32(shift, 16));
      }
      const std::byte* words = group + kTileColumns;
      for (int q = 0; q < 4; ++q) {
        for (int v = 0; v < 4; ++v, words += 64) {
          const __m512i codes = _mm512_loadu_si512(words);
          const auto store = [&](int j, __m512i values) {
            _mm512_store_si512(target + (4 * q + j) * kStepBytes + 64 * v,
                               _mm512_subs_epu16(values, excess[v]));
          };
          store(0, decode<0>(codes, table));
          store(1, decode<1>(codes, table));
          store(2, decode<2>(codes, table));
          store(3, decode<3>(codes, table));
        }
      }
      target += kStepsPerGroup * kStepBytes;
    }
    return scratch;
  }

 private:
  static constexpr int kStepsPerGroup = kGroup / 2;
  static constexpr int kBias = 100;  // covers scale codes 65 to 189, see pack.cpp
  const std::byte* groups_;
  __m512i codes_[4];
};

// ---- Codecs: 64 bytes of codes -> bf16 pairs of 16 columns --------------------------------------

inline __m512i load_block(const std::byte* block, int v) {
  return _mm512_loadu_si512(block + 64 * v);
}

/// E2M1, or 4-bit integers minus 8 (as they are if there are zero points), by table.
template <Codes kCodes>
using NibblesToBf16 = NibblePairs<Avx512, kCodes>;

/// Looks up the two bytes of the magnitude's bf16 value, then sets the sign.
class E4m3ToBf16 {
 public:
  static constexpr int kK = 4, kSteps = 2;

  explicit E4m3ToBf16(const TileFormat&) {
    alignas(64) std::uint8_t low[128], high[128];
    for (std::uint8_t code = 0; code < 128; ++code) {
      const auto half =
          static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(core::e4m3_value(code)) >> 16);
      low[code] = static_cast<std::uint8_t>(half);
      high[code] = static_cast<std::uint8_t>(half >> 8);
    }
    for (int i = 0; i < 2; ++i) {
      low_[i] = _mm512_load_si512(low + 64 * i);
      high_[i] = _mm512_load_si512(high + 64 * i);
    }
  }

  void decode(const std::byte* block, const std::byte*, int v, __m512i (&steps)[kSteps]) const {
    const __m512i codes = load_block(block, v);
    const __m512i low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);
    const __m512i high = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
    constexpr int kOrAnd = 0xF8;  // a | (b & c)
    const __m512i with_sign =
        _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), kOrAnd);
    steps[0] = _mm512_unpacklo_epi8(low, with_sign);
    steps[1] = _mm512_unpackhi_epi8(low, with_sign);
  }

 private:
  __m512i low_[2], high_[2];
};

/// The two bytes of the bf16 value of code - zero, for 256 codes.
struct Int8Bytes {
  std::uint8_t low[256], high[256];
};
consteval Int8Bytes int8_bytes(int zero) {
  Int8Bytes bytes{};
  for (int code = 0; code < 256; ++code) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(code - zero));
    bytes.low[code] = static_cast<std::uint8_t>(bits >> 16);
    bytes.high[code] = static_cast<std::uint8_t>(bits >> 24);
  }
  return bytes;
}

/// 8-bit integers minus 128 (as they are if there are zero points). Looks up the two bytes of the
/// bf16 value.
class Int8ToBf16 {
 public:
  static constexpr int kK = 4, kSteps = 2;

  explicit Int8ToBf16(const TileFormat& format)
      : order_(Avx512::table({0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15})) {
    static constexpr Int8Bytes kSigned = int8_bytes(128), kUnsigned = int8_bytes(0);
    const Int8Bytes& bytes = implied_zero(format) == 0 ? kUnsigned : kSigned;
    for (int i = 0; i < 4; ++i) {
      low_[i] = _mm512_loadu_si512(bytes.low + 64 * i);
      high_[i] = _mm512_loadu_si512(bytes.high + 64 * i);
    }
  }

  void decode(const std::byte* block, const std::byte*, int v, __m512i (&steps)[kSteps]) const {
    // Of each four columns, first the bytes with k = 0 and 1, then those with k = 2 and 3.
    const __m512i codes = _mm512_shuffle_epi8(load_block(block, v), order_);
    const __mmask64 large = _mm512_movepi8_mask(codes);  // those above 127
    const auto lookup = [&](const __m512i(&table)[4]) {
      const __m512i some = _mm512_mask2_permutex2var_epi8(table[2], codes, large, table[3]);
      return _mm512_mask2_permutex2var_epi8(table[0], some, ~large, table[1]);
    };
    const __m512i low = lookup(low_), high = lookup(high_);
    steps[0] = _mm512_unpacklo_epi8(low, high);
    steps[1] = _mm512_unpackhi_epi8(low, high);
  }

 private:
  __m512i low_[4], high_[4], order_;
};

/// W4A8's weights, rounded to E4M3 in fp32.
using W4A8ToBf16 = F32ToPairs<Avx512, W4A8Codec<Avx512>>;

}  // namespace
}  // namespace fusedmoe::cpu
