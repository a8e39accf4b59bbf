// Products with AMX's tile registers. A tile has 16 rows of 64 bytes. A step is 4 bytes of k: two
// bf16 values or four 8-bit integers. One instruction multiplies 16 rows of activations by 16
// columns of weights, over 16 steps, and adds the products to 16 x 16 accumulators. Included by
// isa_amx.cpp only.
#pragma once

#include "cpu/kernels/bf16_avx512.h"
#include "cpu/kernels/dot_int8.h"

namespace fusedmoe::cpu {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileWidth = 16;  // columns
constexpr int kVectorBytes = 64;
constexpr int kHalfColumns = 2 * kTileWidth;
constexpr int kStrips = kTileColumns / kTileWidth;

/// Shapes of the eight tile registers of a thread: 0-3 accumulators, 4-5 rows, 6-7 weights. Setting
/// them takes as long as ten products, so a job sets them only when they change.
class TileConfig {
 public:
  /// Registers 0, 1 and 4 have `low` rows; 2, 3 and 5 have `high` rows. A tile of activations has
  /// `steps` steps, one of weights as many rows.
  void set(int low, int high, int steps = kTileRows) {
    if (low == low_ && high == high_ && steps == steps_) return;
    low_ = low;
    high_ = high;
    steps_ = steps;
    alignas(64) struct {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } config;
    const int rows[8] = {low, low, high, high, low, high, steps, steps};
    for (int tile = 0; tile < 8; ++tile) {
      const int bytes = tile == 4 || tile == 5 ? 4 * steps : kVectorBytes;
      config.row_bytes[tile] = static_cast<std::uint16_t>(rows[tile] ? bytes : 0);
      config.rows[tile] = static_cast<std::uint8_t>(rows[tile]);
    }
    // GCC 12's _tile_loadconfig() tells the compiler that only 8 of the 64 bytes are read. So the
    // compiler drops the stores to the other 56, and the processor refuses the shapes. This
    // assembly names all 64.
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  void release() {
    low_ = -1;
    _tile_release();
  }

 private:
  int low_ = -1, high_ = -1, steps_ = -1;
};

thread_local TileConfig tile_config;

/// Gives the tile registers back at the end of a job: the system saves what is in them whenever it
/// interrupts the thread.
struct TileJobScope {
  TileJobScope() = default;
  ~TileJobScope() { tile_config.release(); }
  TileJobScope(const TileJobScope&) = delete;
  TileJobScope& operator=(const TileJobScope&) = delete;
};

// The instructions take the numbers of registers as text, so the intrinsics cannot be in templates.
// load_tile does not tell the compiler that it reads memory. What it reads is written before the
// barrier at the start of a block; the last store_tile, which does tell, keeps later stores behind.

template <int kTile>
inline void load_tile(const void* p, std::int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(row_bytes), "i"(kTile));
}

template <int kTile>
inline void store_tile(void* p, std::int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(row_bytes), "i"(kTile) : "memory");
}

template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

/// Pairs of bf16, added in fp32.
struct TileBf16 {
  template <int kAcc, int kRows, int kWeights>
  static void add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kAcc), "i"(kRows), "i"(kWeights));
  }
};

/// Four signed activations and unsigned weights of 8 bits, added in int32.
struct TileInt8 {
  template <int kAcc, int kRows, int kWeights>
  static void add() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kAcc), "i"(kRows), "i"(kWeights));
  }
};

/// What tile registers do in the place of a dot product D: at most 32 rows, 32 columns at a time,
/// so 2 x 2 tiles of accumulators. All rows are as far apart as the first two. `Products` is the
/// instruction.
template <Dot D, class Products>
struct DotTiles : D {
  using Acc = typename D::Acc;
  static constexpr int kRows = 2 * kTileRows;
  static constexpr int kPasses = kTileColumns / kHalfColumns;
  static constexpr int kStepsPerGroup = kTileRows;
  static constexpr bool kFullBlocks = true;

  /// The steps of a tile; it has fewer only where the inner size asks for it.
  static int steps_of_tile(std::int64_t steps) { return steps % kTileRows == 0 ? kTileRows : 8; }

