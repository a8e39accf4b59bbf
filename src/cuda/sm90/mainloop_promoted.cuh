// The main loop of FP8 weights.
#pragma once

#include "cuda/sm90/mainloop_stage.cuh"
#include "cuda/sm90/promote.cuh"

namespace fusedmoe::cuda::sm90 {

/// FP8: its instructions keep some 13 bits of a sum, so each K block is summed up apart and added
/// in fp32, times scales where there are any. That is hidden by the other warpgroups' instructions.
template <int kN, typename K>
__device__ __forceinline__ void multiply_promoted(SharedMemory<K>& shared, const FusedMlpParams& p,
                                                  const WorkTile& tile,
                                                  const WarpgroupCoords<K>& coords,
                                                  StageState<K>& stage,
                                                  typename K::Accumulators& accumulators) {
  constexpr int kFirst = kN < K::kPromotedColumns ? kN : K::kPromotedColumns;
  static_assert(kN - kFirst <= kFirst);
  const int stages = num_stages<K>(tile), last = last_blocks(tile, coords);
  for (int i = 0; i < stages; ++i) {
    const bool has_block = i + 1 < stages || last > 0;
    const StageOperands<K> operands = acquire(shared, stage, coords);
    if (has_block) {
      const auto activations = operands.activations_of(0);
      const KScales scales = k_scales(shared, p.gemms[tile.gemm], coords, stage.index);
      const auto multiply_columns = [&](int b, int first, auto width) {
        float sums[kFirst / 2];
        const Descriptor<> weights(
            cute::cast_smem_ptr_to_uint(operands.weights + b * K::kRowBlockPitch));
        fence_accumulators(sums);
        cute::warpgroup_arrive();
#pragma unroll
        for (int j = 0; j < kSteps<K>; ++j) {
          const std::uint64_t tokens = activations.at(j) + (first * kSwizzleBytes >> 4);
          multiply_apart<typename K::Activation, width>(weights.at(j), tokens, j == 0, sums);
        }
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        fence_accumulators(sums);
        promote<K, width>(sums, first, scales, b, accumulators[b]);
      };
#pragma unroll
      for (int b = 0; b < K::kRowBlocks; ++b) {
        multiply_columns(b, 0, std::integral_constant<int, kFirst>());
        if constexpr (kN > kFirst) {
          multiply_columns(b, kFirst, std::integral_constant<int, kN - kFirst>());
        }
      }
    }
    release_stage(shared, stage.index);
    stage.advance();
  }
}

}  // namespace fusedmoe::cuda::sm90
