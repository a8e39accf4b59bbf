// The main loop of the fused MLP kernel: a warpgroup's accumulators of one tile.
#pragma once

#include "cuda/sm90/mainloop_decoded.cuh"
#include "cuda/sm90/mainloop_decoded_fp8.cuh"
#include "cuda/sm90/mainloop_mma_sync.cuh"
#include "cuda/sm90/mainloop_promoted.cuh"
#include "cuda/sm90/mainloop_shared.cuh"

namespace fusedmoe::cuda::sm90 {

/// Widths of wgmma that are compiled: every 16 columns, but few where tiles that narrow are rare.
template <typename K>
inline constexpr int kFirstWidth = K::kMaxTokens <= 32   ? 8
                                   : K::kMaxTokens <= 64 ? 32
                                                         : 64;
template <typename K>
constexpr int next_width(int width) {
  if (width < 64) return 2 * width;
  return width + (K::kPromotes ? 32 : 16);
}

/// With the narrowest that covers the tile, so that padding costs little.
template <int kN, typename K>
__device__ __forceinline__ void multiply_narrowest(SharedMemory<K>& shared, const FusedMlpParams& p,
                                                   const WorkTile& tile,
                                                   const WarpgroupCoords<K>& coords,
                                                   StageState<K>& stage,
                                                   typename K::Accumulators& accumulators) {
  if constexpr (kN < K::kMaxTokens) {
    if (tile.num_tokens > kN) {
      multiply_narrowest<next_width<K>(kN)>(shared, p, tile, coords, stage, accumulators);
      return;
    }
  }
  if constexpr (K::kDecodesAhead) {
    multiply_decoded_ahead<kN>(shared, tile, coords, stage, accumulators);
  } else if constexpr (K::kPromotes && K::Operands::kDecodes) {
    multiply_decoded_fp8<kN>(shared, tile, coords, stage, accumulators);
  } else if constexpr (K::kPromotes) {
    multiply_promoted<kN>(shared, p, tile, coords, stage, accumulators);
  } else if constexpr (K::Operands::kDecodes) {
    multiply_decoded<kN>(shared, tile, coords, stage, accumulators);
  } else {
    multiply_shared<kN>(shared, tile, coords, stage, accumulators);
  }
}

/// Tokens up to which multiply_mma_sync() is faster. Tiles up to 32 tokens have nothing else, nor
/// registers for it.
template <typename K>
inline constexpr int kMmaSyncColumns = K::kSet.mma_sync_tokens == 0 ? 0
                                       : K::kHasEpilogueWarpgroup   ? K::kMaxTokens
                                       : K::kMaxTokens <= 64        ? K::kSet.mma_sync_tokens
                                                                    : 0;

/// As multiply_narrowest().
template <int kN, typename K>
__device__ __forceinline__ void multiply_narrowest_mma_sync(
    SharedMemory<K>& shared, const WorkTile& tile, const WarpgroupCoords<K>& coords,
    StageState<K>& stage, typename K::Accumulators& accumulators) {
  if constexpr (kN < kMmaSyncColumns<K>) {
    if (tile.num_tokens > kN) {
      multiply_narrowest_mma_sync<kN + 8>(shared, tile, coords, stage, accumulators);
      return;
    }
  }
  multiply_mma_sync<kN>(shared, tile, coords, stage, accumulators);
}

/// The accumulators of one tile.
template <typename K>
__device__ __forceinline__ void multiply_tile(SharedMemory<K>& shared, const FusedMlpParams& p,
                                              const WorkTile& tile,
                                              const WarpgroupCoords<K>& coords,
                                              StageState<K>& stage,
                                              typename K::Accumulators& accumulators) {
#pragma unroll
  for (int b = 0; b < K::kRowBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < K::kAccumulators; ++i) accumulators[b][i] = 0;
    fence_accumulators(accumulators[b]);
  }
  if (tile.num_tokens <= kMmaSyncColumns<K> && !p.batch_invariant) {
    if constexpr (0 != kMmaSyncColumns<K>) {
      multiply_narrowest_mma_sync<8>(shared, tile, coords, stage, accumulators);
    }
  } else if constexpr (kMmaSyncColumns<K> < K::kMaxTokens) {
    multiply_narrowest<kFirstWidth<K>>(shared, p, tile, coords, stage, accumulators);
  }
#pragma unroll
  for (int b = 0; b < K::kRowBlocks; ++b) fence_accumulators(accumulators[b]);
}

}  // namespace fusedmoe::cuda::sm90
