// The main loops of weights that are decoded to FP8.
#pragma once

#include "cuda/sm90/mainloop_stage.cuh"
#include "cuda/sm90/promote.cuh"

namespace fusedmoe::cuda::sm90 {

/// Weights that are decoded to FP8. Their K blocks have no scales, so the tensor cores sum up a
/// group of kPromotedBlocks of them before they are added in fp32. The second half of a K block is
/// decoded while the first is multiplied. The first K block of a group stands apart in the code:
/// its first instruction begins the sums, which nobody has to clear.
template <int kN, typename K>
__device__ __forceinline__ void multiply_decoded_fp8(SharedMemory<K>& shared, const WorkTile& tile,
                                                     const WarpgroupCoords<K>& coords,
                                                     StageState<K>& stage,
                                                     typename K::Accumulators& accumulators) {
  using Operands = typename K::Operands;
  static_assert(K::kRowBlocks == 1 && !Operands::kHasKScales);
  constexpr int kHalfSteps = kSteps<K> / 2;
  const int last = last_blocks(tile, coords);
  int left = num_stages<K>(tile);
  float sums[kN / 2];
  const auto multiply_block = [&](auto is_first) {
    const StageOperands<K> operands = acquire(shared, stage, coords);
    if (left > 1 || last > 0) {
      const auto activations = operands.activations_of(0);
      const auto codes =
          Operands::load(StagedBlock{operands.weights}, coords.thread(), shared.tables);
      std::uint32_t weights[kSteps<K>][4];
      fence_accumulators(sums);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 words = Operands::words(codes.block, codes.thread, half);
#pragma unroll
        for (int step = half * kHalfSteps; step < (half + 1) * kHalfSteps; ++step) {
          Operands::decode_step(codes, words, step, weights[step]);
        }
        cute::warpgroup_arrive();
#pragma unroll
        for (int step = half * kHalfSteps; step < (half + 1) * kHalfSteps; ++step) {
          multiply_apart<typename K::Activation, kN>(weights[step], activations.at(step),
                                                     is_first && step == 0, sums);
        }
        cute::warpgroup_commit_batch();
      }
      cute::warpgroup_wait<0>();
      fence_accumulators(sums);
    }
    release_stage(shared, stage.index);
    stage.advance();
    --left;
  };
  while (left > 1 || (left == 1 && last > 0)) {
    multiply_block(std::true_type());
    while (left % Operands::kPromotedBlocks != 0) multiply_block(std::false_type());
    promote<K, kN>(sums, 0, {}, 0, accumulators[0]);
  }
  if (left > 0) {  // a stage without a block for this K group
    acquire(shared, stage, coords);
    release_stage(shared, stage.index);
    stage.advance();
  }
}

/// The same with each half of a K block decoded while the half before is multiplied, across K
/// blocks, too. It pays where a half takes longer to decode than to multiply.
template <int kN, typename K>
__device__ __forceinline__ void multiply_decoded_ahead(SharedMemory<K>& shared,
                                                       const WorkTile& tile,
                                                       const WarpgroupCoords<K>& coords,
                                                       StageState<K>& stage,
                                                       typename K::Accumulators& accumulators) {
  using Operands = typename K::Operands;
  static_assert(K::kRowBlocks == 1 && K::kKGroups == 1 && !Operands::kHasKScales);
  constexpr int kHalfSteps = kSteps<K> / 2;
  int left = num_stages<K>(tile);
  float sums[kN / 2];
  std::uint32_t weights[2][kHalfSteps][4];
  const auto multiply_block = [&](auto is_first) {
    const StageOperands<K> operands = acquire(shared, stage, coords);
    const auto activations = operands.activations_of(0);
    const auto codes =
        Operands::load(StagedBlock{operands.weights}, coords.thread(), shared.tables);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = Operands::words(codes.block, codes.thread, half);
#pragma unroll
      for (int j = 0; j < kHalfSteps; ++j) {
        Operands::decode_step(codes, words, half * kHalfSteps + j, weights[half][j]);
      }
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kHalfSteps; ++j) {
        const int step = half * kHalfSteps + j;
        multiply_apart<typename K::Activation, kN>(weights[half][j], activations.at(step),
                                                   is_first && step == 0, sums);
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
    }
    if (!is_first) release_previous(shared, stage);  // sooner, ptxas serializes the instructions
    stage.advance();
    --left;
  };
  while (left > 0) {
    fence_accumulators(sums);
    multiply_block(std::true_type());
    while (left % Operands::kPromotedBlocks != 0) multiply_block(std::false_type());
    cute::warpgroup_wait<0>();
    fence_accumulators(sums);
    release_previous(shared, stage);
    promote<K, kN>(sums, 0, {}, 0, accumulators[0]);
  }
}

}  // namespace fusedmoe::cuda::sm90
