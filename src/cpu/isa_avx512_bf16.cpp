// Kernels for AVX-512 with BF16, VBMI and VNNI: vdpbf16ps adds two bf16 products per lane to an
// fp32 accumulator, vpdpbusd four int8 products to an int32 accumulator.
#include "cpu/dot_bf16.h"
#include "cpu/dot_int8.h"
#include "cpu/stream.h"

namespace fusedmoe::cpu {
namespace {

/// 2^(code - 127)
inline __m512 power_of_two(__m512i code) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(code, 23));
}

/// Step J of the 64 codes in `words`, for R rows. a: the rows' pairs of this step.
template <int J, int R>
inline void stream_step(const __m512i (&words)[4], __m512i table, const std::byte* const (&rows)[R],
                        std::int64_t a, __m512 (&accumulators)[R][4]) {
  __m512i weights[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) weights[v] = decode<J>(words[v], table);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m512i pair = DotBf16::broadcast(rows[r] + a + 4 * J);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v)
      accumulators[r][v] = DotBf16::dot(accumulators[r][v], weights[v], pair);
  }
}

/// R rows x T tiles, decoded in registers: T streams read side by side keep more cache lines in
/// flight than one. Accumulators are in units of the current group's scale.
template <int T, int R>
void stream_mxfp4_tiles(const TileJob& job, int first_tile) {
  const __m512i table = e2m1_table(0);
  const std::byte* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = row_pointer(job, r);
  const std::byte* tiles = job.tiles + first_tile * job.tile_bytes;
  __m512 acc[T][R][4];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) acc[t][r][v] = _mm512_setzero_ps();
    }
  }
  const std::int64_t groups = job.k / kGroup;
  for (std::int64_t g = 0; g < groups; ++g) {
    prefetch_heads<T>(job, groups - g);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      // Loading a row's pairs again for each tile is free; keeping them in registers would spill
      // accumulators. So the compiler must not know that the pointers are the same.
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) asm volatile("" : "+r"(rows[r]));
      const std::byte* group =
          tiles + t * job.tile_bytes + kMxfp4HeaderBytes + g * kMxfp4GroupBytes;
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const __m512 change = power_of_two(load_codes(group + 16 * v));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[t][r][v] = _mm512_mul_ps(acc[t][r][v], change);
      }
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        const std::byte* quarter = group + kTileColumns + q * kStepBytes;
        const __m512i words[4] = {_mm512_loadu_si512(quarter), _mm512_loadu_si512(quarter + 64),
                                  _mm512_loadu_si512(quarter + 128),
                                  _mm512_loadu_si512(quarter + 192)};
        const std::int64_t a = (g * kGroup + q * 8) * 2;
        stream_step<0>(words, table, rows, a, acc[t]);
        stream_step<1>(words, table, rows, a, acc[t]);
        stream_step<2>(words, table, rows, a, acc[t]);
        stream_step<3>(words, table, rows, a, acc[t]);
      }
    }
  }
  for (int t = 0; t < T; ++t) {
    const std::byte* last_codes = tiles + t * job.tile_bytes + kTileColumns;
    for (int r = 0; r < R; ++r) {
      alignas(64) float accumulators[kTileColumns];
      for (int v = 0; v < 4; ++v) {
        _mm512_store_ps(accumulators + 16 * v,
                        _mm512_mul_ps(acc[t][r][v], power_of_two(load_codes(last_codes + 16 * v))));
      }
      store_row<DotBf16>(job, first_tile + t, r, accumulators);
    }
  }
}

template <int T, int R>
void stream_mxfp4(const TileJob& job, int tile = 0) {
  for (; tile + T <= job.num_tiles; tile += T) stream_mxfp4_tiles<T, R>(job, tile);
  if constexpr (T > 1) stream_mxfp4<T / 2, R>(job, tile);
}

void multiply_mxfp4(const TileJob& job) {
  switch (job.num_rows) {
    case 1:
      return stream_mxfp4<4, 1>(job);
    case 2:
      return stream_mxfp4<2, 2>(job);
    case 3:
      return stream_mxfp4<1, 3>(job);
    case 4:
      return stream_mxfp4<1, 4>(job);
    default:
      return multiply<DotBf16, Mxfp4ToBf16>(job);
  }
}

void multiply_bf16(const TileJob& job) {
  switch (job.num_rows) {
    case 1:
      return stream_all_panels<DotBf16, 4, 1>(job);
    case 2:
      return stream_all_panels<DotBf16, 2, 2>(job);
    default:
      return multiply<DotBf16, Undecoded>(job);
  }
}

using Dot = DotF32<Simd>;
using Scale = ScaleType;

}  // namespace

const Kernels kAvx512Bf16Kernels = {
    "avx512_bf16",
    false,
    {{multiply<Dot, Undecoded>, nullptr, nullptr},
     {multiply<Dot, Bf16ToF32<Simd>>, multiply_bf16, nullptr},
     {multiply<Dot, Mxfp4ToF32<Simd>>, multiply_mxfp4, multiply_mxfp4_int8},
     {multiply_codes_f32<Simd, Codes::kE2M1>,
      multiply_streams<DotBf16, NibblesToBf16<Codes::kE2M1>, Scale::kE4M3>,
      multiply_groups<DotInt8, RegisterBlocks<NibblesToU8<Codes::kE2M1>>>},
     {multiply_codes_f32<Simd, Codes::kInt4>,
      multiply_streams<DotBf16, NibblesToBf16<Codes::kInt4>, Scale::kF32, Scale::kF16,
                       Scale::kBF16>,
      multiply_groups<DotInt8, RegisterBlocks<NibblesToU8<Codes::kInt4>>>},
     {multiply_codes_f32<Simd, Codes::kE4M3>,
      multiply_streams<DotBf16, E4m3ToBf16, Scale::kNone, Scale::kF32, Scale::kE8M0>, nullptr},
     {multiply_codes_f32<Simd, Codes::kInt8>,
      multiply_streams<DotBf16, Int8ToBf16, Scale::kF32, Scale::kF16, Scale::kBF16>, multiply_w8a8},
     {multiply<Dot, W4A8Panels<Dot>>, multiply<DotBf16, W4A8Panels<DotBf16>>, nullptr}},
    reduce<Simd>,
    {convert_to_f32, convert_to_bf16},
    activate_rows<Simd>,
    {flops<Dot>, flops<DotBf16>, int8_flops}};

}  // namespace fusedmoe::cpu
