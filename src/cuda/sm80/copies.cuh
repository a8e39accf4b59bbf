// The copies of a tile's operands from global to shared memory, by all threads.
#pragma once

#include <cute/arch/util.hpp>

#include "cuda/device/cp_async.cuh"
#include "cuda/sm80/kernel.cuh"

namespace fusedmoe::cuda::sm80 {

template <typename K>
__device__ inline int num_stages(const WorkTile& tile) {
  return (tile.k_end - tile.k_begin + K::kStageBlocks - 1) / K::kStageBlocks;
}

/// A thread's part of the copies of one tile, stage by stage.
template <typename K>
class TileCopies {
 public:
  __device__ __forceinline__ void start(const FusedMlpParams& p, const WorkTile& tile) {
    const GemmParams& gemm = p.gemms[tile.gemm];
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    rows_ = static_cast<const std::uint8_t*>(gemm.activations) +
            (tile.first_row + row) * row_pitch(gemm) + tile.k_begin * K::kRowBytes + chunk * 16;
    row_step_ = static_cast<std::uint32_t>(kRowsAtOnce * row_pitch(gemm));
    rows_left_ = tile.num_tokens - row;
    weights_ = first_block(gemm, tile) + threadIdx.x * 16;
    const bool has_all = tile.row_block + K::kTileRowBlocks <= gemm.row_blocks;
    block_step_ = has_all ? row_block_pitch(gemm) : 0;
    stages_left_ = num_stages<K>(tile);
    if constexpr (K::kHasKScales) start_scales(gemm, tile);
  }
  __device__ __forceinline__ int stages_left() const { return stages_left_; }

  /// The next stage of the tile, to shared memory from `stage` on.
  __device__ __forceinline__ void copy(const FusedMlpParams& p, const WorkTile& tile,
                                       std::uint32_t stage) {
    int blocks = K::kStageBlocks;
    if (stages_left_ > 1) {
      copy_rows(stage, blocks,
                [](std::uint32_t to, const std::uint8_t* from, int) { copy_async(to, from); });
    } else {  // the last columns may end inside a chunk
      blocks = tile.k_end - tile.k_begin - (num_stages<K>(tile) - 1) * K::kStageBlocks;
      const int bytes = row_bytes_from(p.gemms[tile.gemm], tile.k_end - blocks);
      copy_rows(stage, blocks, [&](std::uint32_t to, const std::uint8_t* from, int part) {
        copy_async(to, from, max(0, min(16, bytes - part * kSwizzleBytes)));
      });
    }
    copy_weights(stage + K::kWeightsOffset, blocks);
    if constexpr (K::kHasKScales) copy_scales(p, stage + K::kScalesOffset, blocks);
    rows_ += K::kStageBlocks * K::kRowBytes;
    weights_ += K::kStageBlocks * K::kBlockBytes;
    --stages_left_;
  }

  /// Brings the packed blocks of a tile's first stages to the L2, while its rows are awaited.
  __device__ static void prefetch(const FusedMlpParams& p, const WorkTile& tile) {
    const GemmParams& gemm = p.gemms[tile.gemm];
    const std::uint8_t* weights = first_block(gemm, tile);
    const int blocks = min(p.stages * K::kStageBlocks, tile.k_end - tile.k_begin);
    for (int b = 0; b < min(K::kTileRowBlocks, gemm.row_blocks - tile.row_block); ++b) {
      for (int at = threadIdx.x * 128; at < blocks * K::kBlockBytes; at += K::kThreads * 128) {
        prefetch_l2(weights + at);
      }
      weights += row_block_pitch(gemm);
    }
  }

 private:
  // Token rows that all threads copy at a time, a multiple of 8: a thread's swizzle stays.
  static constexpr int kRowsAtOnce = K::kThreads / 8;
  static_assert(K::kTileRowBlocks <= 2, "block_step_ leads to the last");

  __device__ static std::int64_t row_pitch(const GemmParams& gemm) {
    return gemm.row_pitch * std::int64_t{sizeof(typename K::Activation)};
  }
  __device__ static std::uint32_t row_block_pitch(const GemmParams& gemm) {
    return static_cast<std::uint32_t>(gemm.k_blocks * K::kBlockBytes);
  }
  __device__ static const std::uint8_t* first_block(const GemmParams& gemm, const WorkTile& tile) {
    const std::int64_t row_block = std::int64_t{tile.expert} * gemm.row_blocks + tile.row_block;
    return static_cast<const std::uint8_t*>(gemm.weights) +
           (row_block * gemm.k_blocks + tile.k_begin) * K::kBlockBytes;
  }

