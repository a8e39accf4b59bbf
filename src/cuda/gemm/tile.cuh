// What the roles of the grouped GEMM kernel share: the sizes of a configuration, shared memory, the
// items of work.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/arch/barrier.h>

#include <cstdint>

#include "cuda/gemm/grouped_gemm.h"
#include "cuda/gemm/records.h"

namespace fusedmoe::cuda {

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

template <typename Weights, TileConfig kTile>
struct GemmConfig {
  static constexpr int kWarpgroups = kTile.warpgroups();  // that multiply
  static constexpr int kRowGroups = kTile.row_groups;
  static constexpr int kMultiplyThreads = 128 * kWarpgroups;
  // Tiles of few tokens leave their sums in shared memory to a warpgroup that finishes them, while
  // the next tile is multiplied: its latencies would be a good part of the time.
  static constexpr bool kHasEpilogueWarpgroup = kTile.has_epilogue_warpgroup();
  static_assert(kHasEpilogueWarpgroup || kTile.k_groups == 1, "K groups meet in shared memory");
  static constexpr int kThreads = 128 * (1 + kWarpgroups + (kHasEpilogueWarpgroup ? 1 : 0));

  // Registers of a block are 64 Ki; at launch every thread has the same share of them.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kAllRegisters = kLaunchRegisters * (kThreads / 128);
  static constexpr int kEpilogueRegisters = kHasEpilogueWarpgroup ? 104 : 0;
  static constexpr int kMultiplyRegisters =
      (kAllRegisters - kEpilogueRegisters - 56) / kWarpgroups / 8 * 8;
  static constexpr int kLoadRegisters =
      kAllRegisters - kEpilogueRegisters - kWarpgroups * kMultiplyRegisters;

  static constexpr int kTokenBytes = kTile.max_tokens * kRecordK * 2;  // of one K block
  static constexpr int kRecordBytes = record_bytes(Weights::kFormat);
  // K blocks of a stage: kDepth neighbours for each K group.
  static constexpr int kDepth =
      kTile.row_blocks == 1 && kTile.max_tokens <= 64 ? Weights::kDepth : 1;
  static constexpr int kBlocks = kTile.k_groups * kDepth;
  // Rows lie in blocks of 8 rows by 64 of K. Where tiles are small, one copy brings 8 rows of a
  // whole stage: each copy costs as much as a record's multiplication.
  static constexpr int kRowBlockBytes = kRowUnit * kRecordK * 2;
  static constexpr bool kWideCopies = kBlocks > 1 && kTile.max_tokens < kMostRows;
  static constexpr int kRowPitch = kWideCopies ? kBlocks * kRowBlockBytes : kRowBlockBytes;
  static constexpr int kTokenPitch = kWideCopies ? kRowBlockBytes : kTokenBytes;  // of K blocks
  static_assert(!kWideCopies || kTile.cluster == 1);
  static constexpr int kStageBytes =
      static_cast<int>(
          ceil_div(kBlocks * (kTokenBytes + kTile.tile_row_blocks() * kRecordBytes), 1024)) *
      1024;

  // Tokens that are finished together; more of them take more registers.
  static constexpr int kStoreTokens = kTile.max_tokens < 64        ? 16
                                      : kTile.max_tokens % 32 == 0 ? 32
                                                                   : 48;
  // Elements of a row on its way out; eight rows of 16 bytes lie on different banks.
  static constexpr int kStorePitch = kRecordRows + 8;

  static constexpr int kItemSlots = 8;
  static constexpr int kSharedLimit = 232448;  // of a block, sm_90
  // Warpgroups that leave their sums to the epilogue warpgroup, and a thread's sums; at least 1, as
  // there is no array of nothing.
  static constexpr int kParts = kHasEpilogueWarpgroup ? kWarpgroups : 1;
  static constexpr int kPartSums = kHasEpilogueWarpgroup ? kTile.max_tokens / 2 : 1;
  static constexpr int kStorers = kHasEpilogueWarpgroup ? 1 : kRowGroups;  // warpgroups

