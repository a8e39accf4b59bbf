// The CPU's multiply kernels alone: level x format x rows, every level that this machine has in one
// process. Weights are read from memory that no cache holds. A level that is slower than the one
// below it is a fault.
//
//   cpu_kernels_bench --benchmark_filter='avx2/mxfp4.*/rows:1/'
//
// bytes_per_second counts packed weights; with few rows it should come near `read_memory`.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/levels.h"
#include "testing/cases.h"

namespace {

using namespace fusedmoe::cpu;

constexpr std::int64_t kK = 2880;
constexpr std::size_t kBytes = std::size_t{256} << 20;

struct Format {
  const char* name;
  TileFormat tile;
  Compute compute;
};

constexpr Format kFormats[] = {
    {"bf16_bf16", {Codes::kBF16}, Compute::kBF16},
    {"bf16_f32", {Codes::kBF16}, Compute::kF32},
    {"f16_f32", {Codes::kF16}, Compute::kF32},
    {"f32_f32", {Codes::kF32}, Compute::kF32},
    {"mxfp4_bf16", {Codes::kMxfp4}, Compute::kBF16},
    {"mxfp4_f32", {Codes::kMxfp4}, Compute::kF32},
    {"mxfp4_int8", {Codes::kMxfp4}, Compute::kInt8},
    {"mxfp4_int16", {Codes::kMxfp4}, Compute::kInt16},
    {"nvfp4_bf16", {Codes::kE2M1, ScaleType::kE4M3, false, 16}, Compute::kBF16},
    {"nvfp4_f32", {Codes::kE2M1, ScaleType::kE4M3, false, 16}, Compute::kF32},
    {"int4_g32_bf16", {Codes::kInt4, ScaleType::kF16, false, 32}, Compute::kBF16},
    {"int4_g32_f32", {Codes::kInt4, ScaleType::kF16, false, 32}, Compute::kF32},
    {"int4_g32_int8", {Codes::kInt4, ScaleType::kF16, false, 32}, Compute::kInt8},
    {"int4_g32_int16", {Codes::kInt4, ScaleType::kF16, false, 32}, Compute::kInt16},
    {"int4_g128_zeros_f32", {Codes::kInt4, ScaleType::kF16, true, 128}, Compute::kF32},
    {"fp8_channel_bf16", {Codes::kE4M3}, Compute::kBF16},
    {"fp8_channel_f32", {Codes::kE4M3}, Compute::kF32},
    {"fp8_block_f32", {Codes::kE4M3, ScaleType::kF32, false, 128}, Compute::kF32},
    {"mxfp8_f32", {Codes::kE4M3, ScaleType::kE8M0, false, 32}, Compute::kF32},
    {"int8_g128_bf16", {Codes::kInt8, ScaleType::kF16, false, 128}, Compute::kBF16},
    {"int8_g128_f32", {Codes::kInt8, ScaleType::kF16, false, 128}, Compute::kF32},
    {"w8a8_int8", {Codes::kInt8}, Compute::kInt8},
    {"w4a8_bf16", {Codes::kW4A8, ScaleType::kBF16, false, 128}, Compute::kBF16},
    {"w4a8_f32", {Codes::kW4A8, ScaleType::kBF16, false, 128}, Compute::kF32},
};

/// Memory in pages of 2 MiB, as the library's own.
std::byte* allocate(std::size_t bytes) {
  constexpr std::size_t kPage = std::size_t{2} << 20;
  auto* memory =
      static_cast<std::byte*>(std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage));
  madvise(memory, bytes, MADV_HUGEPAGE);
  return memory;
}

/// Random codes with scales of an ordinary size. Floats of 16 and 32 bits are normal numbers, as an
/// Intel core takes many times as long for others.
void fill_tile(const TileFormat& format, std::byte* tile) {
  fusedmoe::testing::Random random(1);
  const bool floats =
      format.codes == Codes::kF32 || format.codes == Codes::kBF16 || format.codes == Codes::kF16;
  for (std::int64_t i = 0; i < format.tile_bytes(kK); ++i) {
    tile[i] = static_cast<std::byte>(floats ? 0x30 + random.below(16) : random.below(64));
  }
  if (format.codes == Codes::kMxfp4) {
    std::memset(tile, 120, kMxfp4HeaderBytes);
    for (std::int64_t g = 0; g < kK / kGroup; ++g) {
      std::memset(tile + kMxfp4HeaderBytes + g * kMxfp4GroupBytes, 127, kTileColumns);
    }
    return;
  }
  for (std::int64_t k = 0; format.group > 0 && k < kK; k += format.group) {
    // 0x28 in every byte is a small normal number in each type of scale.
    std::memset(tile, 0x28, static_cast<std::size_t>(format.header_bytes()));
    tile += format.header_bytes() + format.code_bytes(std::min(format.group, kK - k));
  }
}

/// The weights of one format: as many equal tiles as fit.
struct Weights {
  std::byte* tiles = allocate(kBytes);
  std::int64_t tile_bytes = 0, num_tiles = 0;
  const Format* format = nullptr;

