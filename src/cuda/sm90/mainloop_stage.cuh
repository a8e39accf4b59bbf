// What all main loops of the fused MLP kernel share: waiting for a stage, its operands, letting it
// go. The loops of wgmma go through the stages of a tile in this order:
//
//   acquire()                  wait until the stage's copies have come
//   warpgroup_arrive()         registers are written: wgmma may read them
//   wgmma                      the stage's instructions; meanwhile codes are read or decoded
//   warpgroup_commit_batch()   they are a group
//   warpgroup_wait<>()         for the group before this one, or for this one
//   release_previous(),        let go what that group has read: the stage before, or this one
//   release_stage()
//
// multiply_shared() and multiply_decoded_ahead() wait for the group before, the others for their
// own. A stage that wgmma may still read is never let go.
#pragma once

#include "cuda/formats/codes.h"
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/wgmma.cuh"

namespace fusedmoe::cuda::sm90 {

template <typename K>
__device__ inline int num_stages(const WorkTile& tile) {
  return (tile.k_end - tile.k_begin + K::kBlocksPerStage - 1) / K::kBlocksPerStage;
}

/// K blocks of the last stage of a tile that a K group multiplies; of the others kBlocksPerGroup.
template <typename K>
__device__ inline int last_blocks(const WorkTile& tile, const WarpgroupCoords<K>& coords) {
  if constexpr (K::kBlocksPerStage == 1) return 1;
  const int blocks = tile.k_end - tile.k_begin;
  const int left = blocks - (num_stages<K>(tile) - 1) * K::kBlocksPerStage -
                   coords.k_group() * K::kBlocksPerGroup;
  return max(0, min(K::kBlocksPerGroup, left));
}

/// To all blocks of the cluster: each loads token rows for this one. Every thread arrives for
/// itself; one for its warp is not faster, and racecheck does not know what it stands for.
template <typename K>
__device__ inline void release_stage(SharedMemory<K>& shared, int stage) {
  if constexpr (K::kCluster == 1) {
    arrive(&shared.stage_free[stage]);
  } else {
    asm volatile("" ::: "memory");
    for (int r = 0; r < K::kCluster; ++r) Barrier::arrive(&shared.stage_free[stage], r, true);
  }
}

/// The stage before this one, which the tensor cores have read.
template <typename K>
__device__ inline void release_previous(SharedMemory<K>& shared, const StageState<K>& stage) {
  release_stage(shared, (stage.index == 0 ? K::kStages : stage.index) - 1);
}

/// What a full stage holds of a warpgroup's row blocks and K group.
template <typename K>
struct StageOperands {
  const std::uint8_t* weights;      // of the first row block; kRowBlockPitch to the next
  const std::uint8_t* activations;  // kKBlockPitch to those of the next K block
  __device__ Descriptor<K::kUnitPitch> activations_of(int block) const {
    return Descriptor<K::kUnitPitch>(
        cute::cast_smem_ptr_to_uint(activations + block * K::kKBlockPitch));
  }
};
template <typename K>
__device__ inline StageOperands<K> acquire(SharedMemory<K>& shared, const StageState<K>& stage,
                                           const WarpgroupCoords<K>& coords) {
  wait(&shared.stage_full[stage.index], stage.phase);
  const int block = coords.k_group() * K::kBlocksPerGroup;
  return {shared.weights_at(stage.index, coords.row_group() * K::kRowBlocks, block),
          shared.activations_at(stage.index, block)};
}

/// wgmma instructions of a K block.
template <typename K>
inline constexpr int kSteps = K::kBlockK / K::Operands::kInstructionK;

/// A thread's codes of a stage, by row blocks or K blocks.
template <typename K>
struct StageCodes {
  static constexpr int kCount = K::kRowBlocks * K::kBlocksPerGroup;
  typename K::Operands::Codes blocks[kCount];
};
template <typename K>
__device__ inline StageCodes<K> load_codes(const StageOperands<K>& operands,
                                           const WarpgroupCoords<K>& coords) {
  constexpr int kPitch = K::kRowBlocks > 1 ? K::kRowBlockPitch : K::kBlockBytes;
  StageCodes<K> codes;
#pragma unroll
  for (int r = 0; r < StageCodes<K>::kCount; ++r) {
    codes.blocks[r] =
        K::Operands::load(StagedBlock{operands.weights + r * kPitch}, coords.thread());
  }
  return codes;
}

}  // namespace fusedmoe::cuda::sm90