  /// For multiply.h.
  static void multiply_block(int num_rows, const std::byte* const* rows, const std::byte* panel,
                             std::int64_t steps, bool accumulate, float* accumulators,
                             Prefetcher& prefetch) {
    const std::int64_t stride = num_rows > 1 ? rows[1] - rows[0] : 0;
    const int low = num_rows < kTileRows ? num_rows : kTileRows;
    const int tile_steps = steps_of_tile(steps);
    tile_config.set(low, num_rows - low, tile_steps);
    asm volatile("" ::: "memory");  // what was decoded is in memory
    for (int half = 0; half < kPasses; ++half) {
      const std::byte* weights = panel + half * kHalfColumns * 4;
      float* const target = accumulators + half * kHalfColumns;
      const auto multiply = [&]<bool kHigh>() {
        accumulate ? load_accumulators<kHigh>(target) : zero_accumulators<kHigh>();
        for (std::int64_t step = 0; step < steps; step += tile_steps) {
          prefetch(tile_steps);
          add_step<kHigh>(rows[0] + step * 4, stride, weights + step * kStepBytes);
        }
        store_accumulators<kHigh>(reinterpret_cast<std::byte*>(target), kStepBytes);
      };
      num_rows > kTileRows ? multiply.template operator()<true>()
                           : multiply.template operator()<false>();
    }
  }

  // For multiply_groups.h: at most 16 rows, 16 columns at a time, whose totals stay in registers.
  struct Groups {
    static constexpr int kRows = kTileRows, kPasses = 1;
    static constexpr std::int64_t kPanelSteps = 128;
  };

  static void multiply_groups(int num_rows, const GroupRow* rows, const GroupPanel& panel,
                              int group_shift, float* totals, Prefetcher& prefetch) {
    // Groups have 16 bf16 elements or more, 8 steps; so has a short last group of 8-bit integers.
    const int steps = steps_of_tile(panel.steps | panel.last_steps);
    tile_config.set(num_rows, num_rows, steps);
    asm volatile("" ::: "memory");  // what was decoded is in memory
    const GroupBlock block{num_rows, rows, panel, group_shift, totals, steps};
    if (rows[0].initial) {
      rows[0].scales ? multiply_strips<true, true>(block, prefetch)
                     : multiply_strips<true, false>(block, prefetch);
    } else {
      rows[0].scales ? multiply_strips<false, true>(block, prefetch)
                     : multiply_strips<false, false>(block, prefetch);
    }
  }

 private:
  using S = typename D::Simd;

  template <bool kHigh>
  static void zero_accumulators() {
    zero_tile<0>();
    zero_tile<1>();
    if constexpr (kHigh) {
      zero_tile<2>();
      zero_tile<3>();
    }
  }

  template <bool kHigh>
  static void load_accumulators(const float* accumulators) {
    const float* lower = accumulators + kTileRows * kTileColumns;
    load_tile<0>(accumulators, kStepBytes);
    load_tile<1>(accumulators + kTileWidth, kStepBytes);
    if constexpr (kHigh) {
      load_tile<2>(lower, kStepBytes);
      load_tile<3>(lower + kTileWidth, kStepBytes);
    }
  }

  template <bool kHigh>
  static void store_accumulators(std::byte* accumulators, std::int64_t row_bytes) {
    std::byte* const lower = accumulators + kTileRows * row_bytes;
    store_tile<0>(accumulators, row_bytes);
    store_tile<1>(accumulators + kVectorBytes, row_bytes);
    if constexpr (kHigh) {
      store_tile<2>(lower, row_bytes);
      store_tile<3>(lower + kVectorBytes, row_bytes);
    }
  }

  /// The products of as many steps as a tile has.
  template <bool kHigh>
  static void add_step(const std::byte* rows, std::int64_t stride, const std::byte* weights) {
    load_tile<4>(rows, stride);
    load_tile<6>(weights, kStepBytes);
    load_tile<7>(weights + kVectorBytes, kStepBytes);
    Products::template add<0, 4, 6>();
    Products::template add<1, 4, 7>();
    if constexpr (kHigh) {
      load_tile<5>(rows + kTileRows * stride, stride);
      Products::template add<2, 5, 6>();
      Products::template add<3, 5, 7>();
    }
  }

