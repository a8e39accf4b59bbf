// The vectors of all AVX-512 levels. Included by isa_avx512*.cpp and isa_amx.cpp only.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/simd_vector.h"

namespace fusedmoe::cpu {
namespace {

struct Avx512 : SimdVector<16> {
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  /// Keeps a loaded value in its register: GCC 12 would load it again for each of three products,
  /// and an Ice Lake core loads hardly more than one vector a cycle.
  static void keep(F& value) { asm("" : "+v"(value)); }
  static F set1(float value) { return _mm512_set1_ps(value); }
  // GCC 12 would compare and select.
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static bool any_greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
  static I set1_words(std::int32_t value) { return (I)_mm512_set1_epi32(value); }
  // GCC 12 would take each element by itself.
  static I load_u8(const std::byte* p) {
    return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_u16(const std::byte* p) {
    return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_bf16(const std::byte* p) { return as_float(load_u16(p) << 16); }
  static F load_f16(const std::byte* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  /// E4M3 without a sign and NaN: the bits of an f16 number 2^8 times smaller.
  static F load_finite_e4m3(const std::byte* p) {
    const __m256i codes =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(_mm256_slli_epi16(codes, 7)) * set1(256.0f);
  }
  static bool any_e4m3_nan(const std::byte* p) {
    return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(p), _mm512_set1_epi8(0x7F)) != 0;
  }
  static void to_f16(std::uint16_t* codes, F value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtps_ph(value, 0));
  }

  /// The entries of a table of 16, by the last four bits of each lane.
  static F permute(F table, I indices) { return _mm512_permutexvar_ps((__m512i)indices, table); }

  /// The 16-bit entries of a table of 32, by the last five bits of each 16-bit lane.
  static I permute_words(I table, I indices) {
    return (I)_mm512_permutexvar_epi16((__m512i)indices, (__m512i)table);
  }

  // Bytes: four in each 32-bit word. Shuffles stay within 16 bytes. A look-up takes the last four
  // bits of an index, and gives 0 where its first bit is set.
  static constexpr std::uint8_t kEntry8OrZero = 0x78;
  using Table = __m512i;
  static Table table(const std::uint8_t (&bytes)[16]) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  static I lookup(Table table, I indices) {
    return (I)_mm512_shuffle_epi8(table, (__m512i)indices);
  }
  /// u8 x s8 products, two of neighbours added in 16 bits with saturation.
  static I multiply_bytes(I unsigned_bytes, I signed_bytes) {
    return (I)_mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)signed_bytes);
  }
  /// s16 x s16 products, two of neighbours added in 32 bits.
  static I multiply_words(I a, I b) { return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
  /// Two neighbouring 16-bit values times `factor`, added in 32 bits.
  static I add_pairs(I pairs, std::int16_t factor) {
    return multiply_words(pairs, (I)_mm512_set1_epi16(factor));
  }
  static I subtract_bytes(I a, I b) { return (I)_mm512_sub_epi8((__m512i)a, (__m512i)b); }
  static bool any_top_bit(I bytes) { return _mm512_movepi8_mask((__m512i)bytes) != 0; }
  static I unpack_low(I low, I high) {
    return (I)_mm512_unpacklo_epi8((__m512i)low, (__m512i)high);
  }
  static I unpack_high(I low, I high) {
    return (I)_mm512_unpackhi_epi8((__m512i)low, (__m512i)high);
  }
};

}  // namespace
}  // namespace fusedmoe::cpu
