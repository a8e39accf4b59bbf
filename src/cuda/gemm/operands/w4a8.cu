// Packs and unpacks W4A8 weights, and makes their WeightFormat.
#include "cuda/gemm/operands/w4a8.cuh"

#include <algorithm>
#include <cstring>

#include "cuda/gemm/operands/pack_decoded.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr std::uint32_t kZero = 8;  // the code of 0

/// A thread block is a packed block, a thread the words of that thread of a warpgroup.
__global__ void pack_kernel(const PackSource s, const BlockGrid grid, std::uint8_t* blocks) {
  const std::int64_t block = blockIdx.x;
  const std::int64_t row_block = block / grid.k_blocks;
  const std::int64_t first_k = block % grid.k_blocks * W4a8Block::kK;
  std::uint8_t* target = blocks + block * W4a8Block::kBytes;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, g = thread % 32 / 4, q = thread % 4;
  std::uint32_t words[8] = {};
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = s.source_row(row_block * kBlockRows + warp * 16 + g + half * 8);
#pragma unroll
    for (int column = 0; column < W4a8Block::kK; ++column) {
      const W4a8Block::Place place = W4a8Block::place(column, half);
      if (place.quad != q) continue;
      const std::int64_t k = first_k + column;
      const std::uint32_t code = row >= 0 && k < s.k ? code_at<4>(s, row, k) : kZero;
#pragma unroll
      for (int w = 0; w < 8; ++w) words[w] |= w == place.word ? code << place.bit : 0;
    }
  }
  auto* to = reinterpret_cast<uint4*>(target);
  to[thread] = make_uint4(words[0], words[1], words[2], words[3]);
  to[128 + thread] = make_uint4(words[4], words[5], words[6], words[7]);
  if (thread >= kBlockRows) return;
  const RowInBlock place(thread);
  const std::int64_t row = s.source_row(row_block * kBlockRows + thread);
  const bool inside = row >= 0 && first_k < s.k;
  target[W4a8Block::kCodeBytes + place.pair() * 2 + place.half] =
      inside ? static_cast<const std::uint8_t*>(s.scales)[s.scale_index(row, first_k)] : 0;
}

void pack(const PackSource& source, const BlockGrid& grid, void* blocks, const Stream& stream) {
  launch(pack_kernel, dim3(static_cast<unsigned>(grid.count())), dim3(128), 0,
         static_cast<cudaStream_t>(stream.handle), false, source, grid,
         static_cast<std::uint8_t*>(blocks));
}

void unpack_row(const PackedView& source, std::int64_t row, const UnpackedRow& target) {
  const RowInBlock in_block(row);
  auto* codes = static_cast<std::uint8_t*>(target.values);
  for (std::int64_t k = 0; k < source.k; ++k) {
    const std::byte* block =
        source.blocks +
        (row / kBlockRows * source.k_blocks + k / W4a8Block::kK) * std::int64_t{W4a8Block::kBytes};
    const W4a8Block::Place place =
        W4a8Block::place(static_cast<int>(k % W4a8Block::kK), in_block.half);
    const int thread = in_block.warp * 32 + in_block.group * 4 + place.quad;
    std::uint32_t word;
    std::memcpy(&word, block + place.word / 4 * 2048 + thread * 16 + place.word % 4 * 4,
                sizeof(word));
    const auto code = static_cast<std::uint8_t>(word >> place.bit & 0xF);
    codes[k / 2] = static_cast<std::uint8_t>(k % 2 == 0 ? code : codes[k / 2] | code << 4);
    if (k % W4a8Block::kK != 0) continue;
    const std::int64_t group = (source.first_col + k) / source.group.cols;
    static_cast<std::uint8_t*>(target.scales)[group] = static_cast<std::uint8_t>(
        block[W4a8Block::kCodeBytes + in_block.pair() * 2 + in_block.half]);
  }
}

bool holds(const QuantKey& key) {
  return key == keys::int4_e4m3();
}

}  // namespace

WeightFormat w4a8_format() {
  WeightFormat format = format_of<W4a8Operands>();
  format.name = "w4a8";
  format.holds = holds;
  format.fp8_rows = true;
  format.slot_k = W4a8Block::kK;
  format.block_scales = DType::kE4M3;
  format.pack = pack;
  format.unpack_row = unpack_row;
  return format;
}

}  // namespace fusedmoe::cuda
