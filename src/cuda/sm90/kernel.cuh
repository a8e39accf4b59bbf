// What the roles of the fused MLP kernel share: its sizes, shared memory, barriers.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "cuda/formats/operand_policy.h"
#include "cuda/mlp/work_tile.cuh"
#include "cuda/sm90/kernel_set.h"

namespace fusedmoe::cuda {
namespace sm90 {

/// Rows of a tensor copy, at least and at most.
inline constexpr int kRowUnit = 8, kMostRows = 64;
using Barrier = cutlass::arch::ClusterTransactionBarrier;

/// Barrier::wait and arrive, across which the compiler also moves no accesses to what is guarded.
__device__ inline void wait(const std::uint64_t* barrier, std::uint32_t phase) {
  Barrier::wait(barrier, phase);
  asm volatile("" ::: "memory");
}
__device__ inline void arrive(const std::uint64_t* barrier) {
  asm volatile("" ::: "memory");
  Barrier::arrive(barrier);
}

/// All compile-time sizes of one fused kernel, from its operand policy (formats/) and tile shape
/// number kIndex of the policy's KernelSet.
template <OperandPolicy OperandsT, int kIndex>
struct Kernel {
  using Operands = OperandsT;
  using Activation = typename Operands::Activation;
  using Output = typename Operands::Output;

  static constexpr KernelSet kSet = kernel_set(Operands::kFormat);
  static constexpr TileShape kTile = kSet.tiles[kIndex];
  static constexpr int kMaxTokens = kTile.max_tokens, kCluster = kTile.cluster;
  static constexpr int kRowGroups = kTile.row_groups, kKGroups = kTile.k_groups;
  static constexpr bool kTokensAreRows = kTile.tokens_are_rows;
  static_assert(!kTokensAreRows || kTile.warpgroups() == kTile.row_groups);
  static constexpr int kRowBlocks = kTile.row_blocks;             // of a row group
  static constexpr int kTileRowBlocks = kTile.tile_row_blocks();  // of a thread block
  static constexpr int kClusterRowBlocks = kTileRowBlocks * kCluster;

  static constexpr int kWarpgroups = kTile.warpgroups();  // that multiply a tile
  static constexpr int kMultiplyThreads = 128 * kWarpgroups;
  // In tiles of few tokens the multiplying warpgroups publish their accumulators in shared memory,
  // and another one finishes them while the next tile is multiplied. Its latencies would otherwise
  // be a good part of the time.
  static constexpr bool kHasEpilogueWarpgroup = kTile.has_epilogue_warpgroup();
  static_assert(kHasEpilogueWarpgroup || kKGroups == 1, "K groups meet in shared memory");
  // Whether the storing warpgroups can also quantize what GEMM 1 has stored (row_pass.cuh).
  static constexpr bool kHasRowPass = kSet.has_row_pass(kTile);
  static constexpr RowTransform::Kind kPassKind = RowTransform::Kind::kFp8;
  static_assert(!kHasRowPass || kCluster == 1);
  static constexpr int kThreads = 128 * (1 + kWarpgroups + (kHasEpilogueWarpgroup ? 1 : 0));

  // A thread's accumulators as wgmma leaves them: row blocks by tokens, or where tokens are the
  // rows blocks of 64 tokens by the weight rows of the row group.
  static constexpr int kColumns = kTokensAreRows ? kRowBlocks * kBlockRows : kMaxTokens;
  static constexpr int kAccumulators = kColumns / 2;
  static constexpr int kTokenBlocks = kTokensAreRows ? kMaxTokens / kBlockRows : 1;
  using Sum = float;
  using Accumulators = Sum[kTokensAreRows ? kTokenBlocks : kRowBlocks][kAccumulators];
  static constexpr bool kPromotes = kSet.promoted_columns > 0;
  static constexpr int kPromotedColumns =
      kTokensAreRows || kColumns < kSet.promoted_columns ? kColumns : kSet.promoted_columns;
  static constexpr int kAllAccumulators =
      sizeof(Accumulators) / sizeof(float) + kPromotedColumns / 2;

