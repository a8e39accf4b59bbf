// Packs and unpacks weights that stay as they are, and makes the WeightFormat of each policy of
// as_is.cuh and fp8_f16.cuh.
#include "cuda/gemm/operands/as_is.cuh"

#include <algorithm>
#include <cstring>

#include "cuda/device/launch.h"
#include "cuda/gemm/operands/formats.h"
#include "cuda/gemm/operands/fp8_f16.cuh"

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

template <DType kDType>
bool is_unquantized(const QuantKey& key) {
  return key.value == kDType && !key.scale;
}
/// Scales of rows or the tensor.
bool is_fp8_rows(const QuantKey& key) {
  return key.value == DType::kE4M3 && key.scale == DType::kF32 && !key.dynamic &&
         key.group.cols < 0 && (key.group.rows == -1 || key.group.rows == 1);
}
/// Those, or scales of blocks of 128 columns and whole slices of 8 rows.
bool is_fp8(const QuantKey& key) {
  if (key.value != DType::kE4M3 || key.scale != DType::kF32 || key.dynamic) return false;
  return is_fp8_rows(key) || (key.group.cols == Fp8Operands::kBlockK && key.group.rows % 8 == 0);
}

template <typename Operands, typename Unit>
WeightFormat as_is_format(std::string_view name, bool (*holds)(const QuantKey&)) {
  WeightFormat format = format_of<Operands>();
  format.name = name;
  format.holds = holds;
  format.pack = pack<Unit>;
  format.unpack_row = unpack_row<Unit>;
  return format;
}

template <typename Operands>
WeightFormat fp8_format(std::string_view name, bool (*holds)(const QuantKey&)) {
  WeightFormat format = as_is_format<Operands, std::uint8_t>(name, holds);
  format.fp8_rows = true;
  return format;
}

}  // namespace

WeightFormat bf16_format() {
  return as_is_format<Bf16Operands, std::uint16_t>("bf16", is_unquantized<DType::kBF16>);
}
WeightFormat f16_format() {
  return as_is_format<F16Operands, std::uint16_t>("f16", is_unquantized<DType::kF16>);
}
WeightFormat fp8_format() {
  return fp8_format<Fp8Operands>("fp8", is_fp8);
}
WeightFormat fp8_rows_format() {
  return fp8_format<Fp8RowOperands>("fp8_rows", is_fp8_rows);
}
WeightFormat fp8_f16_format() {
  return fp8_format<Fp8F16Operands>("fp8_f16", is_fp8);
}

}  // namespace fusedmoe::cuda
