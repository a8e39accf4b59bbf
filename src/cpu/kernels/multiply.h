// The one grouped-GEMM skeleton of the CPU backend: rows x tile, with policies for the vectors of a
// level, the dot product and the weight format (policies.h). Included by isa_*.cpp only.
//
// Bits: every output element has one accumulator, to which its products are added in ascending k,
// whatever the number of rows. Decoding weights is exact. Kernels that leave MXFP4 scales out of
// the products multiply their accumulators by powers of two, which is exact too. So a row's result
// does not depend on the kernel that computed it; but for AMX tiles, which add up in another order.
#pragma once

#include <cstring>

#include "cpu/kernels.h"
#include "cpu/kernels/activation.h"
#include "cpu/kernels/codecs.h"
#include "cpu/kernels/policies.h"
#include "cpu/kernels/rows.h"

namespace fusedmoe::cpu {
namespace {

// ---- Rows ---------------------------------------------------------------------------------------

/// Where a row of the job is among the rows in memory, and among their scales.
inline std::int64_t row_index(const TileJob& job, std::int64_t row) {
  return job.slots ? job.slots[row] / job.topk : row;
}

inline const std::byte* row_pointer(const TileJob& job, std::int64_t row) {
  const std::int64_t index = row_index(job, row);
  return job.row_addresses ? job.row_addresses[index] : job.rows + index * job.row_bytes;
}

/// Prefetches the next stream, if any, evenly over the `steps` of the work on this one. NOTE: this
/// stream is left to the hardware, which prefetches it better.
class Prefetcher {
 public:
  Prefetcher(const std::byte* next, std::int64_t bytes, std::int64_t steps)
      : next_(next),
        lines_left_(next ? (bytes + 63) / 64 : 0),
        lines_per_step_(steps > 0 ? lines_left_ * kUnit / steps + 1 : 0) {}

  /// After each `steps`, some eight at a time: more lines at once than a core can wait for delay
  /// the loads behind them.
  [[gnu::always_inline]] void operator()(std::int64_t steps) {
    due_ += steps * lines_per_step_;
    for (; due_ >= kUnit && lines_left_ > 0; due_ -= kUnit, --lines_left_, next_ += 64) {
      __builtin_prefetch(next_, 0, 2);
    }
  }

