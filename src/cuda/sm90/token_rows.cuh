// Tiles whose tokens are wgmma's rows and whose weight rows are its columns (TileShape): the main
// loop of a row group, a warpgroup with all tokens and half of the weight rows. A thread has the
// accumulators of two tokens of each block of 64, t and t + 8; of each slice of 8 weight rows those
// of two neighbours. So to add a K block it needs the scales of two tokens at a time, where with
// weights as rows it needs those of a quarter of the tile's tokens. And a warp has whole rows of
// the output (store_token_rows.cuh).
#pragma once

#include "cuda/sm90/mainloop_stage.cuh"
#include "cuda/sm90/tile_thread.cuh"

namespace fusedmoe::cuda::sm90 {

/// Slices of 8 weight rows of a row group.
template <typename K>
inline constexpr int kGroupSlices = K::kRowBlocks* kSlices;

/// Which weight scales a K block has in a tile.
enum class KBlockScales : std::uint8_t {
  kNone,      ///< and no token scales either
  kTwo,       ///< one for the even slices, one for the odd: GemmParams::two_scales_a_tile
  kOfSlices,  ///< one for each slice
};

/// Before anything is copied: a scale that no K block has stays 1, which leaves the bits of a
/// product as they are. All threads.
template <typename K>
__device__ inline void clear_scales(SharedMemory<K>& shared) {
  float* scales = &shared.scales[0][0][0];
  constexpr int kCount = sizeof(shared.scales) / sizeof(float);
  for (int i = threadIdx.x; i < kCount; i += K::kThreads) scales[i] = 1;
  cutlass::arch::fence_view_async_shared();  // before the bulk copies
}

/// As multiply_promoted(), of so many blocks of 64 tokens. While a row group promotes, the tensor
/// cores work for the other.
template <KBlockScales kScales, int kTokenBlocks, typename K>
__device__ __forceinline__ void multiply_k_blocks(SharedMemory<K>& shared, const GemmParams& gemm,
                                                  const WorkTile& tile, int row_group,
                                                  StageState<K>& stage,
                                                  typename K::Accumulators& accumulators) {
  constexpr bool kTwo = kScales == KBlockScales::kTwo,
                 kOfSlices = kScales == KBlockScales::kOfSlices;
  // Of the thread's, among a stage's token scales.
  int first_token = TokenScaleCopy::offset(tile) + TileThread<K>().token();
  asm volatile("" : "+r"(first_token));  // else it is made anew for each K block
  for (int left = tile.k_end - tile.k_begin; left > 0; --left) {
    wait(&shared.stage_full[stage.index], stage.phase);
    const Descriptor<> weights(
        cute::cast_smem_ptr_to_uint(shared.weights_at(stage.index, row_group * K::kRowBlocks, 0)));
    const std::uint32_t activations =
        cute::cast_smem_ptr_to_uint(shared.activations_at(stage.index, 0));
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
      const Descriptor<> tokens(activations + b * kBlockRows * kSwizzleBytes);
      float sums[K::kAccumulators];
      fence_accumulators(sums);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kSteps<K>; ++j) {
        multiply_apart<typename K::Activation, K::kColumns>(tokens.at(j), weights.at(j), j == 0,
                                                            sums);
      }
      cute::warpgroup_commit_batch();
      const float* of_tokens =
          shared.token_scales_at(stage.index, 0) + b * kBlockRows + first_token;
      const auto* of_slices = reinterpret_cast<const float2*>(
          shared.weight_scales_at(stage.index, 0) + row_group * kGroupSlices<K>);
      float products[2][2];
      if constexpr (kTwo) {
        const float2 two = of_slices[0];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          products[0][t] = two.x * of_tokens[8 * t];
          products[1][t] = two.y * of_tokens[8 * t];
          asm volatile("" : "+f"(products[0][t]), "+f"(products[1][t]));  // before the wait
        }
      }
      cute::warpgroup_wait<0>();
      fence_accumulators(sums);
      const bool is_last = b + 1 == kTokenBlocks;
      if (is_last && !kOfSlices) release_stage(shared, stage.index);
#pragma unroll
      for (int s = 0; s < kGroupSlices<K>; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float scale = 1;
          if constexpr (kTwo) scale = products[s % 2][i / 2];
          if constexpr (kOfSlices) {
            const float2 two = of_slices[s / 2];
            scale = (s % 2 == 0 ? two.x : two.y) * of_tokens[i / 2 * 8];
          }
          accumulators[b][4 * s + i] += sums[4 * s + i] * scale;
        }
      }
      if (is_last && kOfSlices) release_stage(shared, stage.index);
    }
    stage.advance();
  }
}

template <KBlockScales kScales, typename K>
__device__ __forceinline__ void multiply_token_blocks(SharedMemory<K>& shared,
                                                      const GemmParams& gemm, const WorkTile& tile,
                                                      int row_group, StageState<K>& stage,
                                                      typename K::Accumulators& accumulators) {
  static_assert(K::kTokenBlocks == 2);
  if (tile.num_tokens > kBlockRows) {
    multiply_k_blocks<kScales, 2>(shared, gemm, tile, row_group, stage, accumulators);
  } else {
    multiply_k_blocks<kScales, 1>(shared, gemm, tile, row_group, stage, accumulators);
  }
}

/// For a row group behind the last row block.
template <typename K>
__device__ __forceinline__ void pass_stages(SharedMemory<K>& shared, const WorkTile& tile,
                                            StageState<K>& stage) {
  for (int left = tile.k_end - tile.k_begin; left > 0; --left) {
    wait(&shared.stage_full[stage.index], stage.phase);
    release_stage(shared, stage.index);
    stage.advance();
  }
}

template <typename K>
__device__ __forceinline__ void multiply_token_rows(SharedMemory<K>& shared, const GemmParams& gemm,
                                                    const WorkTile& tile, StageState<K>& stage,
                                                    typename K::Accumulators& accumulators) {
#pragma unroll
  for (auto& block : accumulators) {
#pragma unroll
    for (float& accumulator : block) accumulator = 0;
  }
  // Of the warp: what depends on it is the same for all lanes, and in uniform registers.
  const int row_group = __shfl_sync(~0U, TileThread<K>().row_group, 0);
  if (tile.row_block + row_group * K::kRowBlocks >= gemm.row_blocks) {
    return pass_stages(shared, tile, stage);
  }
  if constexpr (K::Operands::kHasKScales) {
    if (gemm.block_scales || gemm.token_scale_pitch > 0) {
      if (gemm.two_scales_a_tile) {
        multiply_token_blocks<KBlockScales::kTwo>(shared, gemm, tile, row_group, stage,
                                                  accumulators);
      } else {
        multiply_token_blocks<KBlockScales::kOfSlices>(shared, gemm, tile, row_group, stage,
                                                       accumulators);
      }
      return;
    }
  }
  multiply_token_blocks<KBlockScales::kNone>(shared, gemm, tile, row_group, stage, accumulators);
}

}  // namespace fusedmoe::cuda::sm90
