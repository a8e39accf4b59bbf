// Few rows x tiles, decoded in registers, with AVX-512: bound by memory, so several streams run
// side by side to keep more lines in flight than one. The sums are those of multiply.h and
// multiply_groups.h, bit for bit. Included by isa_avx512_bf16.cpp only.
#pragma once

#include "cpu/dot_bf16.h"
#include "cpu/multiply_groups.h"

namespace fusedmoe::cpu {
namespace {

/// The hardware prefetches a stream once it has seen some of it: towards the end of these tiles,
/// asks for the first KiB of each of the next T, a line of each at a time.
template <int T>
inline void prefetch_heads(const TileJob& job, std::int64_t blocks_left) {
  constexpr std::int64_t kLines = 16;
  if (!job.prefetch || blocks_left > kLines) return;
  const std::byte* line = job.prefetch + (kLines - blocks_left) * 64;
  for (int t = 0; t < T; ++t, line += job.tile_bytes) __builtin_prefetch(line);
}

/// What the sums of one group start from.
template <class D>
inline typename D::Acc stream_start(const float* starts, std::int64_t group, const std::byte* zeros,
                                    int v) {
  if (!starts) return D::zero();
  const __m512 start = _mm512_set1_ps(starts[group]);
  if (!zeros) return D::start(start);
  const __m512 zero = _mm512_cvtepi32_ps(load_codes(zeros + 16 * v));
  return D::start(_mm512_mul_ps(start, _mm512_sub_ps(_mm512_setzero_ps(), zero)));
}

/// `k` elements of R rows x one tile, onto sums.
template <class D, class Codec, int R>
inline void stream_blocks(const Codec& codec, const std::byte* block, std::int64_t k,
                          const std::byte* const (&rows)[R], std::int64_t a,
                          typename D::Acc (&sums)[R][4]) {
  for (std::int64_t i = 0; i < k; i += Codec::kK, block += kStepBytes, a += 4 * Codec::kSteps) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      typename D::B weights[Codec::kSteps];
      codec.decode(_mm512_loadu_si512(block + 64 * v), weights);
#pragma GCC unroll 4
      for (int j = 0; j < Codec::kSteps; ++j) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sums[r][v] = D::dot(sums[r][v], weights[j], D::broadcast(rows[r] + a + 4 * j));
        }
      }
    }
  }
}

template <class D, class Codec, ScaleType kScale, int T, int R>
void stream_tiles(const TileJob& job, int first_tile) {
  constexpr bool kGrouped = kScale != ScaleType::kNone;
  const Codec codec(job.format);
  const std::byte* rows[R];
  GroupRow meta[R];
  for (int r = 0; r < R; ++r) {
    meta[r] = group_row(job, r);
    rows[r] = meta[r].elements;
  }
  const std::byte* tile = job.tiles + first_tile * job.tile_bytes;
  __m512 sums[T][R][4];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[t][r][v] = _mm512_setzero_ps();
    }
  }
  // Without groups: a few KiB of each stream in turn.
  const std::int64_t part = kGrouped ? job.format.group : kGroup;
  for (std::int64_t k = 0, g = 0; k < job.k; k += part, ++g) {
    const std::int64_t count = job.k - k < part ? job.k - k : part;
    const std::int64_t a = k / Codec::kK * Codec::kSteps * 4;
    prefetch_heads<T>(job, (job.k - k) / kGroup);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      // Loading a row's elements again for each tile is free; kept, they would spill the sums. So
      // the compiler must not know that the pointers are the same.
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) asm volatile("" : "+r"(rows[r]));
      const std::byte* group = tile + t * job.tile_bytes;
      if constexpr (!kGrouped) {
        stream_blocks<D, Codec, R>(codec, group, count, rows, a, sums[t]);
      } else {
        const std::byte* zeros = job.format.zeros ? group + job.format.scale_bytes() : nullptr;
        typename D::Acc part_sums[R][4];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) {
            part_sums[r][v] = stream_start<D>(meta[r].starts, g, zeros, v);
          }
        }
        stream_blocks<D, Codec, R>(codec, group + job.format.header_bytes(), count, rows, a,
                                   part_sums);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
          const __m512 scale = load_scales<kScale>(group, v);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const __m512 both =
                meta[r].scales
                    ? _mm512_mul_ps(scale,
                                    _mm512_set1_ps(meta[r].scales[g >> job.row_scales.group_shift]))
                    : scale;
            sums[t][r][v] = _mm512_fmadd_ps(D::to_float(part_sums[r][v]), both, sums[t][r][v]);
          }
        }
      }
    }
    tile += (kGrouped ? job.format.header_bytes() : 0) + count / Codec::kK * kStepBytes;
  }
  for (int t = 0; t < T; ++t) {
    for (int r = 0; r < R; ++r) {
      alignas(64) float row[kTileColumns];
      for (int v = 0; v < 4; ++v) _mm512_store_ps(row + 16 * v, sums[t][r][v]);
      store_row<D>(job, first_tile + t, r, row);
    }
  }
}

template <class D, class Codec, ScaleType kScale, int T, int R>
void stream_all(const TileJob& job, int tile = 0) {
  for (; tile + T <= job.num_tiles; tile += T) stream_tiles<D, Codec, kScale, T, R>(job, tile);
  if constexpr (T > 1) stream_all<D, Codec, kScale, T / 2, R>(job, tile);
}

/// One or two rows as streams; false for more.
template <class D, class Codec, ScaleType kScale>
bool stream_few_rows(const TileJob& job) {
  if (job.num_rows == 1) {
    stream_all<D, Codec, kScale, 4, 1>(job);
  } else if (job.num_rows == 2) {
    stream_all<D, Codec, kScale, 2, 2>(job);
  } else {
    return false;
  }
  return true;
}

/// Codes whose scales are one of kScales, else per column.
template <class D, class Codec, ScaleType... kScales>
void multiply_streams(const TileJob& job) {
  const bool done =
      ((job.format.scales == kScales && stream_few_rows<D, Codec, kScales>(job)) || ...);
  if (!done) multiply_codes<D, RegisterBlocks<Codec>>(job);
}

}  // namespace
}  // namespace fusedmoe::cpu
