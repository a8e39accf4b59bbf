// The main loop of few tokens: mma.sync, each warp by itself.
#pragma once

#include "cuda/device/mma_sync.cuh"
#include "cuda/sm90/mainloop_stage.cuh"

namespace fusedmoe::cuda::sm90 {

/// As multiply_decoded() of few tokens, each warp by itself: wgmma takes as long for 8 columns as
/// for 64.
template <int kN, typename K>
__device__ __forceinline__ void multiply_mma_sync(SharedMemory<K>& shared, const WorkTile& tile,
                                                  const WarpgroupCoords<K>& coords,
                                                  StageState<K>& stage,
                                                  typename K::Accumulators& accumulators) {
  static_assert(K::kRowBlocks == 1);
  constexpr int kHalfSteps = kSteps<K> / 2;
  const int stages = num_stages<K>(tile);
  if (stages == 0) return;  // more splits than K blocks
  // Of a lane in a matrix of 8 tokens by 16 bytes, of four next to each other (see Descriptor).
  const int lane = coords.thread() % 32;
  int lane_bytes = lane % 8 * kSwizzleBytes + (lane / 8 ^ lane % 8) * 16;
  asm volatile("" : "+r"(lane_bytes));  // a register is cheaper than to make it each time
  const auto multiply_block = [&](const StageOperands<K>& operands, const StageCodes<K>& codes,
                                  int r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t weights[kHalfSteps][4];
      K::Operands::decode(codes.blocks[r], half, weights);
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
        const std::uint8_t* activations =
            operands.activations + r * K::kKBlockPitch + n * K::kUnitPitch;
        multiply_8<typename K::Activation>(weights,
                                           activations + (lane_bytes ^ half * kSwizzleBytes / 2),
                                           &accumulators[0][4 * n]);
      }
    }
  };
  const auto multiply_stage = [&](int blocks) {
    const StageOperands<K> operands = acquire(shared, stage, coords);
    const StageCodes<K> codes = load_codes(operands, coords);
#pragma unroll
    for (int r = 0; r < K::kBlocksPerGroup; ++r) {
      if (r < blocks) multiply_block(operands, codes, r);
    }
    release_stage(shared, stage.index);
    stage.advance();
  };
  for (int left = stages - 1; left > 0; --left) multiply_stage(K::kBlocksPerGroup);
  multiply_stage(last_blocks(tile, coords));
}

}  // namespace fusedmoe::cuda::sm90
