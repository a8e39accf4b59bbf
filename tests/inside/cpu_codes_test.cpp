// The kernels decode every 8-bit code of INT8 and E4M3 to its exact value, with fp32 and with bf16
// products. A tile has each code once in each column. Row j of the activations has a one at k = j
// and zeros elsewhere, so its outputs are the weights at k = j. ctest runs this program for every
// level of the machine.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/levels.h"
#include "fusedmoe/tensor.h"
#include "quantize_oracle.h"

namespace fusedmoe::cpu_codes_test {

using cpu::Codes, cpu::Compute, cpu::ScaleType, cpu::kTileColumns;

constexpr std::int64_t kK = 256;  // every code once in each column
constexpr int kZero = 77;         // the zero point of formats that have them

/// The code at (k, column). The codes of NaN are left out: every row multiplies every code, and
/// zero times NaN would make all of its outputs NaN.
std::uint8_t code_at(Codes codes, std::int64_t k, std::int64_t column) {
  const auto code = static_cast<std::uint8_t>(k + column);
  return codes == Codes::kE4M3 && (code & 0x7F) == 0x7F ? 0 : code;
}

float value_at(const cpu::TileFormat& format, std::int64_t k, std::int64_t column) {
  const std::uint8_t code = code_at(format.codes, k, column);
  if (format.codes == Codes::kE4M3) return static_cast<float>(oracle::e4m3_decode(code));
  return static_cast<float>(code - (format.zeros ? kZero : 128));
}

/// Where the code at (k, column) lies in the block of four k: the layout of cpu/kernels.h.
std::int64_t place_in_block(Codes codes, std::int64_t k, std::int64_t column) {
  if (codes == Codes::kInt8) return 4 * column + k % 4;
  return column / 4 * 16 + k % 4 / 2 * 8 + column % 4 * 2 + k % 2;
}

/// The tile with these codes; scales are 1.
Tensor make_tile(const cpu::TileFormat& format) {
  const Tensor tile = Tensor::zeros({format.tile_bytes(kK)}, DType::kU8);
  auto* block = tile.as<std::uint8_t>();
  for (std::int64_t k = 0; k < kK; k += 4, block += cpu::kStepBytes) {
    if (format.group > 0 && k % format.group == 0) {
      const std::vector<float> scales(kTileColumns, 1);
      std::memcpy(block, scales.data(), sizeof(float) * kTileColumns);
      if (format.zeros) std::memset(block + format.scale_bytes(), kZero, kTileColumns);
      block += format.header_bytes();
    }
    for (std::int64_t i = 0; i < 4 * kTileColumns; ++i) {
      const std::int64_t column = i / 4, at = k + i % 4;
      block[place_in_block(format.codes, at, column)] = code_at(format.codes, at, column);
    }
  }
  return tile;
}

Tensor unit_rows(DType dtype) {
  const Tensor rows = Tensor::zeros({kK, kK}, dtype);
  for (std::int64_t j = 0; j < kK; ++j) store_f32(rows.data(), dtype, j * kK + j, 1);
  return rows;
}

/// The outputs (kK, 64) of all rows, in jobs of `num_rows`.
Tensor multiply(void (*kernel)(const cpu::TileJob&), const cpu::TileFormat& format, Compute compute,
                std::int64_t num_rows) {
  const DType dtype = compute == Compute::kBF16 ? DType::kBF16 : DType::kF32;
  const Tensor tile = make_tile(format), rows = unit_rows(dtype);
  const Tensor outputs = Tensor::zeros({kK, kTileColumns}, DType::kF32);
  const std::int64_t num_groups = format.group > 0 ? format.num_groups(kK) : 1;
  const Tensor sums = Tensor::zeros({kK, num_groups}, DType::kF32);  // of a row, over each group
  for (std::int64_t j = 0; j < kK; ++j) {
    sums.as<float>()[j * num_groups + j * num_groups / kK] = 1;
  }
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> scratch(cpu::kScratchBytes / sizeof(Line) + 1);
  const cpu::Epilogue none;
  cpu::TileJob job;
  job.tiles = tile.as<std::byte>();
  job.tile_bytes = tile.nbytes();
  job.k = kK;
  job.row_bytes = bytes(dtype, kK);
  job.num_rows = num_rows;
  job.format = format;
  job.epilogue = &none;
  job.output_bytes = kTileColumns * sizeof(float);
  job.scratch = scratch.front().bytes;
  for (std::int64_t row = 0; row < kK; row += num_rows) {
    job.rows = rows.as<std::byte>() + row * job.row_bytes;
    job.output = outputs.as<std::byte>() + row * job.output_bytes;
    if (format.zeros) {
      job.row_scales.initial = sums.as<float>() + row * num_groups;
      job.row_scales.num_initial = num_groups;
    }
    kernel(job);
  }
  return outputs;
}

TEST(CpuEveryCodeTest, HasItsExactValue) {
  for (const cpu::TileFormat& format : {cpu::TileFormat{Codes::kInt8, ScaleType::kF32, false, 128},
                                        cpu::TileFormat{Codes::kInt8, ScaleType::kF32, true, 128},
                                        cpu::TileFormat{Codes::kE4M3, ScaleType::kF32, false, 128},
                                        cpu::TileFormat{Codes::kE4M3}}) {
    for (const Compute compute : {Compute::kF32, Compute::kBF16}) {
      const auto kernel =
          cpu::kernels().multiply[static_cast<int>(format.codes)][static_cast<int>(compute)];
      ASSERT_TRUE(kernel || compute == Compute::kBF16);
      if (!kernel) continue;                                  // a level without products of bf16
      for (const std::int64_t num_rows : {1, 2, 4, 8, 64}) {  // few rows, and panels
        const Tensor outputs = multiply(kernel, format, compute, num_rows);
        for (std::int64_t i = 0; i < kK * kTileColumns; ++i) {
          const std::int64_t k = i / kTileColumns, column = i % kTileColumns;
          ASSERT_EQ(outputs.as<float>()[i], value_at(format, k, column))
              << (compute == Compute::kBF16 ? "bf16" : "fp32")
              << (format.codes == Codes::kInt8 ? ", INT8" : ", E4M3")
              << (format.zeros ? " with zero points" : "") << ", code "
              << int{code_at(format.codes, k, column)} << ", column " << column << ", " << num_rows
              << " rows a job";
        }
      }
    }
  }
}

}  // namespace fusedmoe::cpu_codes_test
