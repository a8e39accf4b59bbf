// A few rows of MXFP4 weights have the same bits whether tiles are read side by side or one by one.
// Experts read them as the processor prefers (prefers_side_by_side()), so on one machine other
// tests see only one of the two. Only levels of AVX-512 have both.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::cpu_side_by_side_test {

using cpu::Codes, cpu::Compute, cpu::kTileColumns;

constexpr std::int64_t kK = 320;
constexpr int kTiles = 7;  // not a multiple of those side by side

/// Bytes that are small numbers as codes, and scales around 1.
Tensor make_tiles(const cpu::TileFormat& format, testing::Random& random) {
  const Tensor tiles = Tensor::empty({kTiles, format.tile_bytes(kK)}, DType::kU8);
  for (std::int64_t i = 0; i < tiles.numel(); ++i) {
    tiles.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(126 + random.below(4));
  }
  return tiles;
}

TEST(CpuSideBySideTest, GivesTheSameBits) {
  testing::Random random(7);
  const cpu::TileFormat format{Codes::kMxfp4};
  const Tensor tiles = make_tiles(format, random);
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> scratch(cpu::kScratchBytes / sizeof(Line) + 1);
  const cpu::Epilogue none;
  for (const Compute compute : {Compute::kF32, Compute::kBF16}) {
    const auto kernel =
        cpu::kernels().multiply[static_cast<int>(Codes::kMxfp4)][static_cast<int>(compute)];
    ASSERT_TRUE(kernel || compute == Compute::kBF16);
    if (!kernel) continue;  // a level without products of bf16
    const DType dtype = compute == Compute::kBF16 ? DType::kBF16 : DType::kF32;
    for (const std::int64_t num_rows : {1, 2, 3}) {
      const Tensor rows = Tensor::empty({num_rows, kK}, dtype);
      for (std::int64_t i = 0; i < rows.numel(); ++i) {
        store_f32(rows.data(), dtype, i, static_cast<float>(random.below(512)) / 256 - 1);
      }
      const auto multiply = [&](bool side_by_side) {
        const Tensor outputs = Tensor::zeros({num_rows, kTiles * kTileColumns}, DType::kF32);
        cpu::TileJob job;
        job.tiles = tiles.as<std::byte>();
        job.tile_bytes = format.tile_bytes(kK);
        job.num_tiles = kTiles;
        job.k = kK;
        job.rows = rows.as<std::byte>();
        job.row_bytes = bytes(dtype, kK);
        job.num_rows = num_rows;
        job.format = format;
        job.epilogue = &none;
        job.output = outputs.as<std::byte>();
        job.output_bytes = bytes(DType::kF32, kTiles * kTileColumns);
        job.side_by_side = side_by_side;
        job.scratch = scratch.front().bytes;
        kernel(job);
        return outputs;
      };
      const Tensor expected = multiply(false);
      float sum = 0;
      for (std::int64_t i = 0; i < expected.numel(); ++i) sum += expected.as<float>()[i];
      EXPECT_NE(sum, 0);
      EXPECT_TRUE(testing::bitwise_equal(multiply(true), expected))
          << num_rows << " rows of " << name(dtype);
    }
  }
}

}  // namespace fusedmoe::cpu_side_by_side_test