  static constexpr int kFixedBytes = kStorers * kStoreTokens * kStorePitch * 2 +
                                     kParts * kPartSums * 128 * 4 + (kMaxExperts + 1) * 4 + 1024;
  static constexpr int kStages = (kSharedLimit - kFixedBytes) / kStageBytes;
  static_assert(kTile.max_tokens % 16 == 0, "N of wgmma");
  static_assert(kTile.max_tokens % kStoreTokens == 0);
  static_assert(kStages >= 3, "a pipeline needs stages");
  static_assert(kStageBytes % 1024 == 0, "the swizzle repeats every 1024 bytes");
};

/// One tile, as every role needs it.
struct Item {
  int phase;  // -1: no work left
  int expert;
  int row_block;  // first of the tile
  int k_begin, k_end;
  int first_row;   // of the grouped GEMM
  int num_tokens;  // rows of the tile
  int split;
  int counter;  // of the token tile: row blocks of GEMM 1 that are stored
};

template <typename Config>
struct SharedStorage {
  alignas(1024) std::uint8_t stages[Config::kStages][Config::kStageBytes];
  // Rows of 16-bit numbers on their way out, of each storing warpgroup.
  alignas(16) std::uint16_t rows[Config::kStorers][Config::kStoreTokens][Config::kStorePitch];
  float parts[Config::kParts][Config::kPartSums][128];
  std::uint64_t stage_full[Config::kStages];
  std::uint64_t stage_free[Config::kStages];
  std::uint64_t parts_full;
  std::uint64_t parts_free;
  std::uint64_t item_full[Config::kItemSlots];
  std::uint64_t item_stored[Config::kItemSlots];
  std::uint64_t item_free[Config::kItemSlots];
  Item items[Config::kItemSlots];
  // What the first block of a cluster has claimed.
  std::uint64_t number_full[Config::kItemSlots];
  std::uint64_t number_free[Config::kItemSlots];
  int numbers[Config::kItemSlots];
  std::int32_t tile_prefix[kMaxExperts + 1];
};

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

/// Types and places of one kernel; the roles derive from it.
template <typename Weights, TileConfig kTile>
struct GemmTypes {
  using Config = GemmConfig<Weights, kTile>;
  using Shared = SharedStorage<Config>;
  using StageState = RingState<Config::kStages>;
  using ItemState = RingState<Config::kItemSlots>;
  static_assert(sizeof(Shared) <= Config::kSharedLimit);
  static constexpr int kClusterRowBlocks = kTile.tile_row_blocks() * kTile.cluster;
  static constexpr int kRecordStride = Config::kBlocks * Config::kRecordBytes;  // of row blocks

  __device__ static std::uint8_t* tokens_of(Shared& shared, int stage, int k_block) {
    return shared.stages[stage] + k_block * Config::kTokenPitch;
  }
  __device__ static std::uint8_t* record_of(Shared& shared, int stage, int row_block, int k_block) {
    return shared.stages[stage] + Config::kBlocks * Config::kTokenBytes +
           (row_block * Config::kBlocks + k_block) * Config::kRecordBytes;
  }

  /// Of one thread: row blocks by tokens, as wgmma leaves them.
  using Sums = float[kTile.row_blocks][kTile.max_tokens / 2];

  /// What a multiplying thread knows of itself; the epilogue warpgroup takes the place of the
  /// first.
  struct Place {
    int warpgroup;  // of those that multiply
    __device__ static int thread() { return threadIdx.x % 128; }
    __device__ int row_group() const { return warpgroup / kTile.k_groups; }
    __device__ int k_group() const { return warpgroup % kTile.k_groups; }
  };

  // Named barrier of a storing warpgroup. CUTLASS leaves 8 of the 16 to others.
  static_assert(kTile.row_groups <= 8);
  __device__ static int warpgroup_barrier(const Place& place) { return place.row_group(); }
  /// To all blocks of the cluster: each loads rows for this one. Every thread arrives for itself;
  /// one for its warp is not faster, and racecheck does not know what it stands for.
  __device__ static void release(Shared& shared, int stage) {
    if constexpr (kTile.cluster == 1) {
      arrive(&shared.stage_free[stage]);
    } else {
      asm volatile("" ::: "memory");
      for (int r = 0; r < kTile.cluster; ++r) Barrier::arrive(&shared.stage_free[stage], r, true);
    }
  }
};

}  // namespace fusedmoe::cuda
