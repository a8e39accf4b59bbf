// Scales of a stream as fp32, with AVX-512. Included by isa_avx512_bf16.cpp and isa_amx.cpp only.
#pragma once

#include "cpu/codes.h"
#include "cpu/simd_avx512.h"

namespace fusedmoe::cpu {
namespace {

inline __m512i load_codes(const std::byte* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

/// Scales of columns 16 v .. 16 v + 15.
template <ScaleType kType>
inline __m512 load_scales(const std::byte* header, int v) {
  if constexpr (kType == ScaleType::kF32) {
    return _mm512_loadu_ps(header + 64 * v);
  } else if constexpr (kType == ScaleType::kF16 || kType == ScaleType::kBF16) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(header + 32 * v));
    if constexpr (kType == ScaleType::kF16) return _mm512_cvtph_ps(codes);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16));
  } else if constexpr (kType == ScaleType::kE8M0) {
    const __m512i codes = load_codes(header + 16 * v);
    const __m512i bits = _mm512_slli_epi32(codes, 23);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, _mm512_testn_epi32_mask(codes, codes),
                                                     _mm512_set1_epi32(0x400000)));
  } else {
    static_assert(kType == ScaleType::kE4M3);  // scales have no sign
    const __m512i codes = load_codes(header + 16 * v);
    const __m512i normal =
        _mm512_add_epi32(_mm512_slli_epi32(codes, 20), _mm512_set1_epi32(120 << 23));
    const __m512 subnormal = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(0x1p-9f));
    return _mm512_mask_mov_ps(_mm512_castsi512_ps(normal),
                              _mm512_cmplt_epi32_mask(codes, _mm512_set1_epi32(8)), subnormal);
  }
}

template <ScaleType kType>
inline void decode_all(const std::byte* header, float* scales) {
  for (int v = 0; v < 4; ++v) _mm512_storeu_ps(scales + 16 * v, load_scales<kType>(header, v));
}

/// As decode_scales, which the compiler does not vectorize well.
inline void decode_scales_avx512(ScaleType type, const std::byte* header, float* scales) {
  switch (type) {
    case ScaleType::kF16:
      return decode_all<ScaleType::kF16>(header, scales);
    case ScaleType::kBF16:
      return decode_all<ScaleType::kBF16>(header, scales);
    case ScaleType::kE4M3:
      return decode_all<ScaleType::kE4M3>(header, scales);
    case ScaleType::kE8M0:
      return decode_all<ScaleType::kE8M0>(header, scales);
    default:
      return decode_scales(type, header, scales);
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