 private:
  static constexpr std::int64_t kUnit = 1 << 10;  // due_ and lines_per_step_ count lines / kUnit
  const std::byte* next_;
  std::int64_t lines_left_, lines_per_step_, due_ = 0;
};
inline constexpr int kStepsPerPrefetch = 8;

// ---- Epilogue -----------------------------------------------------------------------------------

/// Multiplies the accumulators by the column scales, then by the row scale.
template <class S>
inline void scale_row(const TileJob& job, int tile, std::int64_t row, float* accumulators) {
  if (job.column_scales) {
    const float* scales = job.column_scales + tile * kTileColumns;
    for (int c = 0; c < kTileColumns; c += S::kWidth) {
      S::store(accumulators + c, S::load(accumulators + c) * S::load(scales + c));
    }
  }
  if (job.row_scales.scales) {
    const auto scale = S::set1(job.row_scales.scales[row_index(job, row)]);
    for (int c = 0; c < kTileColumns; c += S::kWidth) {
      S::store(accumulators + c, S::load(accumulators + c) * scale);
    }
  }
}

/// Stores fp32 elements, rounded to the dtype of the layer.
template <class S>
inline void store_rounded(std::byte* row, std::int64_t column, typename S::F value,
                          Epilogue::Rounding rounding) {
  if (rounding != Epilogue::Rounding::kNone) value = round_to<S>(value, rounding);
  S::store(reinterpret_cast<float*>(row) + column, value);
}

/// Applies scales, bias and activation to the 64 accumulators of one row and tile, and stores them.
template <class D>
inline void store_row(const TileJob& job, int tile, std::int64_t row, float* accumulators) {
  using S = typename D::Simd;
  constexpr int kW = S::kWidth;
  scale_row<S>(job, tile, row, accumulators);
  if (job.bias) {
    const float* bias = job.bias + tile * kTileColumns;
    for (int c = 0; c < kTileColumns; c += kW) {
      S::store(accumulators + c, S::load(accumulators + c) + S::load(bias + c));
    }
  }
  const Epilogue& e = *job.epilogue;
  std::byte* output = job.output + row * job.output_bytes;
  if (e.kind == Epilogue::Kind::kNone) {
    std::memcpy(output + std::int64_t{tile} * kStepBytes, accumulators, kStepBytes);
    return;
  }
  const int columns = e.gated ? kTileColumns / 2 : kTileColumns;
  for (int c = 0; c < columns; c += kW) {
    const auto gate = S::load(accumulators + c);
    const auto value = e.gated ? activate<S>(gate, S::load(accumulators + columns + c), e)
                               : activate_gate<S>(gate, e);
    const std::int64_t column = std::int64_t{tile} * columns + c;
    if (e.store_f32) {
      store_rounded<S>(output, column, value, e.rounding);
    } else {
      D::store_element(output, column, value, e.rounding);
    }
  }
}

// ---- Panel kernels ------------------------------------------------------------------------------

/// R rows x 64 columns over `steps` steps. Writes accumulators (R, 64); adds to what they hold if
/// `accumulate`.
template <class D, int R>
inline void multiply_panel(const std::byte* const* rows, const std::byte* panel, std::int64_t steps,
                           bool accumulate, float* accumulators, Prefetcher& prefetch) {
  using S = typename D::Simd;
  using F = typename S::F;
  constexpr int kW = S::kWidth;
  constexpr int kVectors = S::kTuning.vectors;
  for (int column = 0; column < kTileColumns; column += kVectors * kW) {
    F acc[R][kVectors];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] =
            accumulate ? S::load(accumulators + r * kTileColumns + column + v * kW) : S::set1(0.0f);
      }
    }
    const std::byte* b = panel + column * 4;
    for (std::int64_t begin = 0; begin < steps; begin += kStepsPerPrefetch) {
      prefetch(kStepsPerPrefetch);
#pragma GCC unroll 4
      for (int i = 0; i < kStepsPerPrefetch; ++i, b += kStepBytes) {
        typename D::B weights[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          weights[v] = D::load_b(b + v * kW * 4);
          if constexpr (requires { S::keep(weights[v]); }) S::keep(weights[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const auto a = D::broadcast(rows[r] + (begin + i) * 4);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) acc[r][v] = D::dot(acc[r][v], weights[v], a);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        S::store(accumulators + r * kTileColumns + column + v * kW, acc[r][v]);
      }
    }
  }
}

template <class D, int R>
inline void multiply_at_most(int num_rows, const std::byte* const* rows, const std::byte* panel,
                             std::int64_t steps, bool accumulate, float* accumulators,
                             Prefetcher& prefetch) {
  if constexpr (R > 1) {
    if (num_rows < R) {
      multiply_at_most<D, R - 1>(num_rows, rows, panel, steps, accumulate, accumulators, prefetch);
      return;
    }
  }
  multiply_panel<D, R>(rows, panel, steps, accumulate, accumulators, prefetch);
}

/// The row that begins a block of a job's rows. Blocks are about equally large (8 rows are 4 + 4,
/// not 6 + 2), or full but for the last, where a dot product asks for that.
template <class D>
inline std::int64_t begin_of_block(std::int64_t block, std::int64_t blocks, int block_rows,
                                   std::int64_t num_rows) {
  if constexpr (FillsBlocks<D>) {
    return block < blocks ? block * block_rows : num_rows;
  } else {
    return num_rows * block / blocks;
  }
}

template <class D>
inline void multiply_panel_rows(int num_rows, const std::byte* const* rows, const std::byte* panel,
                                std::int64_t steps, bool accumulate, float* accumulators,
                                Prefetcher& prefetch) {
  multiply_at_most<D, D::kRows>(num_rows, rows, panel, steps, accumulate, accumulators, prefetch);
}

/// All rows of a job x one tile, in panels, so that the rows and the weights of a panel fit the L2
/// together; with few rows, the L1. Accumulators are kept in scratch between panels.
template <PanelDot D, class Decoder>
void multiply_tile(const TileJob& job, int tile) {
  constexpr int kRows = D::kRows;
  const std::byte* stream = job.tiles + tile * job.tile_bytes;
  const std::int64_t steps = job.k / D::kPerStep;
  // Panels are made about equally large.
  std::int64_t unit = D::kStepsPerGroup;
  if constexpr (CutsPanels<D>) unit = D::panel_unit(steps);
  constexpr Tuning kTuning = D::Simd::kTuning;
  const std::int64_t at_most =
      job.num_rows <= kTuning.few_rows ? kTuning.few_rows_panel_steps : kPanelSteps;
  const std::int64_t panels = (steps + at_most - 1) / at_most;
  const std::int64_t blocks = (job.num_rows + kRows - 1) / kRows;
  auto* carried = reinterpret_cast<float*>(job.scratch + kAccumulatorsOffset);
  Prefetcher prefetch(tile == job.num_tiles - 1 ? job.prefetch : nullptr, job.prefetch_bytes,
                      blocks * D::kPasses * steps);
  Decoder decoder(stream, job.format);
  std::int64_t begin = 0;
  for (std::int64_t index = 0; index < panels; ++index) {
    const std::int64_t stop = steps / unit * (index + 1) / panels * unit;
    const std::int64_t count = stop - begin;
    const std::byte* panel = decoder.panel(begin, count, job.scratch);
    std::int64_t row = 0;
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t end = begin_of_block<D>(block + 1, blocks, kRows, job.num_rows);
      const std::byte* rows[kRows];
      for (std::int64_t r = row; r < end; ++r) rows[r - row] = row_pointer(job, r) + begin * 4;
      float* accumulators = carried + row * kTileColumns;
      D::multiply_block(static_cast<int>(end - row), rows, panel, count, begin > 0, accumulators,
                        prefetch);
      if (stop == steps) {
        for (std::int64_t r = row; r < end; ++r) {
          float* const of_row = carried + r * kTileColumns;
          if constexpr (EndsRows<D>) D::to_floats(job, r, of_row);
          store_row<D>(job, tile, r, of_row);
        }
      }
      row = end;
    }
    begin = stop;
  }
}