  // Registers of a thread block are 64 Ki; at launch every thread has the same share of them.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kAllRegisters = kLaunchRegisters * (kThreads / 128);
  static constexpr int kEpilogueRegisters = kHasEpilogueWarpgroup ? 104 : 0;
  // What the loading threads need, or can do with where accumulators are many.
  static constexpr int kLeastLoadRegisters = kAllAccumulators > 176 ? 40 : 56;
  static constexpr int kMultiplyRegisters =
      (kAllRegisters - kEpilogueRegisters - kLeastLoadRegisters) / kWarpgroups / 8 * 8;
  static constexpr int kLoadRegisters =
      kAllRegisters - kEpilogueRegisters - kWarpgroups * kMultiplyRegisters;

  static_assert(kAllAccumulators + (kPromotes ? 32 : 48) <= kMultiplyRegisters,
                "the tile's accumulators leave no registers");
  // FP8 weights are decoded half a K block ahead in tiles of 64 and 96 tokens: narrower tiles gain
  // nothing, and wider ones lose by it.
  static constexpr bool kDecodesAhead =
      kPromotes && Operands::kDecodes && !kHasEpilogueWarpgroup && kMaxTokens <= 96;

  // Of one K block:
  static constexpr int kBlockBytes = Operands::kBlock.bytes;  // 64 weight rows
  static constexpr int kBlockK = Operands::kBlock.k;
  static_assert(kBlockK * sizeof(Activation) == kSwizzleBytes);
  static constexpr int kActivationBytes = kMaxTokens * kSwizzleBytes;
  // A stage holds neighbouring K blocks for each K group.
  static constexpr int kBlocksPerGroup =
      kRowBlocks == 1 && kMaxTokens <= 64 ? kSet.blocks_per_group : 1;
  static constexpr int kBlocksPerStage = kKGroups * kBlocksPerGroup;
  static constexpr int kRowBlockPitch = kBlocksPerStage * kBlockBytes;  // of weights in a stage
  // Shared memory holds token rows in units: 8 rows of one K block. Issuing a copy takes as long as
  // multiplying one packed block. So where tiles are small, one copy loads the units of 8 rows for
  // all K blocks of a stage.
  static constexpr int kUnitBytes = kRowUnit * kSwizzleBytes;
  static constexpr bool kWideCopies = kBlocksPerStage > 1 && kMaxTokens < kMostRows;
  static constexpr int kUnitPitch = kWideCopies ? kBlocksPerStage * kUnitBytes : kUnitBytes;
  static constexpr int kKBlockPitch = kWideCopies ? kUnitBytes : kActivationBytes;
  static_assert(!kWideCopies || kCluster == 1);
  static constexpr int kStageBytes =
      static_cast<int>(
          ceil_div(kBlocksPerStage * (kActivationBytes + kTileRowBlocks * kBlockBytes), 1024)) *
      1024;
  // Scales of a K block where accumulators are promoted: of each slice of weights and each token
  // row.
  static constexpr int kWeightScales = kTileRowBlocks * kSlices;
  static_assert(kWeightScales <= 32, "a lane has a weight scale");
  // A bulk copy may begin up to 3 scales before the tile's first token.
  static constexpr int kTokenScales = kMaxTokens + (kTokensAreRows ? 4 : 0);
  static constexpr int kScales = Operands::kHasKScales ? kWeightScales + kTokenScales : 0;
  static constexpr int kScaleBytes = kBlocksPerStage * kScales * 4;
  // In tiles with tokens as rows bulk copies bring the scales; these begin and end at multiples of
  // 16 bytes.
  static_assert(!kTokensAreRows ||
                (kBlocksPerStage == 1 && kWeightScales % 4 == 0 && kScales % 4 == 0));

