// Kernels for AMX: tile registers of 16 rows x 64 bytes, bf16 products, fp32 accumulators.
// Weights without a tile kernel are multiplied in fp32: where there are tile registers, vdpbf16ps
// is slower than two fp32 products.
//
// Bits: tdpbf16ps adds up 16 pairs before it adds them to the accumulator, so results are rounded
// differently from vdpbf16ps, which is faster for few rows. So a row's bits depend on the number of
// its expert's rows, unless `batch_invariant` asks for tile registers whatever the number.
#include "cpu/dot_bf16.h"

namespace fusedmoe::cpu {
namespace {

constexpr int kTileRows = 16;
constexpr int kVectorBytes = 64;  // of a panel: 16 columns

/// Shapes of the eight tile registers: 0-3 accumulators, 4-5 rows, 6-7 weights.
class TileConfig {
 public:
  /// Registers 0, 1 and 4 have `low` rows; 2, 3 and 5 have `high` rows.
  TileConfig(int low, int high) {
    alignas(64) struct {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } config;
    const int rows[8] = {low, low, high, high, low, high, kTileRows, kTileRows};
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = static_cast<std::uint16_t>(rows[tile] ? kVectorBytes : 0);
      config.rows[tile] = static_cast<std::uint8_t>(rows[tile]);
    }
    // Assembly, as GCC 12's _tile_loadconfig() tells the compiler that it reads 8 of the 64 bytes.
    // The compiler then drops the stores to the other 56, and the processor refuses the shapes.
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileConfig() { _tile_release(); }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
};

struct DotAmx : DotBf16 {
  static constexpr int kRows = 2 * kTileRows;
  static constexpr int kPasses = 2;

  /// At most 32 rows x 64 columns, 32 columns at a time: 2 x 2 tiles of accumulators. All rows are
  /// as far apart as the first two.
  static void multiply_block(int num_rows, const std::byte* const* rows, const std::byte* panel,
                             std::int64_t steps, bool accumulate, float* accumulators,
                             Prefetcher& prefetch) {
    const int low = num_rows < kTileRows ? num_rows : kTileRows, high = num_rows - low;
    const std::int64_t stride = num_rows > 1 ? rows[1] - rows[0] : 0;
    const TileConfig config(low, high);
    // GCC's tile intrinsics do not say that they read and write memory.
    asm volatile("" ::: "memory");
    for (int half = 0; half < 2; ++half) {
      float* left = accumulators + half * kTileColumns / 2;
      high ? multiply_half<true>(rows[0], stride, panel, steps, accumulate, left, half, prefetch)
           : multiply_half<false>(rows[0], stride, panel, steps, accumulate, left, half, prefetch);
    }
    asm volatile("" ::: "memory");
  }

 private:
  template <bool kHigh>
  static void multiply_half(const std::byte* rows, std::int64_t stride, const std::byte* panel,
                            std::int64_t steps, bool accumulate, float* left, int half,
                            Prefetcher& prefetch) {
    float* right = left + 16;
    float* lower = left + kTileRows * kTileColumns;
    if (accumulate) {
      _tile_loadd(0, left, kStepBytes);
      _tile_loadd(1, right, kStepBytes);
      if constexpr (kHigh) {
        _tile_loadd(2, lower, kStepBytes);
        _tile_loadd(3, lower + 16, kStepBytes);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (kHigh) {
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    const std::byte* weights = panel + half * 2 * kVectorBytes;
    for (std::int64_t step = 0; step < steps; step += kStepsPerGroup) {
      prefetch(kStepsPerGroup);
      _tile_loadd(4, rows + step * 4, stride);
      _tile_loadd(6, weights + step * kStepBytes, kStepBytes);
      _tile_loadd(7, weights + step * kStepBytes + kVectorBytes, kStepBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kHigh) {
        _tile_loadd(5, rows + kTileRows * stride + step * 4, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, left, kStepBytes);
    _tile_stored(1, right, kStepBytes);
    if constexpr (kHigh) {
      _tile_stored(2, lower, kStepBytes);
      _tile_stored(3, lower + 16, kStepBytes);
    }
  }
};

double amx_flops(std::int64_t rounds) {
  const TileConfig config(kTileRows, kTileRows);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(6);
  for (std::int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 6);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 6);
  }
  return 2.0 * 4 * kTileRows * 16 * kGroup * static_cast<double>(rounds);
}

/// Few rows as `few` computes them, others with tile registers.
template <void (*few)(const TileJob&), class Panels>
void multiply_tiles(const TileJob& job) {
  job.num_rows <= kStreamedRows && !job.batch_invariant ? few(job) : multiply<DotAmx, Panels>(job);
}

/// The AVX-512 kernels, those replaced for which AMX is faster.
Kernels make_kernels() {
  Kernels table = avx512_vnni_kernels();
  constexpr int kBF16 = static_cast<int>(Compute::kBF16);
  const auto set = [&](Codes codes, void (*multiply)(const TileJob&)) {
    table.multiply[static_cast<int>(codes)][kBF16] = multiply;
  };
  table.name = "amx";
  table.contiguous_rows = true;
  using E2m1 = NibblesToBf16<Codes::kE2M1>;
  set(Codes::kBF16, multiply_tiles<multiply_plain<DotBf16, Bf16AsIs, Undecoded>, Undecoded>);
  set(Codes::kMxfp4, multiply_tiles<multiply_chained<DotBf16, E2m1, Mxfp4ToBf16>, Mxfp4ToBf16>);
  set(Codes::kW4A8,
      multiply_tiles<multiply_plain<DotBf16, W4A8ToBf16>, CodecPanels<DotBf16, W4A8ToBf16>>);
  table.convert[kBF16] = convert_to_bf16;
  table.flops[kBF16] = amx_flops;
  return table;
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
