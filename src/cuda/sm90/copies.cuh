// Copies of the fused MLP kernel's operands from global memory: packed blocks of weights by bulk
// copies, token rows by tensor copies in the 128-byte swizzle.
#pragma once

#include <cutlass/arch/memory_sm80.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "cuda/sm90/bulk_copy.cuh"
#include "cuda/sm90/kernel.cuh"
#include "cuda/sm90/tensor_map.h"

namespace fusedmoe::cuda::sm90 {

/// Tensor maps of the activations of both GEMMs, by the rows of a box: 64, 32, 16, 8 of a K block.
/// A copy costs much the same whatever it brings. With Kernel::kWideCopies only the last, and first
/// the one of 8 rows of a whole stage.
inline constexpr int kRowBoxes = 4;
struct ActivationMaps {
  CUtensorMap boxes[2][kRowBoxes];
  static constexpr int rows(int box) { return kMostRows >> box; }
  /// The largest box of which a tile has the rows.
  static constexpr int first_box(int max_tokens) {
    int box = 0;
    while (rows(box) > max_tokens) ++box;
    return box;
  }
};

/// Brings the first packed blocks of a tile to the L2, for the thread block that will draw it.
template <typename K>
__device__ inline void prefetch_weights(const FusedMlpParams& p, const WorkTile& tile) {
  if (tile.gemm < 0 || is_row_pass<K>(tile)) return;
  const GemmParams& gemm = p.gemms[tile.gemm];
  const int bytes =
      min(K::kStages * K::kBlocksPerStage, tile.k_end - tile.k_begin) * K::kBlockBytes;
  if (bytes == 0) return;  // more splits than K blocks
  for (int b = 0; b < K::kTileRowBlocks; ++b) {
    const std::int64_t row_block = tile.row_block + b;
    if (row_block >= gemm.row_blocks) break;
    cute::SM90_BULK_COPY_G2S::PREFETCH::copy(
        static_cast<const std::uint8_t*>(gemm.weights) + tile.expert * gemm.expert_bytes +
            (row_block * gemm.k_blocks + tile.k_begin) * K::kBlockBytes,
        bytes);
  }
}

/// The token scales of a K block that a bulk copy brings for a tile: it begins at a multiple of 4
/// scales, 16 bytes. The pitch is such a multiple, too, so the copy ends within it.
struct TokenScaleCopy {
  /// Scales before the tile's first.
  __device__ static int offset(const WorkTile& tile) { return tile.first_row % 4; }
  __device__ static int bytes(const WorkTile& tile) {
    return (offset(tile) + tile.num_tokens + 3) / 4 * 4 * int{sizeof(float)};
  }
};

/// Weights of a tile, stage by stage; for one thread.
template <typename K>
__device__ inline void copy_weights(SharedMemory<K>& shared, const FusedMlpParams& p,
                                    const WorkTile& tile, StageState<K>& stage) {
  const GemmParams& gemm = p.gemms[tile.gemm];
  const int row_blocks = max(0, min(K::kTileRowBlocks, gemm.row_blocks - tile.row_block));
  const std::int64_t row_pitch = static_cast<std::int64_t>(gemm.k_blocks) * K::kBlockBytes;
  const auto* weights = static_cast<const std::uint8_t*>(gemm.weights) +
                        tile.expert * gemm.expert_bytes + tile.row_block * row_pitch +
                        tile.k_begin * K::kBlockBytes;
  const std::int32_t* token_tiles = shared.tile_prefix + tile.expert;
  const bool read_once = token_tiles[1] - token_tiles[0] == 1;
  const auto hint = p.weights_evict_first && read_once ? kEvictFirst : kEvictNormal;
  for (int left = tile.k_end - tile.k_begin; left > 0; left -= K::kBlocksPerStage) {
    const int bytes = min(K::kBlocksPerStage, left) * K::kBlockBytes;
    std::uint64_t* full = &shared.stage_full[stage.index];
    std::uint8_t* target = shared.weights_at(stage.index, 0, 0);
    wait(&shared.stage_free[stage.index], stage.phase ^ 1);
    Barrier::arrive_and_expect_tx(full, row_blocks * bytes);
#pragma unroll
    for (int b = 0; b < K::kTileRowBlocks; ++b) {
      if (b >= row_blocks) break;
      bulk_copy(target + b * K::kRowBlockPitch, weights + b * row_pitch, bytes, full, hint);
    }
    weights += bytes;
    stage.advance();
  }
}

/// One tensor copy, to all blocks of the cluster.
template <typename K>
__device__ inline void copy_box(const CUtensorMap* map, std::uint64_t* full, void* target,
                                int column, int row) {
  if constexpr (K::kCluster == 1) {
    cute::SM90_TMA_LOAD_2D::copy(map, full, kEvictLast, target, column, row);
  } else {
    constexpr std::uint16_t kAll = (1 << K::kCluster) - 1;
    cute::SM90_TMA_LOAD_MULTICAST_2D::copy(map, full, kAll, kEvictLast, target, column, row);
  }
}

/// `count` rows, a multiple of 8, of a K block in as few copies as there are boxes for; the blocks
/// of a cluster take turns.
template <typename K>
__device__ inline void copy_k_block(const CUtensorMap* boxes, std::uint64_t* full,
                                    std::uint8_t* target, int column, int first_row, int count,
                                    int rank) {
  int turn = 0;
  const auto copy = [&](int box, int n) {
    if (turn == rank) {
      copy_box<K>(&boxes[box], full, target + n / kRowUnit * K::kUnitPitch, column, first_row + n);
    }
    turn = turn + 1 < K::kCluster ? turn + 1 : 0;
  };
  int n = 0;
  for (; count - n >= kMostRows; n += kMostRows) copy(0, n);
#pragma unroll
  for (int box = 1; box < kRowBoxes; ++box) {
    if (count & ActivationMaps::rows(box)) {
      copy(box, n);
      n += ActivationMaps::rows(box);
    }
  }
}

/// Scales of a tile's K blocks, of weights and of token rows, stage by stage; for one warp. With
/// tokens as rows those of token rows come by copy_activations(). promote() reads the scales of two
/// tokens at once, so the first one of a tile must lie at a multiple of 8 bytes in shared memory. A
/// bulk copy could not see to that, as an expert's rows may begin at any place of the source.
template <typename K>
__device__ inline void copy_scales(SharedMemory<K>& shared, const GemmParams& gemm,
                                   const WorkTile& tile, StageState<K>& stage) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int row_blocks = min(K::kTileRowBlocks, gemm.row_blocks - tile.row_block);
  const auto first_block =
      static_cast<std::int64_t>(tile.expert) * gemm.row_blocks + tile.row_block;
  for (int block = tile.k_begin; block < tile.k_end; block += K::kBlocksPerStage) {
    wait(&shared.stage_free[stage.index], stage.phase ^ 1);
    const int k_blocks = min(K::kBlocksPerStage, tile.k_end - block);
    for (int b = 0; b < k_blocks; ++b) {
      if (gemm.block_scales && lane < K::kWeightScales && lane / kSlices < row_blocks) {
        const std::int64_t from = (first_block + lane / kSlices) * gemm.k_blocks + block + b;
        cutlass::arch::cp_async<4>(&shared.weight_scales_at(stage.index, b)[lane],
                                   &gemm.block_scales[from * kSlices + lane % kSlices]);
      }
      if (K::kTokensAreRows || gemm.token_scale_pitch == 0) continue;
      const float* from = gemm.token_scales + tile.first_row + (block + b) * gemm.token_scale_pitch;
      float* to = shared.token_scales_at(stage.index, b);
      for (int n = lane; n < tile.num_tokens; n += 32) cutlass::arch::cp_async<4>(&to[n], &from[n]);
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(&shared.stage_full[stage.index]);
    stage.advance();
  }
}

/// Brings the token rows of a tile, stage by stage; for one thread. In tiles with tokens as rows
/// (TileShape) it brings the scales of these tokens, too, by bulk copies.
template <typename K>
__device__ inline void copy_activations(SharedMemory<K>& shared, const FusedMlpParams& p,
                                        const CUtensorMap* boxes, const WorkTile& tile, int rank,
                                        StageState<K>& stage) {
  const GemmParams& gemm = p.gemms[tile.gemm];
  const int k = gemm.k;
  const int count = (tile.num_tokens + kRowUnit - 1) / kRowUnit * kRowUnit;
  const int bytes = count * kSwizzleBytes;  // of a K block
  const bool scaled = K::kTokensAreRows && K::Operands::kHasKScales && gemm.token_scale_pitch > 0;
  const int scale_bytes = scaled ? TokenScaleCopy::bytes(tile) : 0;
  for (int block = tile.k_begin; block < tile.k_end; block += K::kBlocksPerStage) {
    std::uint64_t* full = &shared.stage_full[stage.index];
    wait(&shared.stage_free[stage.index], stage.phase ^ 1);
    // Boxes of whole K blocks do not know where the last ends.
    if (K::kWideCopies && (k % K::kBlockK == 0 || (block + K::kBlocksPerStage) * K::kBlockK <= k)) {
      Barrier::arrive_and_expect_tx(full, K::kBlocksPerStage * bytes);
      for (int n = 0; n < count; n += kRowUnit) {
        cute::SM90_TMA_LOAD_3D::copy(
            boxes, full, kEvictLast,
            shared.activations_at(stage.index, 0) + n / kRowUnit * K::kUnitPitch, 0,
            tile.first_row + n, block);
      }
    } else {
      const int k_blocks = min(K::kBlocksPerStage, tile.k_end - block);
      Barrier::arrive_and_expect_tx(full, k_blocks * bytes + scale_bytes);
      if (scaled) {
        const float* from = gemm.token_scales + tile.first_row - TokenScaleCopy::offset(tile) +
                            block * gemm.token_scale_pitch;
        bulk_copy(shared.token_scales_at(stage.index, 0), from, scale_bytes, full, kEvictLast);
      }
      for (int b = 0; b < k_blocks; ++b) {
        std::uint8_t* target = shared.activations_at(stage.index, b);
        const int column = (block + b) * K::kBlockK;
        if constexpr (K::kWideCopies) {
          for (int n = 0; n < count; n += kRowUnit) {
            copy_box<K>(&boxes[kRowBoxes - 1], full, target + n / kRowUnit * K::kUnitPitch, column,
                        tile.first_row + n);
          }
        } else {
          copy_k_block<K>(boxes, full, target, column, tile.first_row, count, rank);
        }
      }
    }
    stage.advance();
  }
}

}  // namespace fusedmoe::cuda::sm90