  void hold(const Format& wanted) {
    if (format == &wanted) return;
    format = &wanted;
    tile_bytes = wanted.tile.tile_bytes(kK);
    num_tiles = static_cast<std::int64_t>(kBytes) / tile_bytes;
    std::vector<std::byte> tile(static_cast<std::size_t>(tile_bytes));
    fill_tile(wanted.tile, tile.data());
    for (std::int64_t t = 0; t < num_tiles; ++t) {
      std::memcpy(tiles + t * tile_bytes, tile.data(), tile.size());
    }
  }
};

Weights& weights() {
  static Weights all;
  return all;
}

/// Rows of ones.
const std::byte* ones(Compute compute) {
  constexpr std::uint32_t kOnes[] = {0x3F800000, 0x3F803F80, 0x01010101};
  static std::byte* memory = allocate(kMaxRows * kK * 4);
  auto* words = reinterpret_cast<std::uint32_t*>(memory);
  std::fill_n(words, kMaxRows * kK, kOnes[static_cast<int>(compute)]);
  return memory;
}

void multiply(benchmark::State& state, const Kernels& kernels, const Format& format) {
  static const std::byte* rows = nullptr;
  if (state.thread_index() == 0) {
    weights().hold(format);
    rows = ones(format.compute);
  }
  std::vector<float> initial(kMaxRows * 512, 1.0f);
  std::vector<std::byte> output(kMaxRows * kMaxTiles * kStepBytes);
  std::byte* scratch = allocate(kScratchBytes);
  const Epilogue none;
  TileJob job;
  job.num_rows = state.range(0);
  job.num_tiles = job.num_rows <= 2 ? kMaxTiles : 1;
  job.k = kK;
  job.row_bytes = kK * 4;
  job.format = format.tile;
  job.epilogue = &none;
  job.output = output.data();
  job.output_bytes = kMaxTiles * kStepBytes;
  job.scratch = scratch;
  if (format.tile.zeros || format.compute == Compute::kInt8) {
    job.row_scales.initial = initial.data();
    job.row_scales.num_initial = 512;
  }
  const auto kernel =
      kernels.multiply[static_cast<int>(format.tile.codes)][static_cast<int>(format.compute)];
  std::int64_t tile = 0, tiles = 0, begin = 0, end = 0;
  for (auto _ : state) {
    if (end == 0) {  // behind the barrier at the loop's start: the weights are there
      begin = weights().num_tiles * state.thread_index() / state.threads();
      end = weights().num_tiles * (state.thread_index() + 1) / state.threads();
      tile = begin;
      job.tile_bytes = weights().tile_bytes;
      job.rows = rows;
    }
    job.tiles = weights().tiles + tile * job.tile_bytes;
    tile += job.num_tiles;
    if (tile + job.num_tiles > end) tile = begin;
    job.prefetch = weights().tiles + tile * job.tile_bytes;  // as in a layer
    job.prefetch_bytes = job.num_tiles * job.tile_bytes;
    kernel(job);
    tiles += job.num_tiles;
  }
  std::free(scratch);
  state.SetBytesProcessed(tiles * job.tile_bytes);
  state.counters["FLOP/s"] =
      benchmark::Counter(2.0 * static_cast<double>(tiles * kTileColumns * kK * job.num_rows),
                         benchmark::Counter::kIsRate);
}

/// The same memory, read and added up.
void read_memory(benchmark::State& state) {
  using Line = std::uint64_t __attribute__((vector_size(64)));
  if (state.thread_index() == 0) weights().hold(kFormats[0]);
  constexpr std::int64_t kChunk = 65536 / sizeof(Line);
  const auto lines = static_cast<std::int64_t>(kBytes / sizeof(Line)) / state.threads();
  Line sums[4] = {};
  std::int64_t line = 0, chunks = 0;
  for (auto _ : state) {
    if (line + kChunk > lines) line = 0;
    const auto* at =
        reinterpret_cast<const Line*>(weights().tiles) + lines * state.thread_index() + line;
    for (std::int64_t i = 0; i < kChunk; i += 4) {
      for (int j = 0; j < 4; ++j) sums[j] ^= at[i + j];
    }
    line += kChunk;
    ++chunks;
  }
  benchmark::DoNotOptimize(sums);
  state.SetBytesProcessed(chunks * 65536);
}

void add(const std::string& name, auto function, auto configure) {
  const auto threads = static_cast<int>(std::thread::hardware_concurrency());
  configure(benchmark::RegisterBenchmark(name.c_str(), function)->Threads(threads)->UseRealTime());
}

}  // namespace

int main(int argc, char** argv) {
  add("read_memory", read_memory, [](auto*) {});
  for (const Format& format : kFormats) {
    for (const Kernels* level : levels()) {
      if (!level->multiply[static_cast<int>(format.tile.codes)][static_cast<int>(format.compute)]) {
        continue;
      }
      add(
          std::string(level->name) + "/" + format.name,
          [level, &format](benchmark::State& state) { multiply(state, *level, format); },
          [](auto* benchmark) {
            benchmark->ArgName("rows");
            for (int rows : {1, 2, 4, 8, 16, 192}) benchmark->Arg(rows);
          });
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
