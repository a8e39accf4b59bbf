// What the parts of the fused MLP kernel of mma.sync share: its sizes and its shared memory.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/formats/operand_policy.h"
#include "cuda/mlp/work_tile.cuh"
#include "cuda/sm80/kernel_set.h"

namespace fusedmoe::cuda {
namespace sm80 {

/// All compile-time sizes of one fused kernel, from its operand policy (formats/), what is
/// multiplied for FP8, and tile shape number kIndex of their KernelSet. A warpgroup is four warps:
/// each has 16 of the 64 weight rows of a row block.
template <OperandPolicy OperandsT, Fp8 kFp8, int kIndex>
struct Kernel {
  using Operands = OperandsT;
  static constexpr KernelSet kSet = kernel_set(Operands::kFormat, kFp8);
  static constexpr bool kFp8AsF16 = kSet.fp8_as_f16();
  using Activation = std::conditional_t<kFp8AsF16, __half, typename Operands::Activation>;
  using Output = typename Operands::Output;

  static constexpr TileShape kTile = kSet.tiles[kIndex];
  static constexpr int kMaxTokens = kTile.max_tokens;
  static constexpr int kRowGroups = kTile.row_groups, kKGroups = kTile.k_groups;
  static constexpr int kRowBlocks = kTile.row_blocks;             // of a row group
  static constexpr int kTileRowBlocks = kTile.tile_row_blocks();  // of a thread block
  static constexpr int kClusterRowBlocks = kTileRowBlocks;
  static constexpr int kThreads = 128 * kTile.warpgroups();
  static_assert(kTile.stages >= 2, "one is multiplied while another comes");

  // A thread's accumulators: row blocks by tokens. Those of INT8 become fp32 in the epilogue.
  static constexpr int kAccumulators = kMaxTokens / 2;
  using Sum = std::conditional_t<Operands::kFormat.int8_rows, int, float>;
  using Accumulators = Sum[kRowBlocks][kAccumulators];
  // The sums of a K block are added to those before it in fp32, times its scales if it has some.
  static constexpr bool kHasKScales = Operands::kHasKScales;
  static constexpr bool kPromotes = kHasKScales || kSet.is_native_fp8();
  static constexpr bool kHasRowPass = kSet.has_row_pass(kTile);
  static constexpr int kPassWarpgroups = kHasRowPass ? kTile.warpgroups() : 1;
  static constexpr RowTransform::Kind kPassKind = kSet.format->int8_rows ? RowTransform::Kind::kInt8
                                                  : kFp8AsF16 ? RowTransform::Kind::kFp8AsF16
                                                              : RowTransform::Kind::kFp8;
  static constexpr bool kStoresGroups = false;
  static constexpr bool kStoresCodes = kSet.is_native_fp8() && Operands::kFormat.stores_codes();
  static constexpr int kAllAccumulators = kRowBlocks * kAccumulators;
  static constexpr int kBlocks = most_blocks(kTile, kSet);

  // Of one K block:
  static constexpr int kBlockBytes = Operands::kBlock.bytes;  // 64 weight rows
  static constexpr int kBlockK = Operands::kBlock.k;
  static constexpr int kRowBytes = row_bytes(kSet);
  static_assert(kRowBytes == kBlockK * sizeof(Activation));
  // Token rows of a K block lie in parts of 128 bytes of each row.
  static constexpr int kRowParts = kRowBytes / kSwizzleBytes;
  static constexpr int kPartBytes = kMaxTokens * kSwizzleBytes;
  static constexpr int kActivationBytes = kRowParts * kPartBytes;
  // Steps of half a K block: 32 bytes of token rows each.
  static constexpr int kHalfSteps = 2 * kRowParts;
  // Scales of a K block: of its tokens, then of slices of its weight rows.
  static constexpr int kScales = num_scales(kTile, Operands::kFormat);
  // A stage has neighbouring K blocks for each K group: token rows, packed blocks, scales.
  static constexpr int kDepth = kTile.depth, kStageBlocks = kKGroups * kDepth;
  static constexpr int kWeightsOffset = kStageBlocks * kActivationBytes;
  static constexpr int kRowBlockPitch = kStageBlocks * kBlockBytes;
  static constexpr int kScalesOffset = kWeightsOffset + kTileRowBlocks * kRowBlockPitch;
  static constexpr int kStageBytes = stage_bytes(kTile, kSet);

