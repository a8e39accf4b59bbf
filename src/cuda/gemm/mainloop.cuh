// The main loop of the fused MLP kernel: a warpgroup's accumulators of one tile.
#pragma once

#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/operands/codes.h"

namespace fusedmoe::cuda {

template <typename K>
__device__ inline int num_stages(const WorkTile& tile) {
  return (tile.k_end - tile.k_begin + K::kBlocksPerStage - 1) / K::kBlocksPerStage;
}

/// K blocks of the last stage of a tile that a K group multiplies; of the others kBlocksPerGroup.
template <typename K>
__device__ inline int last_blocks(const WorkTile& tile, const WarpgroupCoords<K>& coords) {
  if constexpr (K::kBlocksPerStage == 1) return 1;
  const int blocks = tile.k_end - tile.k_begin;
  const int left = blocks - (num_stages<K>(tile) - 1) * K::kBlocksPerStage -
                   coords.k_group() * K::kBlocksPerGroup;
  return max(0, min(K::kBlocksPerGroup, left));
}

/// To all blocks of the cluster: each loads token rows for this one. Every thread arrives for
/// itself; one for its warp is not faster, and racecheck does not know what it stands for.
template <typename K>
__device__ inline void release_stage(SharedMemory<K>& shared, int stage) {
  if constexpr (K::kCluster == 1) {
    arrive(&shared.stage_free[stage]);
  } else {
    asm volatile("" ::: "memory");
    for (int r = 0; r < K::kCluster; ++r) Barrier::arrive(&shared.stage_free[stage], r, true);
  }
}

/// The stage before this one, which the tensor cores have read.
template <typename K>
__device__ inline void release_previous(SharedMemory<K>& shared, const StageState<K>& stage) {
  release_stage(shared, (stage.index == 0 ? K::kStages : stage.index) - 1);
}

/// What a full stage holds of a warpgroup's row blocks and K group.
template <typename K>
struct StageOperands {
  const std::uint8_t* weights;      // of the first row block; kRowBlockPitch to the next
  const std::uint8_t* activations;  // kKBlockPitch to those of the next K block
  __device__ Descriptor<K::kUnitPitch> activations_of(int block) const {
    return Descriptor<K::kUnitPitch>(
        cute::cast_smem_ptr_to_uint(activations + block * K::kKBlockPitch));
  }
};
template <typename K>
__device__ inline StageOperands<K> acquire(SharedMemory<K>& shared, const StageState<K>& stage,
                                           const WarpgroupCoords<K>& coords) {
  wait(&shared.stage_full[stage.index], stage.phase);
  const int block = coords.k_group() * K::kBlocksPerGroup;
  return {shared.weights_at(stage.index, coords.row_group() * K::kRowBlocks, block),
          shared.activations_at(stage.index, block)};
}

/// wgmma instructions of a K block.
template <typename K>
inline constexpr int kSteps = K::kBlockK / K::Operands::kInstructionK;

/// A thread's codes of a stage, by row blocks or K blocks.
template <typename K>
struct StageCodes {
  static constexpr int kCount = K::kRowBlocks * K::kBlocksPerGroup;
  typename K::Operands::Codes blocks[kCount];
};
template <typename K>
__device__ inline StageCodes<K> load_codes(const StageOperands<K>& operands,
                                           const WarpgroupCoords<K>& coords) {
  constexpr int kPitch = K::kRowBlocks > 1 ? K::kRowBlockPitch : K::kBlockBytes;
  StageCodes<K> codes;
#pragma unroll
  for (int r = 0; r < StageCodes<K>::kCount; ++r) {
    codes.blocks[r] =
        K::Operands::load(StagedBlock{operands.weights + r * kPitch}, coords.thread());
  }
  return codes;
}

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

/// The scales of a K block in shared memory for a warp, and whether there are any.
struct KScales {
  const float* weights;  // of the warp's first row block: two slices
  const float* tokens;
  bool has_weights;
  bool has_tokens;
};
template <typename K>
__device__ __forceinline__ KScales k_scales(SharedMemory<K>& shared, const GemmParams& gemm,
                                            const WarpgroupCoords<K>& coords, int stage) {
  return {shared.weight_scales_at(stage, coords.k_group()) +
              coords.row_group() * K::kRowBlocks * kSlices + coords.thread() / 32 * 2,
          shared.token_scales_at(stage, coords.k_group()), gemm.block_scales != nullptr,
          gemm.token_scale_pitch > 0};
}

/// accumulators += sums of a row block times scales, if there are any. Each case is code of its own
/// up to the end: otherwise the compiler keeps the products of all columns in registers.
template <typename K, int kN, int kCount, int kAll>
__device__ __forceinline__ void promote(const float (&sums)[kCount], int first_column,
                                        const KScales& scales, int row_block,
                                        float (&accumulators)[kAll]) {
  float* to = &accumulators[first_column / 2];
  // `factors_of` gives those of rows r of tokens t and t + 1, then of rows r + 8.
  const auto add = [&](const auto& factors_of) {
#pragma unroll
    for (int i = 0; i < kN / 2; i += 4) {
      const float4 factors = factors_of(i);
      to[i] += sums[i] * factors.x;
      to[i + 1] += sums[i + 1] * factors.y;
      to[i + 2] += sums[i + 2] * factors.z;
      to[i + 3] += sums[i + 3] * factors.w;
      if constexpr (K::Operands::kHasKScales) {
#pragma unroll
        for (int t = 0; t < 4; ++t) asm volatile("" : "+f"(to[i + t]));
      }
    }
  };
  const auto ones = [](int) { return make_float4(1, 1, 1, 1); };
  if constexpr (!K::Operands::kHasKScales) {
    add(ones);
    return;
  }
  if (!scales.has_weights && !scales.has_tokens) {
    add(ones);
    return;
  }
  float2 rows = make_float2(1, 1);
  if (scales.has_weights) {
    rows = *reinterpret_cast<const float2*>(scales.weights + row_block * kSlices);
  }
  if (!scales.has_tokens) {
    add([&](int) { return make_float4(rows.x, rows.x, rows.y, rows.y); });
    return;
  }
  add([&](int i) {
    const auto tokens = *reinterpret_cast<const float2*>(scales.tokens + first_column + 2 * i +
                                                         threadIdx.x % 4 * 2);
    return make_float4(rows.x * tokens.x, rows.x * tokens.y, rows.y * tokens.x, rows.y * tokens.y);
  });
}

/// Lets two warpgroups use the tensor cores in turns, see Kernel::kTakesTurns: while one
/// multiplies, the other promotes. Without it both would promote at the same time, and the tensor
/// cores would have nothing to do. Each warpgroup waits for its turn at a named barrier of its own;
/// the other one arrives there to pass the turn on.
template <typename K>
struct Turns {
  __device__ static __forceinline__ void wait(const WarpgroupCoords<K>& coords) {
    if constexpr (K::kTakesTurns) {
      cutlass::arch::NamedBarrier::sync(256, K::kRowGroups + coords.warpgroup);
    }
  }
  /// To the other warpgroup. Before the first tile the second one passes the turn to the first.
  __device__ static __forceinline__ void pass(const WarpgroupCoords<K>& coords) {
    if constexpr (K::kTakesTurns) {
      cutlass::arch::NamedBarrier::arrive(256, K::kRowGroups + (coords.warpgroup ^ 1));
    }
  }
};

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
        Turns<K>::wait(coords);
        fence_accumulators(sums);
        cute::warpgroup_arrive();
#pragma unroll
        for (int j = 0; j < kSteps<K>; ++j) {
          const std::uint64_t tokens = activations.at(j) + (first * kSwizzleBytes >> 4);
          multiply_apart<typename K::Activation, width>(weights.at(j), tokens, j == 0, sums);
        }
        cute::warpgroup_commit_batch();
        Turns<K>::pass(coords);
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

/// Weights that are decoded to FP8. Their K blocks have no scales, so the tensor cores sum up
/// kPromotedBlocks of them before they are added in fp32. The second half of a K block is decoded
/// while the first is multiplied.
template <int kN, typename K>
__device__ __forceinline__ void multiply_decoded_fp8(SharedMemory<K>& shared, const WorkTile& tile,
                                                     const WarpgroupCoords<K>& coords,
                                                     StageState<K>& stage,
                                                     typename K::Accumulators& accumulators) {
  using Operands = typename K::Operands;
  static_assert(K::kRowBlocks == 1 && !Operands::kHasKScales);
  constexpr int kHalfSteps = kSteps<K> / 2;
  const int last = last_blocks(tile, coords);
  for (int left = num_stages<K>(tile); left > 0;) {
    float sums[kN / 2] = {};
    do {
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
            multiply_apart<typename K::Activation, kN>(weights[step], activations.at(step), false,
                                                       sums);
          }
          cute::warpgroup_commit_batch();
        }
        cute::warpgroup_wait<0>();
        fence_accumulators(sums);
      }
      release_stage(shared, stage.index);
      stage.advance();
    } while (--left % Operands::kPromotedBlocks != 0);
    promote<K, kN>(sums, 0, {}, 0, accumulators[0]);
  }
}

