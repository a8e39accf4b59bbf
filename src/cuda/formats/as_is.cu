// Packs and unpacks weights that stay as they are, and makes the FormatKernels of each policy of
// as_is.cuh, fp8_f16.cuh and int8_rows.cuh.
#include "cuda/formats/as_is.cuh"

#include <algorithm>
#include <array>
#include <cstring>

#include "cuda/device/launch.h"
#include "cuda/formats/fp8_f16.cuh"
#include "cuda/formats/int8_rows.cuh"
#include "cuda/formats/policy_kernels.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kPackThreads = 128, kChunk = 16, kRowBytes = 128;

/// A thread block is a packed block; a thread writes 16 bytes at a time. `Unit`: an element's
/// bytes.
template <typename Unit>
__global__ void pack_kernel(const PackSource s, const BlockGrid grid, uint4* blocks) {
  constexpr int kUnits = kChunk / sizeof(Unit), kChunks = kSwizzledBlockBytes / kChunk;
  const std::int64_t block = blockIdx.x;
  const std::int64_t row_block = block / grid.k_blocks, k_block = block % grid.k_blocks;
  const auto* values = static_cast<const Unit*>(s.values);
  for (int i = threadIdx.x; i < kChunks; i += kPackThreads) {
    const int row = i / 8;
    const int chunk = (i % 8) ^ (row % 8);
    const std::int64_t from = s.source_row(row_block * kBlockRows + row);
    const std::int64_t first = k_block * (kRowBytes / sizeof(Unit)) + chunk * kUnits;
    std::uint32_t words[4] = {};
#pragma unroll
    for (int e = 0; e < kUnits; ++e) {
      if (from < 0 || first + e >= s.k) continue;
      const int byte = e * static_cast<int>(sizeof(Unit));
      words[byte / 4] |= static_cast<std::uint32_t>(values[from * s.k + first + e])
                         << (byte % 4 * 8);
    }
    blocks[block * kChunks + i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <typename Unit>
void pack(const PackSource& source, const BlockGrid& grid, void* blocks, const Stream& stream) {
  launch(pack_kernel<Unit>, dim3(static_cast<unsigned>(grid.count())), dim3(kPackThreads), 0,
         static_cast<cudaStream_t>(stream.handle), false, source, grid,
         static_cast<uint4*>(blocks));
}

template <typename Unit>
void unpack_row(const PackedView& source, std::int64_t row, const UnpackedRow& target) {
  const std::int64_t r = row % kBlockRows, bytes = source.k * std::int64_t{sizeof(Unit)};
  for (std::int64_t byte = 0; byte < bytes; byte += kChunk) {
    const std::int64_t chunk = byte % kRowBytes / kChunk ^ r % 8;
    const std::int64_t block = row / kBlockRows * source.k_blocks + byte / kRowBytes;
    std::memcpy(static_cast<std::byte*>(target.values) + byte,
                source.blocks + block * kSwizzledBlockBytes + r * kRowBytes + chunk * kChunk,
                static_cast<std::size_t>(std::min<std::int64_t>(kChunk, bytes - byte)));
  }
}

template <typename Operands, typename Unit>
FormatKernels kernels() {
  FormatKernels result = kernels_from<Operands>();
  result.pack = pack<Unit>;
  result.unpack_row = unpack_row<Unit>;
  return result;
}

}  // namespace

std::span<const FormatKernels> as_is_kernels() {
  static const std::array kAll = {
      kernels<Bf16Operands, std::uint16_t>(),     kernels<F16Operands, std::uint16_t>(),
      kernels<Fp8Operands, std::uint8_t>(),       kernels<Fp8RowOperands, std::uint8_t>(),
      kernels<Fp8F16Operands, std::uint8_t>(),    kernels<Int8RowOperands, std::uint8_t>(),
      kernels<Int8RowF16Operands, std::uint8_t>()};
  return kAll;
}

}  // namespace fusedmoe::cuda