  static_assert(sizeof(typename Output::Element) == 2, "stmatrix stages 16 bits");
  // Token rows that the epilogue finishes together; more of them take more registers.
  static constexpr int kChunkTokens = kTokensAreRows         ? kBlockRows
                                      : kWarpgroups != 2     ? 16
                                      : kMaxTokens % 32 == 0 ? 32
                                      : kMaxTokens % 48 == 0 ? 48
                                                             : 16;
  // Whether GEMM 1 can quantize groups of 128 features (epilogue_groups.cuh), and of how many
  // tokens of a chunk a thread does so.
  static constexpr bool kStoresGroups =
      kPromotes && Operands::kHasKScales && kTile.has_whole_groups();
  static constexpr bool kReadsScalesAhead = true;
  // Whether it can store E4M3 codes whose scale is known.
  static constexpr bool kStoresCodes = Operands::kFormat.stores_codes();
  static constexpr int kStoredRowBlocks = kHasEpilogueWarpgroup ? kRowGroups : kRowBlocks;
  // Whether several tiles share such a group (join_group.cuh).
  static constexpr bool kJoinsGroups =
      kPromotes && Operands::kHasKScales && kTile.has_parts_of_groups();
  static constexpr int kGroupTokens = kChunkTokens * kStoredRowBlocks / 32;
  // Elements of a staged row on its way out; eight rows lie on different banks.
  static constexpr int kStagedFeatures =
      kStoresGroups && kStoredRowBlocks > 2 ? 2 * kBlockRows : kBlockRows;
  static constexpr int kStagedPitch =
      kStagedFeatures + 16 / static_cast<int>(sizeof(typename Output::Element));

  static constexpr int kTileSlots = 8;
  /// Where row_prefix() is, behind tile_prefix.
  __host__ __device__ static constexpr int row_prefix_offset(int /*num_experts*/) {
    return kMaxExperts / 2 + 1;
  }
  static constexpr int kSharedLimit = 232448;  // of a thread block on sm_90
  // Warpgroups that publish partial accumulators, and a thread's; at least 1, as there is no array
  // of nothing.
  static constexpr int kPartials = kHasEpilogueWarpgroup ? kWarpgroups : 1;
  static constexpr int kPartialAccumulators = kHasEpilogueWarpgroup ? kAccumulators : 1;
  static constexpr int kStoringWarpgroups = kHasEpilogueWarpgroup ? 1 : kRowGroups;

  static constexpr int kPassWarpgroups = kHasRowPass ? kStoringWarpgroups : 1;
  static constexpr int kGroupParts = kStoresGroups ? kStoringWarpgroups : 1;
  static constexpr int kAmaxTokens = kTokensAreRows ? kMaxTokens : kChunkTokens;

  static constexpr int kFixedBytes =
      kStoringWarpgroups * kChunkTokens * kStagedPitch * sizeof(typename Output::Element) +
      2 * kGroupParts * kAmaxTokens * 4 + 16 * kPassWarpgroups +
      int{sizeof(typename Operands::Tables)} + kPartials * kPartialAccumulators * 128 * 4 +
      (kMaxExperts + 1) * 4 + 1024;
  static constexpr int kStages = (kSharedLimit - kFixedBytes) / (kStageBytes + kScaleBytes);
  static_assert(kMaxTokens % 16 == 0, "N of wgmma");
  static_assert(kMaxTokens % kChunkTokens == 0);
  static_assert(kStages >= 3, "a pipeline needs stages");
  static_assert(kStageBytes % 1024 == 0, "the swizzle repeats every 1024 bytes");
};

}  // namespace sm90

template <OperandPolicy Operands, int kIndex>
struct SharedMemory<sm90::Kernel<Operands, kIndex>> {
  using K = sm90::Kernel<Operands, kIndex>;
  // The ring of operands: per stage the token rows, then the packed blocks.
  alignas(1024) std::uint8_t stages[K::kStages][K::kStageBytes];
  alignas(16) float scales[K::Operands::kHasKScales ? K::kStages : 1][K::kBlocksPerStage]
                          [K::Operands::kHasKScales ? K::kScales : 4];
  // Token rows on their way out, of each storing warpgroup.
  alignas(16)
      typename K::Output::Element rows[K::kStoringWarpgroups][K::kChunkTokens][K::kStagedPitch];
  // The largest magnitudes of tokens that are stored together, of each storing warpgroup, in turns.
  float group_amax[2][K::kGroupParts][K::kGroupParts > 1 ? K::kAmaxTokens : 1];
  // The largest magnitudes that the warps of the row pass have found in a row.
  float row_amax[K::kPassWarpgroups][4];
  [[no_unique_address]] typename K::Operands::Tables tables;
  float partials[K::kPartials][K::kPartialAccumulators][128];
  std::uint64_t stage_full[K::kStages];
  std::uint64_t stage_free[K::kStages];
  std::uint64_t partials_full;
  std::uint64_t partials_free;
  // The ring of work tiles, from the tile scheduler to all other roles.
  std::uint64_t tile_full[K::kTileSlots];
  std::uint64_t tile_stored[K::kTileSlots];
  std::uint64_t tile_free[K::kTileSlots];
  WorkTile tiles[K::kTileSlots];
  // The tile index that the first block of a cluster drew, for the others.
  std::uint64_t index_full[K::kTileSlots];
  std::uint64_t index_free[K::kTileSlots];
  int tile_indexes[K::kTileSlots];
  std::int32_t tile_prefix[kMaxExperts + 1];

