// The copies of a tile's operands from global to shared memory, by all threads.
#pragma once

#include <cute/arch/util.hpp>

#include "cuda/device/cp_async.cuh"
#include "cuda/sm80/kernel.cuh"

namespace fusedmoe::cuda::sm80 {

template <typename K>
__device__ inline int num_stages(const WorkTile& tile) {
  return max(1, (tile.k_end - tile.k_begin + K::kStageBlocks - 1) / K::kStageBlocks);
}

/// A thread's part of the copies of one tile, stage by stage.
template <typename K>
class TileCopies {
 public:
  __device__ __forceinline__ void start(const FusedMlpParams& p, const WorkTile& tile) {
    const GemmParams& gemm = p.gemms[tile.gemm];
    constexpr int kElement = sizeof(typename K::Activation);
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    gemm_ = tile.gemm;
    rows_ = chunks((tile.first_row + row) * row_pitch(gemm) + tile.k_begin * K::kRowBytes) + chunk;
    rows_left_ = tile.num_tokens - row;
    // FP8 numbers as f16 lie in whole groups of 16.
    const int k = K::kIsFp8 ? static_cast<int>(ceil_div(gemm.k, 16)) * 16 : gemm.k;
    bytes_left_ = k * kElement - tile.k_begin * K::kRowBytes - chunk * 16;
    weights_ = first_block(gemm, tile);
    row_blocks_ = min(K::kTileRowBlocks, gemm.row_blocks - tile.row_block);
    blocks_left_ = tile.k_end - tile.k_begin;
    stages_left_ = num_stages<K>(tile);
    if constexpr (K::kHasKScales) start_scales(gemm, tile);
  }
  __device__ __forceinline__ int stages_left() const { return stages_left_; }

  /// The next stage, to shared memory from `stage` on.
  __device__ __forceinline__ void copy(const FusedMlpParams& p, std::uint32_t stage) {
    const GemmParams& gemm = p.gemms[gemm_];
    const int blocks = min(K::kStageBlocks, blocks_left_);
    // The last columns may end inside a chunk. Elsewhere nobody looks for an end.
    if (bytes_left_ >= K::kStageBlocks * K::kRowBytes) {
      copy_rows(gemm, stage, K::kStageBlocks * K::kRowParts,
                [](std::uint32_t to, const std::uint8_t* from, int) { copy_async(to, from); });
    } else {
      copy_rows(gemm, stage, blocks * K::kRowParts,
                [&](std::uint32_t to, const std::uint8_t* from, int part) {
                  copy_async(to, from, max(0, min(16, bytes_left_ - part * kSwizzleBytes)));
                });
    }
    copy_weights(gemm, stage + K::kWeightsOffset, blocks);
    if constexpr (K::kHasKScales) copy_scales(gemm, stage + K::kScalesOffset, blocks);
    rows_ += chunks(K::kStageBlocks * K::kRowBytes);
    bytes_left_ -= K::kStageBlocks * K::kRowBytes;
    weights_ += K::kStageBlocks;
    blocks_left_ -= K::kStageBlocks;
    --stages_left_;
  }

  /// Brings the packed blocks of a tile's first stages to the L2, while its rows are awaited.
  __device__ static void prefetch(const FusedMlpParams& p, const WorkTile& tile) {
    const GemmParams& gemm = p.gemms[tile.gemm];
    const std::uint8_t* weights = block_at(gemm, first_block(gemm, tile));
    const int blocks = min(p.stages * K::kStageBlocks, tile.k_end - tile.k_begin);
    for (int b = 0; b < min(K::kTileRowBlocks, gemm.row_blocks - tile.row_block); ++b) {
      for (int at = threadIdx.x * 128; at < blocks * K::kBlockBytes; at += K::kThreads * 128) {
        prefetch_l2(weights + at);
      }
      weights += static_cast<std::int64_t>(gemm.k_blocks) * K::kBlockBytes;
    }
  }

 private:
  __device__ static std::uint32_t chunks(std::int64_t bytes) {
    return static_cast<std::uint32_t>(bytes / 16);
  }
  __device__ static std::int64_t row_pitch(const GemmParams& gemm) {
    return gemm.row_pitch * std::int64_t{sizeof(typename K::Activation)};
  }
  __device__ static std::uint32_t first_block(const GemmParams& gemm, const WorkTile& tile) {
    return static_cast<std::uint32_t>(
        (tile.expert * gemm.row_blocks + tile.row_block) * gemm.k_blocks + tile.k_begin);
  }
  __device__ static const std::uint8_t* block_at(const GemmParams& gemm, std::uint32_t block) {
    return static_cast<const std::uint8_t*>(gemm.weights) + std::int64_t{block} * K::kBlockBytes;
  }

