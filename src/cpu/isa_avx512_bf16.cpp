// Kernels for AVX-512 with BF16: vdpbf16ps adds two bf16 products per lane to an fp32 sum.
#include "cpu/dot_bf16.h"

namespace fusedmoe::cpu {
namespace {

/// 2^(code - 127)
inline __m512 power_of_two(__m512i code) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(code, 23));
}

/// R rows x T tiles, decoded in registers: T streams side by side keep more lines in flight than
/// one. Accumulators are in units of the current group's scale.
template <int T, int R>
void stream_tiles(const TileJob& job, int first_tile) {
  const __m512i table = e2m1_table(0);
  const std::byte* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = row_pointer(job, r);
  const std::byte* tiles = job.tiles + first_tile * job.tile_bytes;
  __m512 acc[T][R][4];
  for (auto& tile : acc) {
    for (auto& row : tile) {
      for (auto& sum : row) sum = _mm512_setzero_ps();
    }
  }
  for (std::int64_t g = 0; g < job.k / kGroup; ++g) {
    const std::int64_t k_bytes = g * kGroup * 2;
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const std::byte* group =
          tiles + t * job.tile_bytes + kMxfp4HeaderBytes + g * kMxfp4GroupBytes;
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const __m512 change = power_of_two(load_codes(group + 16 * v));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[t][r][v] = _mm512_mul_ps(acc[t][r][v], change);
      }
      const std::byte* words = group + kTileColumns;
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
          const Decoded decoded = decode(_mm512_loadu_si512(words + (4 * q + v) * 64), table);
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
              const auto a = DotBf16::broadcast(rows[r] + k_bytes + (4 * q + j) * 4);
              acc[t][r][v] = DotBf16::dot(acc[t][r][v], decoded.step[j], a);
            }
          }
        }
      }
    }
  }
  for (int t = 0; t < T; ++t) {
    const std::byte* last_codes = tiles + t * job.tile_bytes + kTileColumns;
    for (int r = 0; r < R; ++r) {
      alignas(64) float sums[kTileColumns];
      for (int v = 0; v < 4; ++v) {
        _mm512_store_ps(sums + 16 * v,
                        _mm512_mul_ps(acc[t][r][v], power_of_two(load_codes(last_codes + 16 * v))));
      }
      store_row<DotBf16>(job, first_tile + t, r, sums);
    }
  }
}

template <int T, int R>
void stream_all(const TileJob& job, int tile = 0) {
  for (; tile + T <= job.num_tiles; tile += T) stream_tiles<T, R>(job, tile);
  if constexpr (T > 1) stream_all<T / 2, R>(job, tile);
}

void multiply_mxfp4(const TileJob& job) {
  switch (job.num_rows) {
    case 1:
      return stream_all<4, 1>(job);
    case 2:
      return stream_all<2, 2>(job);
    case 3:
      return stream_all<1, 3>(job);
    case 4:
      return stream_all<1, 4>(job);
    default:
      return multiply<DotBf16, Mxfp4ToBf16>(job);
  }
}

using Dot = DotF32<Simd>;

}  // namespace

const Kernels kAvx512Bf16Kernels = {"avx512_bf16",
                                    false,
                                    {{multiply<Dot, Direct>, nullptr},
                                     {multiply<Dot, Bf16ToF32<Simd>>, multiply<DotBf16, Direct>},
                                     {multiply<Dot, Mxfp4ToF32<Simd>>, multiply_mxfp4}},
                                    reduce<Simd>,
                                    {convert_to_f32, convert_to_bf16},
                                    {flops<Dot>, flops<DotBf16>}};

}  // namespace fusedmoe::cpu
