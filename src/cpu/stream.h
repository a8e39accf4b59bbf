// One or two rows x several tiles with AVX-512, decoded in registers. This is bound by memory, so
// several streams are read side by side, which keeps more cache lines in flight than one. Results
// are those of multiply.h and multiply_groups.h, bit for bit. Included by isa_avx512_bf16.cpp only.
#pragma once

#include "cpu/dot_bf16.h"
#include "cpu/multiply_groups.h"

namespace fusedmoe::cpu {
namespace {

/// Prefetches the first KiB of each of the next T streams during the last blocks of these, one line
/// of each at a call. The hardware prefetches the rest, once it has seen a stream's beginning.
template <int T>
inline void prefetch_heads(const TileJob& job, std::int64_t blocks_left) {
  constexpr std::int64_t kLines = 16;
  if (!job.prefetch || blocks_left > kLines) return;
  const std::byte* line = job.prefetch + (kLines - blocks_left) * 64;
  for (int t = 0; t < T; ++t, line += job.tile_bytes) __builtin_prefetch(line);
}

/// The initial accumulators of one group, for 16 columns.
template <class D>
inline typename D::Acc initial_of_stream(const float* initial, std::int64_t group,
                                         const std::byte* zeros, int v) {
  if (!initial) return D::zero();
  const __m512 value = _mm512_set1_ps(initial[group]);
  if (!zeros) return D::initial(value);
  const __m512 zero = _mm512_cvtepi32_ps(load_codes(zeros + 16 * v));
  return D::initial(_mm512_mul_ps(value, _mm512_sub_ps(_mm512_setzero_ps(), zero)));
}

/// Adds the products of `k` elements of R rows x one tile to accumulators.
template <class D, class Codec, int R>
inline void stream_blocks(const Codec& codec, const std::byte* block, std::int64_t k,
                          const std::byte* const (&rows)[R], std::int64_t a,
                          typename D::Acc (&accumulators)[R][4]) {
  for (std::int64_t i = 0; i < k; i += Codec::kK, block += kStepBytes, a += 4 * Codec::kSteps) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      typename D::B weights[Codec::kSteps];
      codec.decode(_mm512_loadu_si512(block + 64 * v), weights);
#pragma GCC unroll 4
      for (int j = 0; j < Codec::kSteps; ++j) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          accumulators[r][v] =
              D::dot(accumulators[r][v], weights[j], D::broadcast(rows[r] + a + 4 * j));
        }
      }
    }
  }
}

/// R rows x T tiles, whose streams advance in turn by at most 32 k.
///
/// Groups of up to 32 k end within a turn: totals stay in registers. Longer groups last several
/// turns: then the accumulators of all tiles stay in registers and the totals lie in memory.
template <class D, class Codec, ScaleType kScale, bool kLongGroups, int T, int R>
class TileStreams {
 public:
  TileStreams(const TileJob& job, int first_tile)
      : job_(job),
        first_tile_(first_tile),
        codec_(job.format),
        header_bytes_(kGrouped ? job.format.header_bytes() : 0) {
    for (int r = 0; r < R; ++r) rows_[r] = group_row(job, r);
  }

