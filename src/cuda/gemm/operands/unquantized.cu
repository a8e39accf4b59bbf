// Packing and unpacking of bf16 and f16 weights, and their rows of the table of formats.
#include "cuda/gemm/operands/unquantized.cuh"

#include <cstring>

#include "cuda/device/launch.h"
#include "cuda/gemm/operands/formats.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kPackThreads = 128;
constexpr int kChunk = 8;  // elements in 16 bytes
constexpr int kBlockK = Bf16Operands::kBlockK;
static_assert(F16Operands::kBlockK == kBlockK);

/// A thread block is a packed block; a thread writes 16 bytes at a time.
__global__ void pack_kernel(const PackSource s, const BlockGrid grid, uint4* blocks) {
  const std::int64_t block = blockIdx.x;
  const std::int64_t row_block = block / grid.k_blocks, k_block = block % grid.k_blocks;
  constexpr int kChunks = kBlockRows * kBlockK / kChunk;
  const auto* values = static_cast<const std::uint16_t*>(s.values);
  for (int i = threadIdx.x; i < kChunks; i += kPackThreads) {
    const int row = i / 8;
    const int chunk = (i % 8) ^ (row % 8);
    const std::int64_t from = s.source_row(row_block * kBlockRows + row);
    const std::int64_t first = k_block * kBlockK + chunk * kChunk;
    std::uint32_t words[4] = {};
    for (int e = 0; e < kChunk; ++e) {
      if (from < 0 || first + e >= s.k) continue;
      words[e / 2] |= static_cast<std::uint32_t>(values[from * s.k + first + e]) << (e % 2 * 16);
    }
    blocks[block * kChunks + i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

void pack(const PackSource& source, const BlockGrid& grid, void* blocks, const Stream& stream) {
  launch(pack_kernel, dim3(static_cast<unsigned>(grid.count())), dim3(kPackThreads), 0,
         static_cast<cudaStream_t>(stream.handle), false, source, grid,
         static_cast<uint4*>(blocks));
}

void unpack_row(const PackedView& source, std::int64_t row, void* values, std::uint8_t*) {
  constexpr std::int64_t kBytes = sizeof(std::uint16_t);
  const std::int64_t r = row % kBlockRows;
  for (std::int64_t k = 0; k < source.k; k += kChunk) {
    const std::int64_t chunk = k % kBlockK / kChunk ^ r % 8;
    const std::int64_t block = row / kBlockRows * source.k_blocks + k / kBlockK;
    std::memcpy(static_cast<std::byte*>(values) + kBytes * k,
                source.blocks + block * Bf16Operands::kBlock.bytes +
                    kBytes * (r * kBlockK + chunk * kChunk),
                static_cast<std::size_t>(kBytes * std::min<std::int64_t>(kChunk, source.k - k)));
  }
}

int no_shift(const WeightMatrix&, const WeightMatrix*) {
  return 0;
}

template <typename Operands>
WeightFormat make_format() {
  WeightFormat format = format_of<Operands>();
  format.scheme = schemes::unquantized(Operands::kRowDType);
  format.values = Operands::kRowDType;
  format.exponent_shift = no_shift;
  format.pack = pack;
  format.unpack_row = unpack_row;
  return format;
}

}  // namespace

WeightFormat bf16_format() {
  return make_format<Bf16Operands>();
}
WeightFormat f16_format() {
  return make_format<F16Operands>();
}

}  // namespace fusedmoe::cuda
