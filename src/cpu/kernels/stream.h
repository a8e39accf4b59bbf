// One to four rows (five with 4-bit codes and fp32 products on AVX-512) x tiles, decoded in
// registers: each weight is read once, and nothing is stored and read back. The time is that of
// reading the weights from memory. A core that reads one tile from its beginning to its end
// requests too few cache lines at a time. So a kernel does one of three things:
//
// * It prefetches the next tile to the L2 while it reads this one (kPrefetchesTiles). This needs
//   registers for the accumulators of all columns of a tile (kHoldsRows): AVX-512 has them always,
//   AVX2 for one row.
// * It reads several tiles side by side: on AVX-512 one or two rows of weights that need no
//   decoding, and of MXFP4 where the processor is faster so (prefers_side_by_side()).
// * Otherwise it prefetches the first KiB of each tile of the next job.
//
// Formats that decode quickly take more rows, in blocks; each block reads the same tile again. The
// results have the same bits as those of multiply.h and multiply_groups.h. Included by isa_*.cpp
// only.
#pragma once

#include "cpu/kernels/tile_streams.h"

namespace fusedmoe::cpu {
namespace {

/// R rows or, where R is more than 2, fewer; at least two.
template <Dot D, CodecOf<D> Codec, Scaling kScaling, int R>
void stream_block(const TileJob& job, int tile, std::int64_t row, std::int64_t num_rows,
                  Prefetcher& prefetch) {
  if constexpr (R > 2) {
    if (num_rows < R) {
      stream_block<D, Codec, kScaling, R - 1>(job, tile, row, num_rows, prefetch);
      return;
    }
  }
  TileStreams<D, Codec, kScaling, 1, R, true>(job, tile, row, &prefetch).run();
}

/// All rows of a job in blocks of about the same size. During a tile the next one is prefetched.
template <Dot D, CodecOf<D> Codec, Scaling kScaling, int kMostRows = kStreamedRows>
void stream_blocks(const TileJob& job) {
  const std::int64_t blocks = (job.num_rows + kMostRows - 1) / kMostRows;
  for (int tile = 0; tile < job.num_tiles; ++tile) {
    const bool last = tile == job.num_tiles - 1;
    Prefetcher prefetch(last ? job.prefetch : job.tiles + (tile + 1) * job.tile_bytes,
                        job.tile_bytes, blocks * job.k / D::kPerStep);
    std::int64_t row = 0;
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t end = job.num_rows * (block + 1) / blocks;
      stream_block<D, Codec, kScaling, kMostRows>(job, tile, row, end - row, prefetch);
      row = end;
    }
  }
}

/// Whether the registers hold the accumulators of R rows of a tile.
template <class S, int R>
inline constexpr bool kHoldsRows = S::kTuning.strip(R) * S::kWidth == kTileColumns;

/// Whether codes of 4 or 8 bits have to be decoded.
template <class Codec>
inline constexpr bool kDecodes = Codec::kK >= 4 && Codec::kSteps > 1;

/// Whether the kernel for R rows reads one tile at a time and prefetches the next, instead of
/// reading several tiles side by side. It does so for weights that must be decoded, where it is
/// faster. For bf16 weights with bf16 dot products it is slower.
template <Dot D, class Codec, int R>
inline constexpr bool kPrefetchesTiles = kHoldsRows<typename D::Simd, R> &&
                                         (kDecodes<Codec> || (D::Simd::kTuning.tiles(R) == 1 &&
                                                              D::kCompute != Compute::kBF16));

template <Dot D, CodecOf<D> Codec, Scaling kScaling, int R>
void stream_rows(const TileJob& job) {
  constexpr int kT = D::Simd::kTuning.tiles(R);
  // Only MXFP4: on Zen 4 other formats are about as fast with prefetches, or faster.
  constexpr bool kProcessorChooses =
      kScaling == Scaling::kChained && kT > 1 && (R == 1 || D::kCompute == Compute::kBF16);
  if constexpr (kPrefetchesTiles<D, Codec, R>) {
    if (!kProcessorChooses || !job.side_by_side) {
      stream_blocks<D, Codec, kScaling, R>(job);
      return;
    }
  }
  if constexpr (!kPrefetchesTiles<D, Codec, R> || kProcessorChooses) {
    int tile = 0;
    for (; tile + kT <= job.num_tiles; tile += kT) {
      TileStreams<D, Codec, kScaling, kT, R>(job, tile).run();
    }
    if constexpr (kT > 1) {
      for (; tile < job.num_tiles; ++tile) TileStreams<D, Codec, kScaling, 1, R>(job, tile).run();
    }
  }
}

/// Whether stream_few_rows() takes so many rows of one tile without blocks.
template <class D, class Codec, int kRows>
inline constexpr bool kStreams = kRows <= kStreamedRows || (kRows == 5 && DecodesSteps<Codec> &&
                                                            kHoldsRows<typename D::Simd, 5>);

/// Computes jobs of at most kStreamedRows rows, with some codecs of five, or of kMost where the
/// registers allow blocks of them; returns false for more.
template <Dot D, CodecOf<D> Codec, Scaling kScaling, std::int64_t kMost = kStreamedRows>
bool stream_few_rows(const TileJob& job) {
  static_assert(kStreamedRows == 4);
  if constexpr (kStreams<D, Codec, 5>) {
    if (job.num_rows == 5) {
      stream_rows<D, Codec, kScaling, 5>(job);
      return true;
    }
  }
  switch (job.num_rows) {
    case 1:
      stream_rows<D, Codec, kScaling, 1>(job);
      return true;
    case 2:
      stream_rows<D, Codec, kScaling, 2>(job);
      return true;
    case 3:
      stream_rows<D, Codec, kScaling, 3>(job);
      return true;
    case 4:
      stream_rows<D, Codec, kScaling, 4>(job);
      return true;
    default:
      if constexpr (kMost > kStreamedRows && kHoldsRows<typename D::Simd, kStreamedRows>) {
        if (job.num_rows <= kMost) {
          stream_blocks<D, Codec, kScaling>(job);
          return true;
        }
      }
      return false;
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