template <PanelDot D, class Decoder>
void multiply(const TileJob& job) {
  for (int tile = 0; tile < job.num_tiles; ++tile) multiply_tile<D, Decoder>(job, tile);
}

// ---- fp32 dot products --------------------------------------------------------------------------

template <class S>
struct DotF32 {
  using Simd = S;
  using B = typename S::F;
  static constexpr Compute kCompute = Compute::kF32;
  static constexpr int kPerStep = 1;
  static constexpr int kStepsPerGroup = kGroup;
  static constexpr int kRows = S::kTuning.rows;
  static constexpr int kPasses = kTileColumns / (S::kTuning.vectors * S::kWidth);
  static constexpr auto multiply_block = multiply_panel_rows<DotF32>;

  static B load_b(const std::byte* p) { return S::load(reinterpret_cast<const float*>(p)); }
  static B broadcast(const std::byte* p) {
    float value;
    std::memcpy(&value, p, 4);
    return S::set1(value);
  }
  static typename S::F dot(typename S::F acc, B b, B a) { return S::fma(b, a, acc); }
  static constexpr auto store_element = store_rounded<S>;

  using Acc = typename S::F;
  static Acc zero() { return S::set1(0.0f); }
  static Acc initial(typename S::F value) { return value; }
  static typename S::F to_float(Acc acc) { return acc; }
  static void store_b(std::byte* p, B value) { S::store(reinterpret_cast<float*>(p), value); }
};

/// A stream that needs no decoding.
struct Undecoded {
  Undecoded(const std::byte* stream, const TileFormat&) : stream_(stream) {}
  const std::byte* panel(std::int64_t begin, std::int64_t, std::byte*) {
    return stream_ + begin * kStepBytes;
  }

 private:
  const std::byte* stream_;
};

/// Decodes one block to the steps of a panel, vector by vector.
template <Dot D, CodecOf<D> Codec>
inline void decode_block(const Codec& codec, const std::byte* block, const std::byte* header,
                         std::byte* target) {
  constexpr int kW = D::Simd::kWidth;
#pragma GCC unroll 4
  for (int v = 0; v < kTileColumns / kW; ++v) {
    typename D::B steps[Codec::kSteps];
    codec.decode(block, header, v, steps);
#pragma GCC unroll 8
    for (int j = 0; j < Codec::kSteps; ++j)
      D::store_b(target + j * kStepBytes + 4 * kW * v, steps[j]);
  }
}

/// Panels whose weights are exactly what the codec decodes: the stream has no scales, or they are
/// the codec's affair.
template <Dot D, CodecOf<D> Codec>
class CodecPanels {
 public:
  CodecPanels(const std::byte* stream, const TileFormat& format)
      : stream_(stream), format_(format), codec_(format) {}