  static constexpr int kUnderWay = 4;  // groups under way
  struct GroupBlock {
    int num_rows;
    const GroupRow* rows;
    const GroupPanel& panel;
    int group_shift;
    float* totals;
    int steps;  // of a tile
  };

  /// The products of one group, to register kAcc.
  template <int kAcc>
  static void add_products(const std::byte* rows, std::int64_t stride, const std::byte* weights,
                           std::int64_t group_steps, int steps) {
    zero_tile<kAcc>();
    for (std::int64_t step = 0; step < group_steps; step += steps) {
      load_tile<4>(rows + step * 4, stride);
      load_tile<6>(weights + step * kStepBytes, kStepBytes);
      Products::template add<kAcc, 4, 6>();
    }
  }

  /// Calls the function whose template argument is `number`.
  template <class Function>
  [[gnu::always_inline]] static void with_register(std::int64_t number, Function function) {
    switch (number % kUnderWay) {
      case 0:
        return function.template operator()<0>();
      case 1:
        return function.template operator()<1>();
      case 2:
        return function.template operator()<2>();
      default:
        return function.template operator()<3>();
    }
  }

  /// A strip has 16 columns. A processor takes tile instructions in order, and storing a tile waits
  /// some 50 cycles for its last products. So four groups are under way, each in a register of its
  /// own, of one strip or of two. Rows behind the last one are computed too, from zeros, and not
  /// stored.
  template <bool kInitial, bool kScales>
  static void multiply_strips(const GroupBlock& block, Prefetcher& prefetch) {
    const GroupPanel& panel = block.panel;
    const std::byte* const elements = block.rows[0].elements + panel.row_offset;
    const std::int64_t stride =
        block.num_rows > 1 ? block.rows[1].elements - block.rows[0].elements : 0;
    const float *initial[kTileRows], *scales[kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const int row = r < block.num_rows ? r : 0;
      initial[r] = kInitial ? block.rows[row].initial + panel.first : nullptr;
      scales[r] = kScales ? block.rows[row].scales : nullptr;
    }
    alignas(64) std::byte accumulators[kTileRows * kVectorBytes] = {};
    typename S::F total[kTileRows] = {};
    const std::int64_t count = panel.count * kStrips;
    std::int64_t next_group = 0, g = 0;
    int next_column = 0, column = 0;
    for (std::int64_t next = 0; next < count + kUnderWay - 1; ++next) {
      if (next < count) {
        const std::int64_t steps = next_group + 1 == panel.count ? panel.last_steps : panel.steps;
        prefetch(steps / kStrips);
        const std::byte* rows = elements + next_group * panel.steps * 4;
        const std::byte* weights =
            panel.data + next_group * panel.steps * kStepBytes + next_column * 4;
        with_register(
            next, [&]<int kAcc>() __attribute__((always_inline)) {
              add_products<kAcc>(rows, stride, weights, steps, block.steps);
            });
        if (++next_group == panel.count) {
          next_group = 0;
          next_column += kTileWidth;
        }
      }
      if (next < kUnderWay - 1) continue;
      with_register(
          next + 1, [&]<int kAcc>() __attribute__((always_inline)) {
            store_tile<kAcc>(accumulators, kVectorBytes);
          });
      float* const totals = block.totals + column;
      if (g == 0) {
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) {
          total[r] = S::load(totals + (r < block.num_rows ? r : 0) * kTileColumns);
        }
      }
      const auto scale = S::load(panel.scales + g * kTileColumns + column);
      const auto zeros =
          kInitial && panel.zeros ? S::load(panel.zeros + g * kTileColumns + column) : S::set1(1);
      const std::int64_t row_group = (panel.first + g) >> block.group_shift;
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        Acc acc;
        std::memcpy(&acc, accumulators + r * kVectorBytes, sizeof acc);
        if constexpr (kInitial) acc = acc + D::initial(S::set1(initial[r][g]) * zeros);
        auto factor = scale;
        if constexpr (kScales) factor = factor * S::set1(scales[r][row_group]);
        total[r] = S::fma(D::to_float(acc), factor, total[r]);
      }
      if (++g < panel.count) continue;
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        if (r < block.num_rows) S::store(totals + r * kTileColumns, total[r]);
      }
      g = 0;
      column += kTileWidth;
    }
  }
};

}  // namespace
}  // namespace fusedmoe::cpu
