// Packing and unpacking of MXFP4 weights, and their row of the table of formats.
#include "cuda/gemm/operands/mxfp4.cuh"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "cuda/device/launch.h"
#include "cuda/gemm/operands/formats.h"
#include "fusedmoe/error.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kPackThreads = 128;
constexpr int kBlockK = kMxfp4BlockK, kGroup = kMxfp4Group;
// The exponent field of a multiplier, in [1, 254], is scale + kExponentOffset - exponent_shift.
constexpr int kExponentOffset = 126;
constexpr int kLargestScale = 128;  // E8M0 code whose multiplier, 2^126 times the scale, is a bf16

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
  return static_cast<std::uint8_t>(s.scales[row * ((s.k + kGroup - 1) / kGroup) + k / kGroup] +
                                   kExponentOffset - s.exponent_shift);
}

/// A thread block is a packed block, a thread the 16 bytes of that thread of a warpgroup.
__global__ void pack_kernel(const PackSource s, const BlockGrid grid, std::uint8_t* blocks) {
  const std::int64_t block = blockIdx.x;
  const std::int64_t row_block = block / grid.k_blocks, k_block = block % grid.k_blocks;
  std::uint8_t* target = blocks + block * kMxfp4BlockBytes;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const std::int64_t first_row = row_block * kBlockRows + warp * 16 + g;
  const std::int64_t rows[2] = {s.source_row(first_row), s.source_row(first_row + 8)};
  const std::int64_t first_k = k_block * kBlockK;
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

void pack(const PackSource& source, const BlockGrid& grid, void* blocks, const Stream& stream) {
  launch(pack_kernel, dim3(static_cast<unsigned>(grid.count())), dim3(kPackThreads), 0,
         static_cast<cudaStream_t>(stream.handle), false, source, grid,
         static_cast<std::uint8_t*>(blocks));
}

/// Where a row of a packed block has its bits: the thread group and which of its two rows it is.
struct RowInBlock {
  std::int64_t warp, group, half;
  explicit RowInBlock(std::int64_t row)
      : warp(row % kBlockRows / 16), group(row % 8), half(row % 16 / 8) {}
};

std::uint8_t packed_code(const std::byte* block, const RowInBlock& row, std::int64_t k) {
  const std::int64_t quad = k % 8 / 2, thread = row.warp * 32 + row.group * 4 + quad;
  const int step = static_cast<int>(k % kBlockK / 16);
  std::uint32_t words[2];  // the two that code_bits() speaks of
  std::memcpy(words, block + 16 * thread + 8 * (step / 2), sizeof(words));
  const CodeBits bits = code_bits(step % 2, static_cast<int>(row.half + k % 16 / 8 * 2));
  const int shift = static_cast<int>(k % 2 * 16);
  const auto at = [&](CodeBit bit) { return words[bit.word] >> (bit.bit + shift) & 1U; };
  return static_cast<std::uint8_t>(at(bits.sign) << 3 | at(bits.exponent_high) << 2 |
                                   at(bits.exponent_low) << 1 | at(bits.mantissa));
}

void unpack_row(const PackedView& source, std::int64_t row, void* values, std::uint8_t* scales) {
  const RowInBlock place(row);
  auto* codes = static_cast<std::uint8_t*>(values);
  std::fill_n(codes, (source.k + 1) / 2, std::uint8_t{0});
  for (std::int64_t k = 0; k < source.k; ++k) {
    const std::byte* block = source.blocks + (row / kBlockRows * source.k_blocks + k / kBlockK) *
                                                 std::int64_t{kMxfp4BlockBytes};
    codes[k / 2] |= static_cast<std::uint8_t>(packed_code(block, place, k) << (k % 2 * 4));
    if (k % kGroup != 0) continue;
    const std::int64_t index =
        (place.warp * 8 + place.group) * 4 + place.half * 2 + k % kBlockK / kGroup;
    scales[k / kGroup] = static_cast<std::uint8_t>(
        static_cast<int>(block[kMxfp4CodeBytes + index]) - kExponentOffset + source.exponent_shift);
  }
}

/// Smallest and largest code.
std::pair<int, int> range_of(const TensorView& scales) {
  int smallest = 255, largest = 0;
  for (std::int64_t r = 0; r < scales.size(0); ++r) {
    const auto* row = scales.as<const std::uint8_t>() + r * scales.stride(0);
    for (std::int64_t c = 0; c < scales.size(1); ++c) {
      smallest = std::min<int>(smallest, row[c * scales.stride(1)]);
      largest = std::max<int>(largest, row[c * scales.stride(1)]);
    }
  }
  return {smallest, largest};
}

void check_shard(const WeightMatrix& matrix) {
  if (matrix.first_col % kGroup == 0) return;
  throw Error::unsupported(Reason::kQuantScheme, "weights.first_col",
                           std::to_string(matrix.first_col),
                           "a multiple of 32: scale blocks begin at the first column");
}

int exponent_shift(const WeightMatrix& gate, const WeightMatrix* up) {
  check_shard(gate);
  if (up) check_shard(*up);
  auto [smallest, largest] = range_of(gate.scales);
  if (up) {
    const auto [least, most] = range_of(up->scales);
    smallest = std::min(smallest, least);
    largest = std::max(largest, most);
  }
  const int shift = std::max(0, largest - kLargestScale);
  if (smallest + kExponentOffset - shift < 1) {
    throw Error::unsupported(Reason::kQuantScheme, "weights.scales",
                             "from 2^" + std::to_string(smallest - 127) + " to 2^" +
                                 std::to_string(largest - 127) + " in one expert",
                             "within a factor of 2^253");
  }
  return shift;
}

}  // namespace

WeightFormat mxfp4_format() {
  WeightFormat format = format_of<Mxfp4Operands>();
  format.scheme = schemes::mxfp4_w4a16();
  format.values = DType::kU8;
  format.codes_per_value = 2;
  format.scale_group = kGroup;
  format.exponent_shift = exponent_shift;
  format.pack = pack;
  format.unpack_row = unpack_row;
  return format;
}

}  // namespace fusedmoe::cuda