  __device__ std::uint8_t* activations_at(int stage, int k_block) {
    return stages[stage] + k_block * K::kKBlockPitch;
  }
  __device__ std::uint8_t* weights_at(int stage, int row_block, int k_block) {
    return stages[stage] + K::kBlocksPerStage * K::kActivationBytes +
           (row_block * K::kBlocksPerStage + k_block) * K::kBlockBytes;
  }
  /// (row blocks, slices)
  __device__ float* weight_scales_at(int stage, int k_block) { return scales[stage][k_block]; }
  __device__ float* token_scales_at(int stage, int k_block) {
    return scales[stage][k_block] + (K::Operands::kHasKScales ? K::kWeightScales : 0);
  }
};

namespace sm90 {

/// Position in a ring of barriers.
template <int kCount>
struct RingState {
  int index = 0;
  std::uint32_t phase = 0;
  __device__ void advance() {
    if (++index == kCount) {
      index = 0;
      phase ^= 1;
    }
  }
};
template <typename K>
using StageState = RingState<K::kStages>;
template <typename K>
using TileState = RingState<K::kTileSlots>;

/// Whether K blocks have scales of their own; the same for both GEMMs.
template <typename K>
__device__ inline bool uses_k_scales(const FusedMlpParams& p) {
  return K::Operands::kHasKScales && (p.gemms[0].token_scale_pitch > 0 || p.gemms[0].block_scales);
}

/// By a thread of each of some warps, as each barrier takes a while.
template <typename K>
__device__ __forceinline__ void init_barriers(SharedMemory<K>& shared, bool has_k_scales) {
  if (threadIdx.x % 32 != 0) return;
  const auto init = [](auto& barriers, int arrivals) {
    for (std::uint64_t& barrier : barriers) Barrier::init(&barrier, arrivals);
  };
  switch (threadIdx.x / 32) {
    case 1:
      // Weights, activations, and each lane that copies scales, if they come apart.
      init(shared.stage_full, has_k_scales ? 2 + 32 : 2);
      break;
    case 2:
      init(shared.stage_free, K::kMultiplyThreads * K::kCluster);
      break;
    case 3:
      init(shared.tile_full, 1);
      break;
    case 4:
      // Every thread for itself, as in release_stage().
      init(shared.tile_stored, 128 * K::kStoringWarpgroups);
      break;
    case 5:
      // Activations and scales loaded, stored.
      init(shared.tile_free, has_k_scales ? 3 : 2);
      break;
    case 6:
      Barrier::init(&shared.partials_full, K::kMultiplyThreads);
      Barrier::init(&shared.partials_free, 128);
      break;
    case 7:
      if constexpr (K::kCluster > 1) {
        init(shared.index_full, 1);
        init(shared.index_free, K::kCluster - 1);
      }
      break;
    default:
      return;
  }
  cutlass::arch::fence_barrier_init();
}

}  // namespace sm90
}  // namespace fusedmoe::cuda