  void run() {
    Accumulators accumulators, totals;
    const std::byte* elements[R];
    for (int r = 0; r < R; ++r) elements[r] = rows_[r].elements;
    clear(accumulators);
    clear(totals);
    const std::byte* group = job_.tiles + first_tile_ * job_.tile_bytes;
    const std::int64_t group_k = kGrouped ? job_.format.group : job_.k;
    for (std::int64_t first = 0, g = 0; first < job_.k; first += group_k, ++g) {
      const std::int64_t end = job_.k - first < group_k ? job_.k : first + group_k;
      const std::byte* blocks = group + header_bytes_;
      if constexpr (kGrouped && kLongGroups) {
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) initialize(g, group + t * job_.tile_bytes, accumulators[t]);
      }
      for (std::int64_t k = first; k < end; k += kGroup) {
        const std::int64_t count = end - k < kGroup ? end - k : kGroup;
        prefetch_heads<T>(job_, (job_.k - k) / kGroup);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          // Loading a row's elements again for each tile is free; keeping them in registers would
          // spill accumulators. So the compiler must not know that the pointers are the same.
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) asm volatile("" : "+r"(elements[r]));
          const std::int64_t tile = t * job_.tile_bytes;
          if (kGrouped && !kLongGroups) initialize(g, group + tile, accumulators[t]);
          stream_blocks<D, Codec, R>(codec_, blocks + tile, count, elements,
                                     k / Codec::kK * Codec::kSteps * 4, accumulators[t]);
          if (kGrouped && !kLongGroups) add_scaled(g, group + tile, accumulators[t], totals[t]);
        }
        blocks += count / Codec::kK * kStepBytes;
      }
      if constexpr (kGrouped && kLongGroups) {
        asm volatile("" : : "r"(&totals) : "memory");  // totals stay in memory
        for (int t = 0; t < T; ++t) {
          add_scaled(g, group + t * job_.tile_bytes, accumulators[t], totals[t]);
        }
      }
      group = blocks;
    }
    store(kGrouped ? totals : accumulators);
  }

 private:
  static constexpr bool kGrouped = kScale != ScaleType::kNone;
  using Accumulators = __m512[T][R][4];

  static void clear(Accumulators& accumulators) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) accumulators[t][r][v] = _mm512_setzero_ps();
      }
    }
  }

  [[gnu::always_inline]] void initialize(std::int64_t g, const std::byte* header,
                                         __m512 (&accumulators)[R][4]) const {
    const std::byte* zeros = job_.format.zeros ? header + job_.format.scale_bytes() : nullptr;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        accumulators[r][v] = initial_of_stream<D>(rows_[r].initial, g, zeros, v);
      }
    }
  }

  [[gnu::always_inline]] void add_scaled(std::int64_t g, const std::byte* header,
                                         const __m512 (&accumulators)[R][4],
                                         __m512 (&totals)[R][4]) const {
    if constexpr (kGrouped) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const __m512 scale = load_scales<kScale>(header, v);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const float* row = rows_[r].scales;
          const __m512 both =
              row ? _mm512_mul_ps(scale, _mm512_set1_ps(row[g >> job_.row_scales.group_shift]))
                  : scale;
          totals[r][v] = _mm512_fmadd_ps(D::to_float(accumulators[r][v]), both, totals[r][v]);
        }
      }
    }
  }

  void store(const Accumulators& accumulators) const {
    for (int t = 0; t < T; ++t) {
      for (int r = 0; r < R; ++r) {
        alignas(64) float row[kTileColumns];
        for (int v = 0; v < 4; ++v) _mm512_store_ps(row + 16 * v, accumulators[t][r][v]);
        store_row<D>(job_, first_tile_ + t, r, row);
      }
    }
  }

  const TileJob& job_;
  const int first_tile_;
  const Codec codec_;
  const std::int64_t header_bytes_;
  GroupRow rows_[R];
};

template <class D, class Codec, ScaleType kScale, int T, int R>
void stream_all(const TileJob& job, int tile = 0) {
  for (; tile + T <= job.num_tiles; tile += T) {
    if (job.format.group > kGroup) {
      TileStreams<D, Codec, kScale, true, T, R>(job, tile).run();
    } else {
      TileStreams<D, Codec, kScale, false, T, R>(job, tile).run();
    }
  }
  if constexpr (T > 1) stream_all<D, Codec, kScale, T / 2, R>(job, tile);
}

/// Computes jobs of one or two rows; returns false for more.
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

/// Few rows with scales of a type in kScales as streams, everything else through panels.
template <class D, class Codec, ScaleType... kScales>
void multiply_streams(const TileJob& job) {
  const bool done =
      ((job.format.scales == kScales && stream_few_rows<D, Codec, kScales>(job)) || ...);
  if (!done) multiply_codes<D, RegisterBlocks<Codec>>(job);
}

}  // namespace
}  // namespace fusedmoe::cpu
