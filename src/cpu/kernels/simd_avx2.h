// The vectors of the AVX2 levels. Included by isa_avx2*.cpp only.
#pragma once

#include <immintrin.h>

#include "cpu/kernels/simd_vector.h"

namespace fusedmoe::cpu {
namespace {

struct Avx2 : SimdVector<8> {
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F set1(float value) { return _mm256_set1_ps(value); }
  // GCC 12 would compare and select.
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static bool any_greater(F a, F b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
  }
  static I set1_words(std::int32_t value) { return (I)_mm256_set1_epi32(value); }
  // GCC 12 would take each element by itself.
  static I load_u8(const std::byte* p) {
    return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I load_u16(const std::byte* p) {
    return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static F load_bf16(const std::byte* p) { return as_float(load_u16(p) << 16); }
  static F load_f16(const std::byte* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  /// E4M3 codes without a sign that are no NaN, among them subnormal numbers: shifted, they are f16
  /// numbers of 2^-8 of their value, and F16C converts those whatever the denormal modes are.
  static F load_finite_e4m3(const std::byte* p) {
    const __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtph_ps(_mm_slli_epi16(codes, 7)) * set1(256.0f);
  }
  /// Whether any of 64 E4M3 codes without a sign is NaN.
  static bool any_e4m3_nan(const std::byte* p) {
    const auto* codes = reinterpret_cast<const __m256i*>(p);
    const __m256i nan = _mm256_set1_epi8(0x7F);
    const __m256i first = _mm256_cmpeq_epi8(_mm256_loadu_si256(codes), nan);
    const __m256i second = _mm256_cmpeq_epi8(_mm256_loadu_si256(codes + 1), nan);
    return _mm256_movemask_epi8(_mm256_or_si256(first, second)) != 0;
  }
  static void to_f16(std::uint16_t* codes, F value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm256_cvtps_ph(value, 0));
  }

  // Bytes: four in each 32-bit word. Shuffles stay within 16 bytes. A look-up takes the last four
  // bits of an index, and gives 0 where its first bit is set.
  static constexpr std::uint8_t kEntry8OrZero = 0x78;
  using Table = __m256i;
  static Table table(const std::uint8_t (&bytes)[16]) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  static I lookup(Table table, I indices) {
    return (I)_mm256_shuffle_epi8(table, (__m256i)indices);
  }
  /// u8 x s8 products, two of neighbours added in 16 bits with saturation.
  static I multiply_bytes(I unsigned_bytes, I signed_bytes) {
    return (I)_mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)signed_bytes);
  }
  /// s16 x s16 products, two of neighbours added in 32 bits.
  static I multiply_words(I a, I b) { return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
  /// Two neighbouring 16-bit values times `factor`, added in 32 bits.
  static I add_pairs(I pairs, std::int16_t factor) {
    return multiply_words(pairs, (I)_mm256_set1_epi16(factor));
  }
  static I subtract_bytes(I a, I b) { return (I)_mm256_sub_epi8((__m256i)a, (__m256i)b); }
  static bool any_top_bit(I bytes) { return _mm256_movemask_epi8((__m256i)bytes) != 0; }
  static I unpack_low(I low, I high) {
    return (I)_mm256_unpacklo_epi8((__m256i)low, (__m256i)high);
  }
  static I unpack_high(I low, I high) {
    return (I)_mm256_unpackhi_epi8((__m256i)low, (__m256i)high);
  }
};

}  // namespace
}  // namespace fusedmoe::cpu
