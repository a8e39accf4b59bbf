// Few rows times weights, without a decoded copy of the weights in memory. Tiles are read side by
// side. Each weight is read once, decoded in registers and multiplied by all rows. The results have
// the same bits as those of multiply.h and multiply_groups.h. Included by isa_*.cpp only, through
// stream.h.
#pragma once

#include "cpu/kernels/multiply_groups.h"
#include "cpu/kernels/stream_codecs.h"

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

/// What the scales of a stream do to accumulators.
enum class Scaling {
  kNone,     ///< nothing: there are none, or the codec multiplies them into the weights
  kGroups,   ///< each group's accumulators are scaled and added to totals
  kChained,  ///< MXFP4: accumulators are kept in units of the current group's scale
};

/// R rows x T tiles, whose streams advance in turn by at most 32 k. A tile is cut into strips whose
/// accumulators fit the registers; with one strip they stay there. With `prefetch` (kBlocks) the
/// whole next tile is brought to the L2 meanwhile; without it only the first bytes of the next
/// tiles are.
template <Dot D, CodecOf<D> Codec, Scaling kScaling, int T, int R, bool kBlocks = false>
class TileStreams {
 public:
  TileStreams(const TileJob& job, int first_tile, std::int64_t first_row = 0,
              Prefetcher* prefetch = nullptr)
      : job_(job),
        first_tile_(first_tile),
        first_row_(first_row),
        prefetch_(prefetch),
        codec_(job.format),
        tiles_(job.tiles + first_tile * job.tile_bytes) {
    for (int r = 0; r < R; ++r) rows_[r] = group_row(job, first_row + r);
  }

  void run() {
    Tiles accumulators;
    clear(accumulators);
    const std::byte* elements[R];
    for (int r = 0; r < R; ++r) elements[r] = rows_[r].elements;
    const TileFormat& format = job_.format;
    const bool chained_layout = format.codes == Codes::kMxfp4;
    const std::int64_t group_k = chained_layout ? kGroup : format.group > 0 ? format.group : job_.k;
    const std::int64_t header_bytes = chained_layout     ? kTileColumns
                                      : format.group > 0 ? format.header_bytes()
                                                         : 0;
    const std::byte* header = tiles_ + (chained_layout ? kMxfp4HeaderBytes : 0);
    for (std::int64_t first = 0, g = 0; first < job_.k; first += group_k, ++g) {
      const std::int64_t end = job_.k - first < group_k ? job_.k : first + group_k;
      const std::byte* blocks = header + header_bytes;
      begin_group(g, header, accumulators);
      for (std::int64_t k = first; k < end; k += kGroup) {
        const std::int64_t count = end - k < kGroup ? end - k : kGroup;
        if constexpr (!kBlocks) prefetch_heads<T>(job_, (job_.k - k) / kGroup);
        if constexpr (kApart) {
          add_blocks_apart(blocks, header, count, elements, k, accumulators);
        } else {
          add_blocks(blocks, header, count, elements, k, accumulators);
        }
        blocks += count / Codec::kK * kStepBytes;
      }
      end_group(g, header, accumulators);
      header = blocks;
    }
    finish(accumulators);
  }

 private:
  using S = typename D::Simd;
  using F = typename S::F;
  using Acc = typename D::Acc;
  static constexpr Tuning kTuning = S::kTuning;
  static constexpr int kW = S::kWidth;
  static constexpr int kTileVectors = kTileColumns / kW;
  static constexpr int kVectors = kTuning.strip(R);  // of a strip
  static constexpr int kStrips = kTileVectors / kVectors;
  static constexpr int kStripBytes = kStepBytes / kStrips;  // of a block
  static constexpr bool kStepwise =
      DecodesSteps<Codec> && (R > 2 || kTuning.converts_integers || PreparesGroups<Codec>);
  /// Whether the loop over blocks is a function of its own.
  static constexpr bool kApart =
      kTuning.loop_apart && kStrips == 1 && D::kPerStep == 1 && kScaling == Scaling::kGroups;
  static_assert(T == 1 || (!kApart && !PreparesGroups<Codec>), "made for one tile");
  static constexpr int kMostStepwise = R == 2 ? kTuning.stepwise_vectors : 4;
  static constexpr bool kInTurn = D::kPerStep == 1 && Codec::kSteps == 8 && R < 4;
  /// Vectors whose products take turns.
  static constexpr int kTogether = kStepwise ? (kVectors < kMostStepwise ? kVectors : kMostStepwise)
                                   : kInTurn ? kTuning.vectors_in_turn
                                             : 1;
  using Strip = Acc[R][kVectors];
  using Tiles = Strip[T][kStrips];