  const std::byte* panel(std::int64_t begin, std::int64_t count, std::byte* scratch) const {
    const bool grouped = format_.group > 0;
    for (std::int64_t step = begin; step < begin + count; step += Codec::kSteps) {
      const std::int64_t k = step * D::kPerStep, group = grouped ? k / format_.group : 0;
      const std::byte* header = stream_ + (grouped ? group * format_.group_bytes() : 0);
      const std::byte* blocks = header + (grouped ? format_.header_bytes() : 0);
      const std::int64_t in_group = k - group * format_.group;
      decode_block<D>(codec_, blocks + in_group / Codec::kK * kStepBytes, header,
                      scratch + (step - begin) * kStepBytes);
    }
    return scratch;
  }

 private:
  const std::byte* stream_;
  const TileFormat format_;
  Codec codec_;
};

/// Panels of MXFP4 or NVFP4 (`Scales`) with the scales multiplied in, which is exact: a weight then
/// has at most 2 or 6 significant bits. The codec is for fp32.
template <Dot D, CodecOf<DotF32<typename D::Simd>> Codec,
          class Scales = Mxfp4Scales<typename D::Simd>>
class ScaledPanels {
 public:
  ScaledPanels(const std::byte* stream, const TileFormat& format)
      : groups_(stream + Scales::kHeaderBytes), scales_(stream), codec_(format) {}

  const std::byte* panel(std::int64_t begin, std::int64_t count, std::byte* scratch) {
    constexpr std::int64_t kSteps = Scales::kGroupK / D::kPerStep;  // of a group
    constexpr std::int64_t kBlocks = Scales::kGroupK / Codec::kK;
    constexpr std::int64_t kGroupBytes = kTileColumns + kBlocks * kStepBytes;
    std::byte* target = scratch;
    for (std::int64_t g = begin / kSteps; g < (begin + count) / kSteps; ++g) {
      const std::byte* group = groups_ + g * kGroupBytes;
      scales_.advance(group);
      for (int q = 0; q < kBlocks; ++q, target += Codec::kK / D::kPerStep * kStepBytes) {
#pragma GCC unroll 4
        for (int v = 0; v < kTileColumns / S::kWidth; ++v) {
          decode(group + kTileColumns + q * kStepBytes, v, target + 4 * S::kWidth * v);
        }
      }
    }
    return scratch;
  }

 private:
  using S = typename D::Simd;

  void decode(const std::byte* block, int v, std::byte* target) const {
    typename S::F values[Codec::kSteps];
    codec_.decode(block, nullptr, v, values);
    const auto scale = scales_.scale(v);
#pragma GCC unroll 8
    for (int j = 0; j < Codec::kSteps; j += D::kPerStep, target += kStepBytes) {
      if constexpr (D::kPerStep == 1) {
        D::store_b(target, values[j] * scale);
      } else {
        D::store_b(target, (typename D::B)join_pairs<S>(values[j] * scale, values[j + 1] * scale));
      }
    }
  }

  const std::byte* groups_;
  Scales scales_;
  Codec codec_;
};

// ---- Peak rate ----------------------------------------------------------------------------------

/// As many accumulators, rows and weights as a panel kernel has. Operands are loaded anew in each
/// round: else the compiler makes products only once where a dot product is a multiplication and an
/// addition.
template <Dot D>
double flops(std::int64_t rounds) {
  using S = typename D::Simd;
  constexpr int kRows = S::kTuning.rows, kVectors = S::kTuning.vectors;
  typename D::Acc acc[kRows][kVectors];
  alignas(64) std::byte zeros[kStepBytes] = {};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) acc[r][v] = D::initial(S::set1(static_cast<float>(r + v)));
  }
  for (std::int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : : "r"(zeros) : "memory");  // may have changed, as the compiler sees it
    typename D::B weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) weights[v] = D::load_b(zeros + 4 * S::kWidth * v);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto a = D::broadcast(zeros + 4 * r);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = D::dot(acc[r][v], weights[v], a);
    }
  }
  auto sum = S::set1(0.0f);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum = sum + D::to_float(acc[r][v]);
  }
  alignas(64) float lanes[S::kWidth];
  S::store(lanes, sum);
  [[maybe_unused]] volatile float kept = lanes[0];  // the work must not be optimised away
  return 2.0 * kRows * kVectors * S::kWidth * D::kPerStep * static_cast<double>(rounds);
}

}  // namespace
}  // namespace fusedmoe::cpu
