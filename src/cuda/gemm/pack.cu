#include "cuda/gemm/pack.h"

#include "cuda/device/launch.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 128;

/// The source row of a packed row; -1 for padding.
__device__ std::int64_t source_row(const PackSource& s, std::int64_t row) {
  if (!s.gated) return row < s.width ? row : -1;
  const std::int64_t feature = gated_feature(row);
  if (feature >= s.width) return -1;
  return gated_is_up(row) ? s.width + feature : feature;
}

/// A block is a record; a thread writes 16 bytes at a time.
__global__ void pack_plain_kernel(const PackSource s, const RecordGrid grid, uint4* records) {
  const std::int64_t record = blockIdx.x;
  const std::int64_t row_block = record / grid.k_blocks, k_block = record % grid.k_blocks;
  constexpr int kChunks = kRecordRows * kRecordK / 8;
  const auto* values = static_cast<const std::uint16_t*>(s.values);
  for (int i = threadIdx.x; i < kChunks; i += kThreads) {
    const int row = i / 8;
    const int chunk = (i % 8) ^ (row % 8);
    const std::int64_t from = source_row(s, row_block * kRecordRows + row);
    const std::int64_t first = k_block * kRecordK + chunk * 8;
    std::uint32_t words[4] = {};
    for (int e = 0; e < 8; ++e) {
      if (from < 0 || first + e >= s.k) continue;
      words[e / 2] |= static_cast<std::uint32_t>(values[from * s.k + first + e]) << (e % 2 * 16);
    }
    records[record * kChunks + i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__device__ std::uint32_t code_at(const PackSource& s, std::int64_t row, std::int64_t k) {
  if (row < 0 || k >= s.k) return 0;
  const auto* bytes = static_cast<const std::uint8_t*>(s.values);
  return bytes[row * ((s.k + 1) / 2) + k / 2] >> (k % 2 * 4) & 0xf;
}

/// Adds a code of word `word` of two to their halves at `shift`.
__device__ void spread(std::uint32_t code, int word, int pair, int shift, std::uint32_t* words) {
  const CodeBits bits = code_bits(word, pair);
  const auto add = [&](int from, CodeBit to) {
    words[to.word] |= (code >> from & 1) << (to.bit + shift);
  };
  add(3, bits.sign);
  add(2, bits.exponent_high);
  add(1, bits.exponent_low);
  add(0, bits.mantissa);
}

__device__ std::uint8_t exponent_at(const PackSource& s, std::int64_t row, std::int64_t k) {
  if (row < 0 || k >= s.k) return 1;
  return static_cast<std::uint8_t>(s.scales[row * ((s.k + 31) / 32) + k / 32] + 126 -
                                   s.exponent_shift);
}

/// A block is a record, a thread the 16 bytes of that thread of a warpgroup.
__global__ void pack_mxfp4_kernel(const PackSource s, const RecordGrid grid,
                                  std::uint8_t* records) {
  const std::int64_t record = blockIdx.x;
  const std::int64_t row_block = record / grid.k_blocks, k_block = record % grid.k_blocks;
  std::uint8_t* target = records + record * record_bytes(WeightFormat::kMXFP4);
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const std::int64_t first_row = row_block * kRecordRows + warp * 16 + g;
  const std::int64_t rows[2] = {source_row(s, first_row), source_row(s, first_row + 8)};
  const std::int64_t first_k = k_block * kRecordK;
  std::uint32_t words[4] = {};
  for (int step = 0; step < 4; ++step) {
    for (int pair = 0; pair < 4; ++pair) {
      const std::int64_t k = first_k + step * 16 + q * 2 + pair / 2 * 8;
      std::uint32_t* two_words = words + step / 2 * 2;
      spread(code_at(s, rows[pair % 2], k), step % 2, pair, 0, two_words);
      spread(code_at(s, rows[pair % 2], k + 1), step % 2, pair, 16, two_words);
    }
  }
  reinterpret_cast<uint4*>(target)[threadIdx.x] =
      make_uint4(words[0], words[1], words[2], words[3]);
  // Four threads share g: one byte each.
  target[kMxfp4CodeBytes + (warp * 8 + g) * 4 + q] =
      exponent_at(s, rows[q / 2], first_k + q % 2 * 32);
}

}  // namespace

void pack_records(WeightFormat format, const PackSource& source, void* records,
                  const Stream& stream) {
  const RecordGrid grid = record_grid(source.width, source.k, source.gated);
  const dim3 blocks(static_cast<unsigned>(grid.row_blocks * grid.k_blocks));
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  if (is_decoded(format)) {
    launch(pack_mxfp4_kernel, blocks, dim3(kThreads), 0, handle, false, source, grid,
           static_cast<std::uint8_t*>(records));
  } else {
    launch(pack_plain_kernel, blocks, dim3(kThreads), 0, handle, false, source, grid,
           static_cast<uint4*>(records));
  }
}

}  // namespace fusedmoe::cuda