  /// Calls visit(tile, strip); with one strip of each tile the loops are unrolled.
  template <class Visit>
  [[gnu::always_inline]] static void each_strip(Visit visit) {
    if constexpr (kStrips == 1) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) visit(t, 0);
    } else {
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 1
        for (int s = 0; s < kStrips; ++s) visit(t, s);
      }
    }
  }

  /// Calls visit(row, vector of the strip).
  template <class Visit>
  [[gnu::always_inline]] static void each(Visit visit) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) visit(r, v);
    }
  }

  [[gnu::always_inline]] void clear(Tiles& accumulators) {
    each_strip([&](int t, int s) __attribute__((always_inline)) {
      each([&](int r, int v)
               __attribute__((always_inline)) { accumulators[t][s][r][v] = D::zero(); });
    });
    if constexpr (kScaling == Scaling::kGroups) {
      std::memset(totals_, 0, sizeof(totals_));
      if (job_.format.codes == Codes::kMxfp4) {
        for (int t = 0; t < T; ++t) chain_[t] = Mxfp4Scales<S>(tiles_ + t * job_.tile_bytes);
      }
    }
  }

  [[gnu::always_inline]] void begin_group(std::int64_t g, const std::byte* header,
                                          Tiles& accumulators) {
    if constexpr (kScaling == Scaling::kNone) return;
    // Now, while no accumulators are in the registers. For MXFP4 that was slower.
    if (job_.format.codes != Codes::kMxfp4) load_scales(header);
    each_strip([&](int t, int s) __attribute__((always_inline)) {
      Strip& strip = accumulators[t][s];
      const std::byte* at = header + t * job_.tile_bytes;
      if constexpr (kScaling == Scaling::kChained) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const F change = load_power_of_two<S>(at, s * kVectors + v);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) strip[r][v] = strip[r][v] * change;
        }
      } else {
        each([&](int r, int v) __attribute__((always_inline)) {
          strip[r][v] = initial(rows_[r].initial, g, at, s * kVectors + v);
        });
      }
    });
  }

  /// The initial accumulators of one group, for one vector of columns.
  [[gnu::always_inline]] Acc initial(const float* initial, std::int64_t g, const std::byte* header,
                                     int v) const {
    if (!initial) return D::zero();
    const F value = S::set1(initial[g] * kUnit<Codec>);
    if (!job_.format.zeros) return D::initial(value);
    return D::initial(value * load_zeros<S>(header + scale_bytes_, v));
  }

  /// Adds the products of `k` elements of each row from element `first` on.
  [[gnu::always_inline]] void add_blocks(const std::byte* blocks, const std::byte* header,
                                         std::int64_t k, const std::byte* (&elements)[R],
                                         std::int64_t first, Tiles& accumulators) {
    const std::int64_t a = first / Codec::kK * Codec::kSteps * 4;
    const std::int64_t num_blocks = k / Codec::kK;
    if constexpr (kStrips == 1) {
      for (std::int64_t i = 0; i < num_blocks; ++i) {
        if constexpr (kBlocks) {
          static_assert(kStepsPerPrefetch % Codec::kSteps == 0);
          if (i * Codec::kSteps % kStepsPerPrefetch == 0) (*prefetch_)(kStepsPerPrefetch);
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          add_block(blocks, header, t, 0, i, a, elements, accumulators[t][0]);
        }
      }
    } else {
      for (int t = 0; t < T; ++t) {
#pragma GCC unroll 1
        for (int s = 0; s < kStrips; ++s) {
          Strip strip;
          each([&](int r, int v)
                   __attribute__((always_inline)) { strip[r][v] = accumulators[t][s][r][v]; });
          for (std::int64_t i = 0; i < num_blocks; ++i) {
            // Strips read parts of each block in turn, which the hardware does not take for a
            // stream: the same part of the blocks that follow is fetched for it.
            const std::int64_t at = t * job_.tile_bytes + i * kStepBytes + s * kStripBytes;
            for (int line = 0; line < kStripBytes; line += 64) {
              __builtin_prefetch(blocks + num_blocks * kStepBytes + at + line);
            }
            add_block(blocks, header, t, s, i, a, elements, strip);
          }
          each([&](int r, int v)
                   __attribute__((always_inline)) { accumulators[t][s][r][v] = strip[r][v]; });
        }
      }
    }
  }

  /// The same in a function of its own. Within `run`, GCC 12 has accumulators on the stack.
  [[gnu::noinline]] void add_blocks_apart(const std::byte* blocks, const std::byte* header,
                                          std::int64_t k, const std::byte* (&elements)[R],
                                          std::int64_t first, Tiles& accumulators) {
    Tiles copy;
    each([&](int r, int v)
             __attribute__((always_inline)) { copy[0][0][r][v] = accumulators[0][0][r][v]; });
    add_blocks(blocks, header, k, elements, first, copy);
    each([&](int r, int v)
             __attribute__((always_inline)) { accumulators[0][0][r][v] = copy[0][0][r][v]; });
  }

  /// Hides from the compiler that it has loaded these elements before.
  [[gnu::always_inline]] static void hide(const std::byte* (&elements)[R]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) asm volatile("" : "+r"(elements[r]));
  }

  /// Adds the products of block `i` with strip `s` of tile `t`.
  [[gnu::always_inline]] void add_block(const std::byte* blocks, const std::byte* header, int t,
                                        int s, std::int64_t i, std::int64_t a,
                                        const std::byte* (&elements)[R], Strip& strip) {
    const std::byte* block = blocks + t * job_.tile_bytes + i * kStepBytes;
    const std::int64_t element = a + i * Codec::kSteps * 4;
    if constexpr (PreparesGroups<Codec>) {
      if (i * Codec::kK % Codec::kGroupK == 0) {
        codec_.prepare(block, header + t * job_.tile_bytes, s * kVectors, kVectors);
      }
    }
    if constexpr (kStepwise) {
      add_steps(block, s, element, elements, strip);
    } else {
      add_vectors(block, header + t * job_.tile_bytes, s, element, elements, strip);
    }
  }

  /// One step of several vectors at a time.
  [[gnu::always_inline]] void add_steps(const std::byte* block, int s, std::int64_t element,
                                        const std::byte* (&elements)[R], Strip& strip) const {
    // Each element of a row is loaded once for several vectors. An Ice Lake core loads hardly
    // more than one operand a cycle, and could make two products.
#pragma GCC unroll 2
    for (int first = 0; first < kVectors; first += kTogether) {
      if (first > 0) hide(elements);
      const Codec* codec = &codec_;
      typename S::I codes[kTogether];
#pragma GCC unroll 8
      for (int v = 0; v < kTogether; ++v) {
        codes[v] = codec->load(block, s * kVectors + first + v);
      }
#pragma GCC unroll 8
      for (int j = 0; j < Codec::kSteps; ++j) {
        // Hides the codec from the compiler. It then loads the group's prepared scales again for
        // each step, and does not keep them in registers, which the accumulators need.
        if constexpr (PreparesGroups<Codec>) asm volatile("" : "+r"(codec));
        typename D::B weights[kTogether];
#pragma GCC unroll 8
        for (int v = 0; v < kTogether; ++v) {
          if constexpr (PreparesGroups<Codec>) {
            weights[v] = codec->step(codes[v], j, s * kVectors + first + v);
          } else {
            weights[v] = codec->step(codes[v], j);
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const auto x = D::broadcast(elements[r] + element + 4 * j);
#pragma GCC unroll 8
          for (int v = 0; v < kTogether; ++v) {
            strip[r][first + v] = D::dot(strip[r][first + v], weights[v], x);
          }
        }
      }
    }
  }

  /// All steps of one or two vectors at a time.
  [[gnu::always_inline]] void add_vectors(const std::byte* block, const std::byte* header, int s,
                                          std::int64_t element, const std::byte* (&elements)[R],
                                          Strip& strip) const {
    // The products of kTogether vectors take turns, so that no product waits for the one before it.
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v += kTogether) {
      // Loading a row's elements again for each vector is free; keeping them in registers would
      // spill accumulators.
      if (v % kTuning.vectors == 0) hide(elements);
      typename D::B weights[kTogether][Codec::kSteps];
#pragma GCC unroll 2
      for (int i = 0; i < kTogether; ++i) {
        codec_.decode(block, header, s * kVectors + v + i, weights[i]);
      }
      if constexpr (AddsTwoSteps<D>) {
        static_assert(Codec::kSteps == 2 && kTogether == 1);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const typename D::B x[2] = {D::broadcast(elements[r] + element),
                                      D::broadcast(elements[r] + element + 4)};
          strip[r][v] = D::dot2(strip[r][v], weights[0], x);
        }
        continue;
      }
#pragma GCC unroll 8
      for (int j = 0; j < Codec::kSteps; ++j) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const auto x = D::broadcast(elements[r] + element + 4 * j);
#pragma GCC unroll 2
          for (int i = 0; i < kTogether; ++i) {
            strip[r][v + i] = D::dot(strip[r][v + i], weights[i][j], x);
          }
        }
      }
    }
  }

  [[gnu::always_inline]] void end_group(std::int64_t g, const std::byte* header,
                                        const Tiles& accumulators) {
    if constexpr (kScaling == Scaling::kGroups) {
      if (job_.format.codes == Codes::kMxfp4) load_scales(header);
      const bool has_scales = rows_[0].scales;
      float factors[R];
      for (int r = 0; r < R; ++r) {
        const float scale = has_scales ? rows_[r].scales[g >> job_.row_scales.group_shift] : 1;
        factors[r] = scale / kUnit<Codec>;
      }
      each_strip([&](int t, int s) __attribute__((always_inline)) {
        each([&](int r, int v) __attribute__((always_inline)) {
          const int column = (s * kVectors + v) * kW;
          F scale = S::load(scales_[t] + column);
          if (has_scales || kUnit<Codec> != 1) scale = scale * S::set1(factors[r]);
          float* total = totals_[t][r] + column;
          S::store(total, S::fma(D::to_float(accumulators[t][s][r][v]), scale, S::load(total)));
        });
      });
    }
  }

  /// The scales of a group, for all tiles.
  void load_scales(const std::byte* header) {
    if constexpr (kScaling == Scaling::kGroups) {
#pragma GCC unroll 1
      for (int t = 0; t < T; ++t, header += job_.tile_bytes) {
        if (job_.format.codes == Codes::kMxfp4) {
          chain_[t].advance(header);
          chain_[t].store(scales_[t]);
        } else {
          decode_scales<S>(job_.format.scales, header, scales_[t]);
        }
      }
    }
  }

  void finish(const Tiles& accumulators) {
    for (int t = 0; t < T; ++t) {
      const std::byte* last_codes = tiles_ + t * job_.tile_bytes + kTileColumns;
      for (int r = 0; r < R; ++r) {
        alignas(64) float row[kTileColumns];
        for (int s = 0; s < kStrips; ++s) {
          for (int v = 0; v < kVectors; ++v) {
            const int vector = s * kVectors + v;
            F value = D::to_float(accumulators[t][s][r][v]);
            if constexpr (kScaling == Scaling::kGroups)
              value = S::load(totals_[t][r] + vector * kW);
            if constexpr (kScaling == Scaling::kChained) {
              value = value * load_power_of_two<S>(last_codes, vector);
            }
            S::store(row + vector * kW, value);
          }
        }
        store_row<D>(job_, first_tile_ + t, first_row_ + r, row);
      }
    }
  }

  const TileJob& job_;
  const int first_tile_;
  const std::int64_t first_row_;
  Prefetcher* const prefetch_;
  Codec codec_;
  const std::byte* tiles_;
  const std::int64_t scale_bytes_ = job_.format.scale_bytes();
  GroupRow rows_[R];
  /// Only groups need the members below: for the other scalings they are small.
  static constexpr int if_grouped(int count) {
    return kScaling == Scaling::kGroups ? count : 1;
  }
  alignas(64) float totals_[if_grouped(T)][if_grouped(R)][kTileColumns];
  alignas(64) float scales_[if_grouped(T)][kTileColumns];
  Mxfp4Scales<S> chain_[if_grouped(T)];
};

}  // namespace
}  // namespace fusedmoe::cpu
