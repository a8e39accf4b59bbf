// bf16 dot products with AVX-512 BF16, and MXFP4 panels for them. Included by isa_avx512_bf16.cpp
// and isa_amx.cpp only.
#pragma once

#include "cpu/multiply.h"
#include "cpu/simd_avx512.h"

namespace fusedmoe::cpu {
namespace {

struct DotBf16 {
  using Simd = cpu::Simd;
  using B = __m512i;
  static constexpr int kPerStep = 2;
  static constexpr int kStepsPerGroup = kGroup / 2;
  static constexpr int kRows = Simd::kRows;
  static constexpr int kPasses = 1;
  static constexpr auto multiply_block = multiply_panel_rows<DotBf16>;

  static B load_b(const std::byte* p) { return _mm512_loadu_si512(p); }
  static B broadcast(const std::byte* p) {
    std::int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
  }
  static __m512 dot(__m512 acc, B b, B a) {
    return _mm512_dpbf16_ps(acc, (__m512bh)b, (__m512bh)a);
  }
  static void store_element(std::byte* row, std::int64_t column, __m512 value, Epilogue::Rounding) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + column * 2),
                        (__m256i)_mm512_cvtneps_pbh(value));
  }
};

// ---- MXFP4 --------------------------------------------------------------------------------------

/// bf16 values of the 16 E2M1 codes, twice: vpermw looks at five bits, the fifth of which belongs
/// to the next code. Magnitudes are multiplied by 2^bias; -0 becomes 0.
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

inline __m512i load_codes(const std::byte* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

/// Panels with the scales multiplied in, exactly: 6 significant bits at most. The table carries a
/// bias of 2^kBias, so that every scale is a saturating subtraction from the exponent, which
/// leaves zeros alone.
class Mxfp4ToBf16 {
 public:
  explicit Mxfp4ToBf16(const std::byte* stream) : groups_(stream + kMxfp4HeaderBytes) {
    for (int v = 0; v < 4; ++v) codes_[v] = load_codes(stream + 16 * v);
  }

  const std::byte* panel(std::int64_t begin, std::int64_t count, std::byte* scratch) {
    const __m512i table = e2m1_table(kBias);
    std::byte* target = scratch;
    for (std::int64_t g = 0; g < count / DotBf16::kStepsPerGroup; ++g) {
      const std::byte* group = groups_ + (begin / DotBf16::kStepsPerGroup + g) * kMxfp4GroupBytes;
      __m512i excess[4];  // (127 + kBias - code) << 7 in both halves of each column
      for (int v = 0; v < 4; ++v) {
        const __m512i change = _mm512_sub_epi32(load_codes(group + 16 * v), _mm512_set1_epi32(127));
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
      target += DotBf16::kStepsPerGroup * kStepBytes;
    }
    return scratch;
  }

 private:
  static constexpr int kBias = 100;  // covers scale codes 65 to 189, see pack.cpp
  const std::byte* groups_;
  __m512i codes_[4];
};

}  // namespace
}  // namespace fusedmoe::cpu
