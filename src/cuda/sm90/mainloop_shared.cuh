// The main loop of weights as they are stored.
#pragma once

#include "cuda/sm90/mainloop_stage.cuh"

namespace fusedmoe::cuda::sm90 {

/// Weights as they are: the tensor cores read both operands from shared memory, one stage while the
/// next is awaited. The last stage, which may have no block for this K group, stands apart: with
/// branches around them wgmma groups would be waited for one by one.
template <int kN, typename K>
__device__ __forceinline__ void multiply_shared(SharedMemory<K>& shared, const WorkTile& tile,
                                                const WarpgroupCoords<K>& coords,
                                                StageState<K>& stage,
                                                typename K::Accumulators& accumulators) {
  if (num_stages<K>(tile) == 0) return;  // more splits than K blocks
  const auto multiply_stage = [&] {
    const StageOperands<K> operands = acquire(shared, stage, coords);
    const auto activations = operands.activations_of(0);
    cute::warpgroup_arrive();
#pragma unroll
    for (int b = 0; b < K::kRowBlocks; ++b) {
      const Descriptor<> weights(
          cute::cast_smem_ptr_to_uint(operands.weights + b * K::kRowBlockPitch));
#pragma unroll
      for (int j = 0; j < kSteps<K>; ++j) {
        multiply<typename K::Activation, kN>(weights.at(j), activations.at(j), accumulators[b]);
      }
    }
    cute::warpgroup_commit_batch();
  };
  bool is_first = true;
  for (int left = num_stages<K>(tile) - 1; left > 0; --left) {
    multiply_stage();
    cute::warpgroup_wait<1>();
    if (!is_first) release_previous(shared, stage);
    is_first = false;
    stage.advance();
  }
  if (last_blocks(tile, coords) > 0) {
    multiply_stage();
  } else {
    wait(&shared.stage_full[stage.index], stage.phase);
  }
  cute::warpgroup_wait<0>();
  if (!is_first) release_previous(shared, stage);
  release_stage(shared, stage.index);
  stage.advance();
}

}  // namespace fusedmoe::cuda::sm90