/// The same with one step decoded while the one before is multiplied, across K blocks, too. It pays
/// where a step takes longer to decode than to multiply.
template <int kN, typename K>
__device__ __forceinline__ void multiply_decoded_ahead(SharedMemory<K>& shared,
                                                       const WorkTile& tile,
                                                       const WarpgroupCoords<K>& coords,
                                                       StageState<K>& stage,
                                                       typename K::Accumulators& accumulators) {
  using Operands = typename K::Operands;
  static_assert(K::kRowBlocks == 1 && K::kKGroups == 1 && !Operands::kHasKScales);
  for (int left = num_stages<K>(tile), blocks; left > 0; left -= blocks) {
    float sums[kN / 2] = {};
    fence_accumulators(sums);
    blocks = (left - 1) % Operands::kPromotedBlocks + 1;  // as above, so with the same bits
    for (int i = 0; i < blocks; ++i) {
      const StageOperands<K> operands = acquire(shared, stage, coords);
      const auto activations = operands.activations_of(0);
      const auto codes =
          Operands::load(StagedBlock{operands.weights}, coords.thread(), shared.tables);
      std::uint32_t weights[2][4];
      uint4 words;
#pragma unroll
      for (int step = 0; step < kSteps<K>; ++step) {
        if (step % 2 == 0) words = Operands::words(codes.block, codes.thread, step / 2);
        Operands::decode_step(codes, words, step, weights[step % 2]);
        cute::warpgroup_arrive();
        multiply_apart<typename K::Activation, kN>(weights[step % 2], activations.at(step), false,
                                                   sums);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<1>();
      }
      if (i > 0) release_previous(shared, stage);  // sooner, ptxas serializes the instructions
      stage.advance();
    }
    cute::warpgroup_wait<0>();
    fence_accumulators(sums);
    release_previous(shared, stage);
    promote<K, kN>(sums, 0, {}, 0, accumulators[0]);
  }
}

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

/// The same of few tokens, each warp by itself: wgmma takes as long for 8 columns as for 64.
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
inline constexpr int kMmaSyncColumns = K::Operands::kMmaSyncTokens == 0 ? 0
                                       : K::kHasEpilogueWarpgroup       ? K::kMaxTokens
                                       : K::kMaxTokens <= 64 ? K::Operands::kMmaSyncTokens
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
    if constexpr (kMmaSyncColumns < K >> 0) {
      multiply_narrowest_mma_sync<8>(shared, tile, coords, stage, accumulators);
    }
  } else if constexpr (kMmaSyncColumns<K> < K::kMaxTokens) {
    multiply_narrowest<kFirstWidth<K>>(shared, p, tile, coords, stage, accumulators);
  }
#pragma unroll
  for (int b = 0; b < K::kRowBlocks; ++b) fence_accumulators(accumulators[b]);
}

}  // namespace fusedmoe::cuda