  /// Of a token row, from the thread's chunk in K block `block` on.
  __device__ static int row_bytes_from(const GemmParams& gemm, int block) {
    constexpr int kElement = sizeof(typename K::Activation);
    // FP8 numbers as f16 lie in whole groups of 16.
    const int k = K::kFp8AsF16 ? static_cast<int>(ceil_div(gemm.k, 16)) * 16 : gemm.k;
    const int chunk = threadIdx.x % 8;
    return k * kElement - block * K::kRowBytes - chunk * 16;
  }

  /// Token rows in the 128-byte swizzle by copy(to, from, part), zeros behind their last column.
  /// Rows behind the tile's are left as they are: nobody stores what is made of them.
  template <typename Copy>
  __device__ __forceinline__ void copy_rows(std::uint32_t stage, int blocks,
                                            const Copy& copy) const {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const std::uint32_t to = stage + row * kSwizzleBytes + (chunk ^ row % 8) * 16;
    const std::uint8_t* from = rows_;
#pragma unroll
    for (int i = 0; i < static_cast<int>(ceil_div(K::kMaxTokens, kRowsAtOnce)); ++i) {
      if (i * kRowsAtOnce < rows_left_) {
#pragma unroll
        for (int part = 0; part < K::kStageBlocks * K::kRowParts; ++part) {
          if (part >= blocks * K::kRowParts) break;
          copy(to + part * K::kPartBytes + i * kRowsAtOnce * kSwizzleBytes,
               from + part * kSwizzleBytes, part);
        }
      }
      from += row_step_;
    }
  }

  /// The K blocks of a stage are neighbours. Where a tile has one row block less, its first is
  /// copied twice: nobody stores what is made of it.
  __device__ __forceinline__ void copy_weights(std::uint32_t stage, int blocks) const {
    constexpr int kOfBlock = K::kBlockBytes / 16, kChunks = K::kStageBlocks * kOfBlock;
    static_assert(K::kBlockBytes % 16 == 0);
    const int chunks = K::kStageBlocks == 1 ? kChunks : blocks * kOfBlock;
    const std::uint32_t to = stage + threadIdx.x * 16;
    const std::uint8_t* from = weights_;
#pragma unroll
    for (int b = 0; b < K::kTileRowBlocks; ++b) {
#pragma unroll
      for (int first = 0; first < kChunks; first += K::kThreads) {
        const bool is_inside = K::kStageBlocks == 1 && first + K::kThreads <= kChunks;
        if (is_inside || static_cast<int>(threadIdx.x) + first < chunks) {
          copy_async(to + b * K::kRowBlockPitch + first * 16, from + first * 16);
        }
      }
      from += block_step_;
    }
  }

  /// A thread copies one scale of each K block: of a token, or of a slice of weight rows.
  __device__ __forceinline__ void start_scales(const GemmParams& gemm, const WorkTile& tile) {
    gemm_ = tile.gemm;
    static_assert(K::kScales <= K::kThreads);
    const int token = threadIdx.x, slice = token - K::kMaxTokens;
    if (is_token()) {
      has_scale_ = gemm.token_scale_pitch != 0 && token < tile.num_tokens;
      scale_ = tile.first_row + token;
    } else {
      const int row_block = tile.expert * gemm.row_blocks + tile.row_block + slice / kSlices;
      has_scale_ = gemm.block_scales && tile.row_block + slice / kSlices < gemm.row_blocks;
      scale_ = row_block * gemm.k_blocks * kSlices + slice % kSlices;
    }
    scale_ += tile.k_begin * scale_pitch(gemm);
  }
  /// 1 where there are none.
  __device__ __forceinline__ void copy_scales(const FusedMlpParams& p, std::uint32_t stage,
                                              int blocks) {
    if (threadIdx.x >= K::kScales) return;
    const GemmParams& gemm = p.gemms[gemm_];
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
  int gemm_ = 0;             // of scales
  const std::uint8_t* rows_ = nullptr;
  const std::uint8_t* weights_ = nullptr;
  std::uint32_t row_step_ = 0, block_step_ = 0;  // bytes from a copy to the next
  int rows_left_ = 0, stages_left_ = 0;
};

}  // namespace fusedmoe::cuda::sm80
