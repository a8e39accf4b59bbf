// Rows x tile for weights with scales in the stream. The products of a group are accumulated by
// themselves; then, in fp32 and for groups in ascending order,
//   total = total + accumulator * (weight scale * row scale).
// Included by isa_*.cpp only.
#pragma once

#include "cpu/kernels/multiply.h"

namespace fusedmoe::cpu {
namespace {

/// How rows and groups are cut.
template <class D, bool kTotals>
struct GroupBlocks {
  /// Rows of one block.
  static constexpr int kRows = kTotals ? D::Simd::kTuning.rows / 2 : D::Simd::kTuning.rows;
  /// How often a block goes over a panel, each time for some of the columns.
  static constexpr int kPasses = kTileColumns / (D::Simd::kTuning.vectors * D::Simd::kWidth);
  /// Steps of a panel, which should fit the L1: blocks of few rows read it often.
  static constexpr std::int64_t kPanelSteps = 64;
};
template <MultipliesGroups D, bool kTotals>
struct GroupBlocks<D, kTotals> : D::Groups {};

/// A decoded part of a tile: `count` groups of `steps` steps each, the last of `last_steps`.
struct GroupPanel {
  std::int64_t row_offset;  // bytes from the start of a row to the elements of the first group
  const std::byte* data;    // groups follow each other
  const float* scales;      // (count, 64)
  const float* zeros;       // (count, 64) or null
  std::int64_t first, count, steps, last_steps;
};

/// One row of activations.
struct GroupRow {
  const std::byte* elements;
  const float* scales;   // each of 2^group_shift groups of the weights, or null
  const float* initial;  // initial accumulators, or null
};

/// The initial accumulators of group g, for one row and vector of columns.
template <class D>
inline typename D::Acc initial_of_group(const GroupRow& row, const GroupPanel& panel,
                                        std::int64_t g, int column) {
  using S = typename D::Simd;
  const auto initial = S::set1(row.initial[panel.first + g]);
  return D::initial(panel.zeros ? initial * S::load(panel.zeros + g * kTileColumns + column)
                                : initial);
}

/// Adds `steps` steps of weights from b on times those of rows from byte a on: R rows x kVectors
/// vectors of columns. A dot product may have its own way for several rows and steps at once.
template <class D, int R, int kVectors>
[[gnu::always_inline]] inline void add_products(typename D::Acc (&acc)[R][kVectors],
                                                const std::byte* b,
                                                const std::byte* const (&rows)[R], std::int64_t a,
                                                std::int64_t steps) {
  if constexpr (requires { D::add_products(acc, b, rows, a, steps); }) {
    D::add_products(acc, b, rows, a, steps);
    return;
  }
  if constexpr (AddsTwoSteps<D>) {
#pragma GCC unroll 2
    for (std::int64_t step = 0; step < steps; step += 2, b += 2 * kStepBytes, a += 8) {
      typename D::B weights[kVectors][2];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        for (int i = 0; i < 2; ++i) {
          weights[v][i] = D::load_b(b + i * kStepBytes + v * D::Simd::kWidth * 4);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const typename D::B x[2] = {D::broadcast(rows[r] + a), D::broadcast(rows[r] + a + 4)};
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[r][v] = D::dot2(acc[r][v], weights[v], x);
      }
    }
    return;
  }
#pragma GCC unroll 4
  for (std::int64_t step = 0; step < steps; ++step, b += kStepBytes, a += 4) {
    typename D::B weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weights[v] = D::load_b(b + v * D::Simd::kWidth * 4);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto x = D::broadcast(rows[r] + a);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = D::dot(acc[r][v], weights[v], x);
    }
  }
}

/// R rows x 64 columns. totals (R, 64) are added to: with kTotals in registers, from the first
/// group of a panel to its last.
template <class D, int R, bool kTotals>
inline void multiply_group_panel(const GroupRow* rows, const GroupPanel& panel, int group_shift,
                                 float* totals, Prefetcher& prefetch) {
  using S = typename D::Simd;
  constexpr int kW = S::kWidth, kVectors = S::kTuning.vectors;
  const std::byte* elements[R];
  for (int r = 0; r < R; ++r) elements[r] = rows[r].elements + panel.row_offset;
  const bool has_initial = rows[0].initial, has_scales = rows[0].scales;
  for (int column = 0; column < kTileColumns; column += kVectors * kW) {
    float* const memory = totals + column;
    typename S::F total[R][kVectors];
    const auto add = [&](int r, int v, typename S::F acc, typename S::F scale)
        __attribute__((always_inline)) {
      if constexpr (kTotals) {
        total[r][v] = S::fma(acc, scale, total[r][v]);
      } else {
        float* at = memory + r * kTileColumns + v * kW;
        S::store(at, S::fma(acc, scale, S::load(at)));
      }
    };
    if constexpr (kTotals) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          total[r][v] = S::load(memory + r * kTileColumns + v * kW);
        }
      }
    }
    const std::byte* b = panel.data + column * 4;
    std::int64_t a = 0;
    for (std::int64_t g = 0; g < panel.count; ++g) {
      typename D::Acc acc[R][kVectors];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          acc[r][v] =
              has_initial ? initial_of_group<D>(rows[r], panel, g, column + v * kW) : D::zero();
        }
      }
      const std::int64_t steps = g + 1 == panel.count ? panel.last_steps : panel.steps;
      prefetch(steps);
      add_products<D>(acc, b, elements, a, steps);
      // Else the compiler would keep totals on the stack from group to group.
      if constexpr (!kTotals) asm volatile("" : : : "memory");
      b += steps * kStepBytes;
      a += 4 * steps;
      typename S::F scales[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        scales[v] = S::load(panel.scales + g * kTileColumns + column + v * kW);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        if (has_scales) {
          const auto scale = S::set1(rows[r].scales[(panel.first + g) >> group_shift]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) add(r, v, D::to_float(acc[r][v]), scales[v] * scale);
        } else {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) add(r, v, D::to_float(acc[r][v]), scales[v]);
        }
      }
    }
    if constexpr (kTotals) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          S::store(memory + r * kTileColumns + v * kW, total[r][v]);
        }
      }
    }
  }
}

