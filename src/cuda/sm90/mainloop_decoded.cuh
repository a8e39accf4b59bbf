// The main loop of weights that are decoded to 16 bits.
#pragma once

#include "cuda/sm90/mainloop_stage.cuh"

namespace fusedmoe::cuda::sm90 {

/// Weights to be decoded: the codes of a stage are read while the tensor cores work on the stage
/// before, and decoded while they work for the other warpgroups.
template <int kN, typename K>
__device__ __forceinline__ void multiply_decoded(SharedMemory<K>& shared, const WorkTile& tile,
                                                 const WarpgroupCoords<K>& coords,
                                                 StageState<K>& stage,
                                                 typename K::Accumulators& accumulators) {
  constexpr int kBlocks = StageCodes<K>::kCount, kHalfSteps = kSteps<K> / 2;
  static_assert(K::kRowBlocks == 1 || K::kBlocksPerGroup == 1);
  const int stages = num_stages<K>(tile);
  if (stages == 0) return;  // more splits than K blocks
  const int last = last_blocks(tile, coords);
  StageOperands<K> operands = acquire(shared, stage, coords);
  StageCodes<K> codes = load_codes(operands, coords);
  for (int i = 0; i < stages; ++i) {
    std::uint32_t weights[kBlocks][2][kHalfSteps][4];
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        K::Operands::decode(codes.blocks[r], half, weights[r][half]);
      }
    }
    const int blocks = i + 1 < stages ? K::kBlocksPerGroup : last;
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
      const int block = K::kRowBlocks > 1 ? 0 : r;
      if (block >= blocks) break;
      cute::warpgroup_arrive();
      const auto activations = operands.activations_of(block);
#pragma unroll
      for (int j = 0; j < 2 * kHalfSteps; ++j) {
        multiply<typename K::Activation, kN>(weights[r][j / kHalfSteps][j % kHalfSteps],
                                             activations.at(j),
                                             accumulators[K::kRowBlocks > 1 ? r : 0]);
      }
    }
    cute::warpgroup_commit_batch();
    const int current = stage.index;
    stage.advance();
    if (i + 1 < stages) {
      operands = acquire(shared, stage, coords);
      codes = load_codes(operands, coords);
    }
    cute::warpgroup_wait<0>();
    release_stage(shared, current);
  }
}

}  // namespace fusedmoe::cuda::sm90
