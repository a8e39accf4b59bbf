// Packing and unpacking of weights that are decoded in registers: one kernel and one function for
// all, over the policy's layout of codes and a policy of scales.
#pragma once

#include <cstring>

#include "cuda/device/launch.h"
#include "cuda/formats/codes.h"
#include "cuda/formats/policy_kernels.h"

namespace fusedmoe::cuda {

/// Where a row of a packed block has its bits: the warp, thread group and which of its two rows it
/// is.
struct RowInBlock {
  int warp, group, half;
  FUSEDMOE_HD explicit RowInBlock(std::int64_t row)
      : warp(static_cast<int>(row % kBlockRows / 16)),
        group(static_cast<int>(row % 8)),
        half(static_cast<int>(row % 16 / 8)) {}
  /// Of (warp, group).
  FUSEDMOE_HD int pair() const { return warp * 8 + group; }
};

template <int kBits>
__device__ std::uint32_t code_at(const PackSource& s, std::int64_t row, std::int64_t k) {
  const auto* bytes = static_cast<const std::uint8_t*>(s.values) + row * s.row_bytes;
  return kBits == 8 ? bytes[k] : bytes[k / 2] >> (k % 2 * 4) & 0xF;
}

/// Codes next to each other of a thread: 2 of 16 of K, 4 of 32.
template <typename Operands>
inline constexpr int kNeighbours = Operands::kInstructionK / 8;

/// A thread block is a packed block, a thread the words of that thread of a warpgroup. Scales has,
/// for the device: `code` changes a code or gives the one of padding (row -1, or k behind the end);
/// `store` writes the scale of a row and group of K.
template <typename Operands, typename Scales>
__global__ void pack_decoded_kernel(const PackSource s, const BlockGrid grid,
                                    std::uint8_t* blocks) {
  using Layout = typename Operands::Layout;
  constexpr int kBits = Layout::kBits, kStepK = Operands::kInstructionK, kSteps = 4;
  static_assert(kSteps * kStepK == Operands::kBlockK);
  constexpr int kWords = Operands::kCodeBytes / 128 / 4;  // of a thread
  const std::int64_t block = blockIdx.x;
  const std::int64_t row_block = block / grid.k_blocks;
  const std::int64_t first_k = block % grid.k_blocks * Operands::kBlockK;
  std::uint8_t* target = blocks + block * Operands::kBlock.bytes;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, g = thread % 32 / 4, q = thread % 4;
  const std::int64_t first_row = row_block * kBlockRows + warp * 16 + g;
  const std::int64_t rows[2] = {s.source_row(first_row), s.source_row(first_row + 8)};
  std::uint32_t words[kWords] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
      for (int e = 0; e < kNeighbours<Operands>; ++e) {
        const std::int64_t row = rows[pair % 2];
        const std::int64_t k =
            first_k + step * kStepK + pair / 2 * (kStepK / 2) + q * kNeighbours<Operands> + e;
        const bool inside = row >= 0 && k < s.k;
        const std::uint32_t code =
            Scales::code(s, row, k, inside ? code_at<kBits>(s, row, k) : 0, inside);
#pragma unroll
        for (int bit = 0; bit < kBits; ++bit) {
          const BitPlace place = Layout::place(step, pair, e, bit);
          words[place.word] |= (code >> bit & 1) << place.bit;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWords / 4; ++i) {
    reinterpret_cast<uint4*>(target)[i * 128 + thread] =
        make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
  for (int i = thread; i < kBlockRows * Operands::kGroups; i += 128) {
    const int row = i / Operands::kGroups, group = i % Operands::kGroups;
    const std::int64_t k = first_k + group * Operands::kGroupK;
    const std::int64_t from = s.source_row(row_block * kBlockRows + row);
    Scales::store(s, from, k, from >= 0 && k < s.k, target + Operands::kCodeBytes, RowInBlock(row),
                  group);
  }
}

template <typename Operands, typename Scales>
void pack_decoded(const PackSource& source, const BlockGrid& grid, void* blocks,
                  const Stream& stream) {
  launch(pack_decoded_kernel<Operands, Scales>, dim3(static_cast<unsigned>(grid.count())),
         dim3(128), 0, static_cast<cudaStream_t>(stream.handle), false, source, grid,
         static_cast<std::uint8_t*>(blocks));
}

/// A code of a packed block, by its row and K there.
template <typename Operands>
std::uint8_t packed_code(const std::byte* block, const RowInBlock& row, std::int64_t k) {
  using Layout = typename Operands::Layout;
  constexpr int kStepK = Operands::kInstructionK, kHalfK = kStepK / 2;
  const auto thread = row.warp * 32 + row.group * 4 + k % kHalfK / kNeighbours<Operands>;
  const auto step = static_cast<int>(k / kStepK);
  const auto pair = static_cast<int>(row.half + k % kStepK / kHalfK * 2);
  unsigned code = 0;
  for (int bit = 0; bit < Layout::kBits; ++bit) {
    const BitPlace place =
        Layout::place(step, pair, static_cast<int>(k % kNeighbours<Operands>), bit);
    std::uint32_t word;
    std::memcpy(&word, block + place.word / 4 * 2048 + thread * 16 + place.word % 4 * 4,
                sizeof(word));
    code |= (word >> place.bit & 1U) << bit;
  }
  return static_cast<std::uint8_t>(code);
}

template <typename Operands, typename Scales>
void unpack_decoded(const PackedView& source, std::int64_t row, const UnpackedRow& target) {
  using Layout = typename Operands::Layout;
  const RowInBlock place(row);
  auto* codes = static_cast<std::uint8_t*>(target.values);
  for (std::int64_t k = 0; k < source.k; ++k) {
    const std::byte* block =
        source.blocks + (row / kBlockRows * source.k_blocks + k / Operands::kBlockK) *
                            std::int64_t{Operands::kBlock.bytes};
    const std::int64_t inside = k % Operands::kBlockK;
    const std::uint8_t code = packed_code<Operands>(block, place, inside);
    if (Layout::kBits == 8) {
      codes[k] = code;
    } else {
      codes[k / 2] = static_cast<std::uint8_t>(k % 2 == 0 ? code : codes[k / 2] | code << 4);
    }
    if (!target.scales || inside % Operands::kGroupK != 0) continue;
    const std::int64_t scale = source.group_k < 0 ? 0 : (source.first_col + k) / source.group_k;
    Scales::load(source, block + Operands::kCodeBytes, place,
                 static_cast<int>(inside / Operands::kGroupK), scale, target);
  }
}

/// kernels_from() of decoded weights.
template <typename Operands, typename Scales>
FormatKernels decoded_kernels() {
  static_assert(DecodingPolicy<Operands, StagedBlock> || Fp8DecodingPolicy<Operands, StagedBlock>);
  static_assert(Operands::kFormat.group_k == Operands::kGroupK &&
                Operands::kFormat.block_scales == Scales::kDType &&
                Operands::kFormat.fixed_exponent == Operands::kFixedExponent);
  FormatKernels kernels = kernels_from<Operands>();
  kernels.pack = pack_decoded<Operands, Scales>;
  kernels.unpack_row = unpack_decoded<Operands, Scales>;
  return kernels;
}

}  // namespace fusedmoe::cuda
