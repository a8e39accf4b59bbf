// int8 dot products with AVX-512 VNNI (vpdpbusd): unsigned weight codes times signed activations,
// four products a lane, added in int32. The initial accumulators (RowScales::initial) subtract the
// zero points. Included by isa_avx512_bf16.cpp only.
#pragma once

#include "cpu/multiply_groups.h"
#include "cpu/scales_avx512.h"

namespace fusedmoe::cpu {
namespace {

struct DotInt8 {
  using Simd = cpu::Simd;
  using B = __m512i;
  static constexpr int kPerStep = 4;
  static constexpr int kRows = Simd::kRows;
  static constexpr int kPasses = 1;

  static B load_b(const std::byte* p) { return _mm512_loadu_si512(p); }
  static B broadcast(const std::byte* p) {
    std::int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }
  /// NOTE: assembly, because GCC 12 copies the accumulators around the intrinsic.
  static __m512i dot(__m512i acc, B b, B a) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(b), "v"(a));
    return acc;
  }

  using Acc = __m512i;
  static Acc zero() { return _mm512_setzero_si512(); }
  static Acc initial(__m512 value) { return _mm512_cvtps_epi32(value); }
  static __m512 to_float(Acc acc) { return _mm512_cvtepi32_ps(acc); }
  static constexpr auto scales = decode_scales_avx512;
  static constexpr auto store_element = store_rounded<Simd>;
};

/// Decodes 4-bit codes to unsigned bytes: integers as they are, E2M1 as 2 x value + 12. The two
/// steps of a block hold k = 0, 4, 1, 5 and 2, 6, 3, 7; OperandRows permutes activations alike.
template <Codes kCodes>
class NibblesToU8 {
 public:
  static constexpr int kK = 8, kSteps = 2;

  explicit NibblesToU8(const TileFormat&) {
    static constexpr std::int8_t kDoubled[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                 0, -1, -2, -3, -4, -6, -8, -12};
    alignas(16) std::int8_t table[16];
    for (int i = 0; i < 16; ++i) table[i] = static_cast<std::int8_t>(kDoubled[i] + 12);
    table_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }

  void decode(__m512i words, __m512i (&steps)[kSteps]) const {
    const __m512i mask = _mm512_set1_epi8(15);
    steps[0] = _mm512_and_si512(words, mask);
    steps[1] = _mm512_and_si512(_mm512_srli_epi16(words, 4), mask);
    if constexpr (kCodes == Codes::kE2M1) {
      for (__m512i& step : steps) step = _mm512_shuffle_epi8(table_, step);
    }
  }

 private:
  __m512i table_;
};

/// Codes that are their own decoding.
class Int8AsIs {
 public:
  static constexpr int kK = 4, kSteps = 1;
  explicit Int8AsIs(const TileFormat&) {}
  void decode(__m512i words, __m512i (&steps)[kSteps]) const { steps[0] = words; }
};

/// Panels of MXFP4, whose scales are stored as differences between groups.
class Mxfp4ToU8 {
 public:
  Mxfp4ToU8(const std::byte* stream, const TileFormat& format)
      : group_(stream + kMxfp4HeaderBytes), scales_(stream), blocks_(format) {}

  GroupPanel panel(std::int64_t first, std::int64_t count, std::int64_t, std::byte* scratch) {
    auto* scales = reinterpret_cast<float*>(scratch + kScalesOffset);
    std::byte* target = scratch;
    for (std::int64_t g = 0; g < count; ++g, group_ += kMxfp4GroupBytes) {
      scales_.advance(group_);
      for (int c = 0; c < kTileColumns; ++c) {
        scales[g * kTileColumns + c] =
            float_of_bits(static_cast<std::uint32_t>(scales_.code[c]) << 23);
      }
      for (int q = 0; q < 4; ++q, target += Codec::kSteps * kStepBytes) {
        blocks_.decode(group_ + kTileColumns + q * kStepBytes, target);
      }
    }
    constexpr std::int64_t kSteps = kGroup / DotInt8::kPerStep;
    return {first * kGroup, scratch, scales, nullptr, first, count, kSteps, kSteps};
  }

 private:
  using Codec = NibblesToU8<Codes::kE2M1>;
  const std::byte* group_;
  Mxfp4Scales scales_;
  RegisterBlocks<Codec> blocks_;
};

/// W8A8: needs no decoding, and all of k is one group.
void multiply_w8a8(const TileJob& job) {
  for (int tile = 0; tile < job.num_tiles; ++tile) {
    multiply_groups_tile<DotInt8, WholePanel<DotInt8>>(job, tile, job.k);
  }
}

void multiply_mxfp4_int8(const TileJob& job) {
  for (int tile = 0; tile < job.num_tiles; ++tile) {
    multiply_groups_tile<DotInt8, Mxfp4ToU8>(job, tile, kGroup);
  }
}

double int8_flops(std::int64_t rounds) {
  constexpr int kAccumulators = DotInt8::kRows * Simd::kVectors;
  __m512i acc[kAccumulators];
  __m512i a = _mm512_set1_epi8(1);
  asm volatile("" : "+v"(a));
#pragma GCC unroll 32
  for (int i = 0; i < kAccumulators; ++i) acc[i] = _mm512_set1_epi32(i);
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kAccumulators; ++i) acc[i] = DotInt8::dot(acc[i], a, a);
  }
  __m512i sum = acc[0];
#pragma GCC unroll 32
  for (int i = 1; i < kAccumulators; ++i) sum = _mm512_add_epi32(sum, acc[i]);
  [[maybe_unused]] volatile int kept = _mm512_cvtsi512_si32(sum);  // the work must stay
  return 2.0 * kAccumulators * Simd::kWidth * DotInt8::kPerStep * static_cast<double>(rounds);
}

}  // namespace
}  // namespace fusedmoe::cpu