template <class D, int R, bool kTotals>
inline void multiply_group_rows(int num_rows, const GroupRow* rows, const GroupPanel& panel,
                                int group_shift, float* totals, Prefetcher& prefetch) {
  if constexpr (R > 1) {
    if (num_rows < R) {
      multiply_group_rows<D, R - 1, kTotals>(num_rows, rows, panel, group_shift, totals, prefetch);
      return;
    }
  }
  multiply_group_panel<D, R, kTotals>(rows, panel, group_shift, totals, prefetch);
}

/// Whether the totals of groups stay in registers.
template <Dot D>
inline constexpr bool kTotalsInRegisters =
    D::kCompute == Compute::kF32 ? D::Simd::kTuning.f32_totals : D::Simd::kTuning.totals;

/// Decodes groups of a stream to panels, block by block.
template <Dot D, CodecOf<D> Codec>
class GroupPanels {
 public:
  static constexpr bool kTotals = kTotalsInRegisters<D>;

  GroupPanels(const std::byte* stream, const TileFormat& format)
      : format_(format), chained_(format.codes == Codes::kMxfp4), codec_(format) {
    group_ = stream + (chained_ ? kMxfp4HeaderBytes : 0);
    group_k_ = chained_ ? kGroup : format.group;
    header_bytes_ = chained_ ? kTileColumns : format.header_bytes();
    if (chained_) chain_ = Mxfp4Scales<S>(stream);
  }

  /// The next `count` groups; called in order.
  GroupPanel panel(std::int64_t first, std::int64_t count, std::int64_t k, std::byte* scratch) {
    auto* scales = reinterpret_cast<float*>(scratch + kScalesOffset);
    auto* zeros = reinterpret_cast<float*>(scratch + kZerosOffset);
    std::byte* target = scratch;
    std::int64_t last = 0;
    for (std::int64_t g = 0; g < count; ++g) {
      const std::int64_t left = k - (first + g) * group_k_;
      last = left < group_k_ ? left : group_k_;
      decode_header(scales + g * kTileColumns, zeros + g * kTileColumns);
      const std::byte* block = group_ + header_bytes_;
      for (std::int64_t i = 0; i < last; i += Codec::kK, block += kStepBytes) {
        decode_block<D>(codec_, block, group_, target);
        target += Codec::kSteps * kStepBytes;
      }
      group_ = block;
    }
    return {first * group_k_ / D::kPerStep * 4,
            scratch,
            scales,
            format_.zeros ? zeros : nullptr,
            first,
            count,
            group_k_ / D::kPerStep,
            last / D::kPerStep};
  }

 private:
  using S = typename D::Simd;