  /// Token rows in the 128-byte swizzle by copy(to, from, part), zeros behind their last column.
  /// Rows behind the tile's are left as they are: nobody stores what is made of them.
  template <typename Copy>
  __device__ __forceinline__ void copy_rows(const GemmParams& gemm, std::uint32_t stage, int parts,
                                            const Copy& copy) const {
    constexpr int kRows = K::kThreads / 8;  // at a time, a multiple of 8: a thread's swizzle stays
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const std::uint32_t to = stage + row * kSwizzleBytes + (chunk ^ row % 8) * 16;
    const std::uint8_t* from =
        static_cast<const std::uint8_t*>(gemm.activations) + std::int64_t{rows_} * 16;
#pragma unroll
    for (int i = 0; i < static_cast<int>(ceil_div(K::kMaxTokens, kRows)); ++i) {
      if (i * kRows < rows_left_) {
#pragma unroll
        for (int part = 0; part < K::kStageBlocks * K::kRowParts; ++part) {
          if (part >= parts) break;
          copy(to + part * K::kPartBytes + i * kRows * kSwizzleBytes, from + part * kSwizzleBytes,
               part);
        }
      }
      from += kRows * row_pitch(gemm);
    }
  }

  /// The K blocks of a stage are neighbours.
  __device__ __forceinline__ void copy_weights(const GemmParams& gemm, std::uint32_t stage,
                                               int blocks) const {
    constexpr int kChunks = K::kBlockBytes / 16;
    static_assert(K::kBlockBytes % 16 == 0);
    const std::uint32_t to = stage + threadIdx.x * 16;
    const int count = blocks * kChunks;
#pragma unroll
    for (int b = 0; b < K::kTileRowBlocks; ++b) {
      if (b >= row_blocks_) break;
      const std::uint8_t* from = block_at(gemm, weights_ + b * gemm.k_blocks) + threadIdx.x * 16;
#pragma unroll
      for (int i = 0; i < static_cast<int>(ceil_div(kChunks * K::kStageBlocks, K::kThreads)); ++i) {
        if (static_cast<int>(threadIdx.x) + i * K::kThreads < count) {
          copy_async(to + b * K::kRowBlockPitch + i * K::kThreads * 16,
                     from + i * K::kThreads * 16);
        }
      }
    }
  }

  /// A thread copies one scale of each K block: of a token, or of a slice of weight rows.
  __device__ __forceinline__ void start_scales(const GemmParams& gemm, const WorkTile& tile) {
    static_assert(K::kScales <= K::kThreads);
    const int token = threadIdx.x, slice = token - K::kMaxTokens;
    if (is_token()) {
      has_scale_ = gemm.token_scale_pitch != 0 && token < tile.num_tokens;
      scale_ = tile.first_row + token;
    } else {
      const int row_block = tile.expert * gemm.row_blocks + tile.row_block + slice / kSlices;
      has_scale_ = gemm.block_scales && slice / kSlices < row_blocks_;
      scale_ = row_block * gemm.k_blocks * kSlices + slice % kSlices;
    }
    scale_ += tile.k_begin * scale_pitch(gemm);
  }
  /// 1 where there are none.
  __device__ __forceinline__ void copy_scales(const GemmParams& gemm, std::uint32_t stage,
                                              int blocks) {
    if (threadIdx.x >= K::kScales) return;
    const float* scales = is_token() ? gemm.token_scales : gemm.block_scales;
    std::uint32_t to = stage + threadIdx.x * int{sizeof(float)};
    for (int b = 0; b < blocks; ++b) {
      if (has_scale_) {
        copy_async_4(to, scales + scale_);
        scale_ += scale_pitch(gemm);
      } else {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(1.0F) : "memory");
      }
      to += K::kScales * int{sizeof(float)};
    }
  }
  __device__ static bool is_token() {
    return threadIdx.x < K::kMaxTokens;
  }
  /// Between K blocks.
  __device__ static std::uint32_t scale_pitch(const GemmParams& gemm) {
    return is_token() ? static_cast<std::uint32_t>(gemm.token_scale_pitch) : kSlices;
  }

  bool has_scale_ = false;
  std::uint32_t scale_ = 0;  // the next
  int gemm_ = 0;
  // Where the next are, in chunks of 16 bytes and in packed blocks: what takes 64 bits takes two
  // registers.
  std::uint32_t rows_ = 0, weights_ = 0;
  int rows_left_ = 0, bytes_left_ = 0, row_blocks_ = 0, blocks_left_ = 0, stages_left_ = 0;
};

}  // namespace fusedmoe::cuda::sm80