  // Token rows that the epilogue finishes together; more of them take more registers.
  static constexpr int kChunkTokens = 16;
  static constexpr int kStoredRowBlocks = kRowBlocks;
  // Scales of tokens are read before they are needed, unless accumulators take half of the
  // registers.
  static constexpr bool kReadsScalesAhead = kAllAccumulators < 128;
  // Elements of a staged row on its way out; eight rows lie on different banks.
  static constexpr int kStagedPitch =
      kBlockRows + 16 / static_cast<int>(sizeof(typename Output::Element));

  // K groups add their accumulators in shared memory; one group needs none.
  static constexpr bool kHasPartials = kKGroups > 1;
  static_assert(!kHasPartials || kTileRowBlocks == 1);
  struct NoPartials {};
  using Partials = std::conditional_t<kHasPartials, Sum[kKGroups][kAccumulators][128], NoPartials>;

  static constexpr int kTileSlots = 8;
  static_assert(kTile.stages <= kTileSlots);
  /// Where row_prefix() is, behind tile_prefix.
  __host__ __device__ static constexpr int row_prefix_offset(int num_experts) {
    return num_experts + 1;
  }
};

}  // namespace sm80

template <OperandPolicy Operands, sm80::Fp8 kFp8, int kIndex>
struct SharedMemory<sm80::Kernel<Operands, kFp8, kIndex>> {
  using K = sm80::Kernel<Operands, kFp8, kIndex>;

  // Token rows on their way out, of each row group.
  alignas(16) typename K::Output::Element rows[K::kRowGroups][K::kChunkTokens][K::kStagedPitch];
  [[no_unique_address]] typename K::Operands::Tables tables;
  [[no_unique_address]] typename K::Partials partials;
  // The largest magnitudes that the warps of the row pass have found in a row.
  float row_amax[K::kPassWarpgroups][4];
  // The ring of work tiles: those whose operands are here or on their way, and the next. A step
  // copies one stage, and every second step at most begins a tile.
  WorkTile tiles[K::kTileSlots];
  // Whether the next tile's token rows are stored, as it was seen in even and odd steps.
  bool rows_are_stored[2];
  // The last: only as many of them are there as the launch needs. Behind them the ring of operands.
  std::int32_t tile_prefix[kMaxExperts + 1];
};

namespace sm80 {

/// Where a launch has its ring of operands, in bytes of shared memory.
template <typename K>
__host__ __device__ constexpr int ring_offset(const FusedMlpParams& params) {
  const int words = params.topk_ids ? 2 * (params.num_experts + 1) : params.num_experts + 1;
  const auto bytes = offsetof(SharedMemory<K>, tile_prefix) + sizeof(std::int32_t) * words;
  return static_cast<int>(ceil_div(bytes, kSwizzleBytes) * kSwizzleBytes);
}

/// Of a launch. With up to 512 experts at most 80 KiB, so that a multiprocessor with 164 has two
/// blocks; with any number what a block has everywhere.
template <typename K>
std::size_t shared_bytes(const FusedMlpParams& params) {
  constexpr std::size_t kFixed = offsetof(SharedMemory<K>, tile_prefix);
  constexpr std::size_t kRing = K::kTile.stages * K::kStageBytes + kSwizzleBytes;
  static_assert(kFixed + kRing + 4 * (512 + 1) <= 80 << 10);
  static_assert(sizeof(SharedMemory<K>) + kRing <= 99 << 10);
  return ring_offset<K>(params) + params.stages * K::kStageBytes;
}

}  // namespace sm80
}  // namespace fusedmoe::cuda