  void decode_header(float* scales, float* zeros) {
    if (chained_) {
      chain_.advance(group_);
      chain_.store(scales);
      return;
    }
    decode_scales<S>(format_.scales, group_, scales);
    if (!format_.zeros) return;
    for (int v = 0; v < kTileColumns / S::kWidth; ++v) {
      S::store(zeros + S::kWidth * v, load_zeros<S>(group_ + format_.scale_bytes(), v));
    }
  }

  const std::byte* group_;
  const TileFormat format_;
  const bool chained_;
  std::int64_t group_k_, header_bytes_;
  Mxfp4Scales<S> chain_;
  Codec codec_;
};

/// The stream of W8A8, which needs no decoding: one group with a scale of 1.
template <Dot D>
class WholePanel {
 public:
  static constexpr bool kTotals = kTotalsInRegisters<D>;

  WholePanel(const std::byte* stream, const TileFormat&) : stream_(stream) {}
  GroupPanel panel(std::int64_t, std::int64_t, std::int64_t k, std::byte* scratch) {
    auto* scales = reinterpret_cast<float*>(scratch + kScalesOffset);
    decode_scales<typename D::Simd>(ScaleType::kNone, nullptr, scales);
    return {0, stream_, scales, nullptr, 0, 1, k / D::kPerStep, k / D::kPerStep};
  }

 private:
  const std::byte* stream_;
};

inline GroupRow group_row(const TileJob& job, std::int64_t row) {
  const std::int64_t index = row_index(job, row);
  const RowScales& scales = job.row_scales;
  return {row_pointer(job, row),
          scales.group_scales ? scales.group_scales + index * scales.num_group_scales : nullptr,
          scales.initial ? scales.initial + index * scales.num_initial : nullptr};
}

/// All rows of a job x one tile. `group`: k of one group.
template <Dot D, class Panels>
void multiply_groups_tile(const TileJob& job, int tile, std::int64_t group) {
  GroupRow rows[kMaxRows];
  for (std::int64_t r = 0; r < job.num_rows; ++r) rows[r] = group_row(job, r);
  using Blocks = GroupBlocks<D, Panels::kTotals>;
  constexpr int kRows = Blocks::kRows;
  const std::int64_t groups = (job.k + group - 1) / group;
  const std::int64_t at_most = Blocks::kPanelSteps * D::kPerStep / group;
  const std::int64_t per_panel = at_most > 1 ? at_most : 1;
  const std::int64_t panels = (groups + per_panel - 1) / per_panel;
  const std::int64_t blocks = (job.num_rows + kRows - 1) / kRows;
  auto* totals = reinterpret_cast<float*>(job.scratch + kAccumulatorsOffset);
  std::memset(totals, 0, static_cast<std::size_t>(job.num_rows * kStepBytes));
  Prefetcher prefetch(tile == job.num_tiles - 1 ? job.prefetch : nullptr, job.prefetch_bytes,
                      blocks * Blocks::kPasses * job.k / D::kPerStep);
  Panels decoder(job.tiles + tile * job.tile_bytes, job.format);
  for (std::int64_t index = 0; index < panels; ++index) {
    const std::int64_t first = groups * index / panels;
    const std::int64_t stop = groups * (index + 1) / panels;
    const GroupPanel panel = decoder.panel(first, stop - first, job.k, job.scratch);
    std::int64_t row = 0;
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t end = begin_of_block<D>(block + 1, blocks, kRows, job.num_rows);
      const int count = static_cast<int>(end - row), shift = job.row_scales.group_shift;
      float* const of_block = totals + row * kTileColumns;
      if constexpr (MultipliesGroups<D>) {
        D::multiply_groups(count, rows + row, panel, shift, of_block, prefetch);
      } else {
        multiply_group_rows<D, kRows, Panels::kTotals>(count, rows + row, panel, shift, of_block,
                                                       prefetch);
      }
      row = end;
    }
  }
  for (std::int64_t r = 0; r < job.num_rows; ++r) {
    store_row<D>(job, tile, r, totals + r * kTileColumns);
  }
}

template <Dot D, CodecOf<D> Codec>
void multiply_groups(const TileJob& job) {
  const std::int64_t group = job.format.codes == Codes::kMxfp4 ? kGroup : job.format.group;
  for (int tile = 0; tile < job.num_tiles; ++tile) {
    multiply_groups_tile<D, GroupPanels<D, Codec>>(job, tile, group);
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
