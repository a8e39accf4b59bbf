// The multiplying role of the grouped GEMM kernel: the sums of one tile, in registers.
#pragma once

#include <type_traits>

#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/tile.cuh"
#include "cuda/gemm/weights.cuh"

namespace fusedmoe::cuda {

template <typename Weights, TileConfig kTile>
struct Multiplier : GemmTypes<Weights, kTile> {
  using Base = GemmTypes<Weights, kTile>;
  using Base::kRecordStride;
  using Base::record_of;
  using Base::release;
  using Base::tokens_of;
  using typename Base::Config;
  using typename Base::Place;
  using typename Base::Shared;
  using typename Base::StageState;
  using typename Base::Sums;

  __device__ static int num_stages(const Item& item) {
    return (item.k_end - item.k_begin + Config::kBlocks - 1) / Config::kBlocks;
  }
  /// K blocks of the last stage of an item that a K group multiplies; of the others kDepth.
  __device__ static int last_blocks(const Item& item, const Place& place) {
    if constexpr (Config::kBlocks == 1) return 1;
    const int blocks = item.k_end - item.k_begin;
    const int left =
        blocks - (num_stages(item) - 1) * Config::kBlocks - place.k_group() * Config::kDepth;
    return max(0, min(Config::kDepth, left));
  }

  /// What a stage holds of a thread's row blocks and K group, once it is full.
  struct Operands {
    const std::uint8_t* record;  // of the first row block; kRecordStride to the next
    const std::uint8_t* tokens;  // kTokenPitch to those of the next K block
    __device__ Descriptor<Config::kRowPitch> tokens_of(int block) const {
      return Descriptor<Config::kRowPitch>(
          cute::cast_smem_ptr_to_uint(tokens + block * Config::kTokenPitch));
    }
  };
  __device__ static Operands acquire(Shared& shared, const StageState& stage, const Place& place) {
    wait(&shared.stage_full[stage.index], stage.phase);
    const int block = place.k_group() * Config::kDepth;
    return {record_of(shared, stage.index, place.row_group() * kTile.row_blocks, block),
            tokens_of(shared, stage.index, block)};
  }

  static constexpr int kHalfSteps = kRecordK / 16 / 2;  // of wgmma and mma, in half a record

  /// A thread's codes of a stage, by row blocks or K blocks.
  struct StageCodes {
    static constexpr int kCount = kTile.row_blocks * Config::kDepth;
    typename Weights::Codes records[kCount];
  };
  __device__ static StageCodes load_codes(const Operands& operands, const Place& place) {
    constexpr int kPitch = kTile.row_blocks > 1 ? kRecordStride : Config::kRecordBytes;
    StageCodes codes;
#pragma unroll
    for (int r = 0; r < StageCodes::kCount; ++r) {
      codes.records[r] = Weights::load(operands.record + r * kPitch, place.thread());
    }
    return codes;
  }

  /// The stage before this one, which the tensor cores have read.
  __device__ static void release_previous(Shared& shared, const StageState& stage) {
    release(shared, (stage.index == 0 ? Config::kStages : stage.index) - 1);
  }

  /// Weights as they are: the tensor cores read both operands from shared memory, one stage while
  /// the next is awaited. The last stage, which may have no block for this K group, is apart: with
  /// branches around them wgmma groups would be waited for one by one.
  template <int kN>
  __device__ __forceinline__ static void multiply_shared(Shared& shared, const Item& item,
                                                         const Place& place, StageState& stage,
                                                         Sums& sums) {
    if (num_stages(item) == 0) return;  // more splits than K blocks
    const auto multiply_stage = [&] {
      const Operands operands = acquire(shared, stage, place);
      const auto tokens = operands.tokens_of(0);
      cute::warpgroup_arrive();
#pragma unroll
      for (int b = 0; b < kTile.row_blocks; ++b) {
        const Descriptor<> weights(
            cute::cast_smem_ptr_to_uint(operands.record + b * kRecordStride));
#pragma unroll
        for (int j = 0; j < kRecordK / 16; ++j) {
          multiply<typename Weights::Element, kN>(weights.at(j), tokens.at(j), sums[b]);
        }
      }
      cute::warpgroup_commit_batch();
    };
    bool is_first = true;
    for (int left = num_stages(item) - 1; left > 0; --left) {
      multiply_stage();
      cute::warpgroup_wait<1>();
      if (!is_first) release_previous(shared, stage);
      is_first = false;
      stage.advance();
    }
    if (last_blocks(item, place) > 0) {
      multiply_stage();
    } else {
      wait(&shared.stage_full[stage.index], stage.phase);
    }
    cute::warpgroup_wait<0>();
    if (!is_first) release_previous(shared, stage);
    release(shared, stage.index);
    stage.advance();
  }

  /// Weights to be decoded: the codes of a stage are read while the tensor cores work on the stage
  /// before, and decoded while they work for the other warpgroups.
  template <int kN>
  __device__ __forceinline__ static void multiply_decoded(Shared& shared, const Item& item,
                                                          const Place& place, StageState& stage,
                                                          Sums& sums) {
    constexpr int kRecords = kTile.row_blocks * Config::kDepth;  // of a stage
    static_assert(kTile.row_blocks == 1 || Config::kDepth == 1);
    const int stages = num_stages(item);
    if (stages == 0) return;  // more splits than K blocks
    const int last = last_blocks(item, place);
    Operands operands = acquire(shared, stage, place);
    StageCodes codes = load_codes(operands, place);
    for (int i = 0; i < stages; ++i) {
      std::uint32_t weights[kRecords][2][kHalfSteps][4];
#pragma unroll
      for (int r = 0; r < kRecords; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Weights::decode(codes.records[r], half, weights[r][half]);
        }
      }
      const int blocks = i + 1 < stages ? Config::kDepth : last;
#pragma unroll
      for (int r = 0; r < kRecords; ++r) {
        const int block = kTile.row_blocks > 1 ? 0 : r;
        if (block >= blocks) break;
        cute::warpgroup_arrive();
        const auto tokens = operands.tokens_of(block);
#pragma unroll
        for (int j = 0; j < 2 * kHalfSteps; ++j) {
          multiply<kN>(weights[r][j / kHalfSteps][j % kHalfSteps], tokens.at(j),
                       sums[kTile.row_blocks > 1 ? r : 0]);
        }
      }
      cute::warpgroup_commit_batch();
      const int current = stage.index;
      stage.advance();
      if (i + 1 < stages) {
        operands = acquire(shared, stage, place);
        codes = load_codes(operands, place);
      }
      cute::warpgroup_wait<0>();
      release(shared, current);
    }
  }

  /// The same of few columns, each warp by itself: wgmma takes as long for 8 columns as for 64.
  template <int kN>
  __device__ __forceinline__ static void multiply_mma_sync(Shared& shared, const Item& item,
                                                           const Place& place, StageState& stage,
                                                           Sums& sums) {
    static_assert(kTile.row_blocks == 1);
    const int stages = num_stages(item);
    if (stages == 0) return;  // more splits than K blocks
    // Of a lane in a matrix of 8 tokens by 16 bytes, of four next to each other (see Descriptor).
    const int lane = place.thread() % 32;
    int lane_bytes = lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
    asm volatile("" : "+r"(lane_bytes));  // a register is cheaper than to make it each time
    const auto multiply_record = [&](const Operands& operands, const StageCodes& codes, int r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t weights[kHalfSteps][4];
        Weights::decode(codes.records[r], half, weights);
#pragma unroll
        for (int n = 0; n < kN / 8; ++n) {
          const std::uint8_t* tokens =
              operands.tokens + r * Config::kTokenPitch + n * Config::kRowPitch;
          multiply_8(weights, tokens + (lane_bytes ^ half * 64), &sums[0][4 * n]);
        }
      }
    };
    const auto multiply_stage = [&](int records) {
      const Operands operands = acquire(shared, stage, place);
      const StageCodes codes = load_codes(operands, place);
#pragma unroll
      for (int r = 0; r < Config::kDepth; ++r) {
        if (r < records) multiply_record(operands, codes, r);
      }
      release(shared, stage.index);
      stage.advance();
    };
    for (int left = stages - 1; left > 0; --left) multiply_stage(Config::kDepth);
    multiply_stage(last_blocks(item, place));
  }

  /// Widths that are compiled: every 16 columns, but few where tiles that narrow are rare.
  static constexpr int kFirstWidth = kTile.max_tokens <= 32 ? 8 : kTile.max_tokens <= 64 ? 32 : 64;
  static constexpr int next_width(int width) {
    return width == 8 ? 16 : width == 32 ? 64 : width + 16;
  }

  /// With the narrowest that covers the tile, so that padding costs little.
  template <int kN = kFirstWidth>
  __device__ __forceinline__ static void multiply_narrowest(Shared& shared, const Item& item,
                                                            const Place& place, StageState& stage,
                                                            Sums& sums) {
    if constexpr (kN < kTile.max_tokens) {
      if (item.num_tokens > kN) {
        multiply_narrowest<next_width(kN)>(shared, item, place, stage, sums);
        return;
      }
    }
    if constexpr (is_decoded(Weights::kFormat)) {
      multiply_decoded<kN>(shared, item, place, stage, sums);
    } else {
      multiply_shared<kN>(shared, item, place, stage, sums);
    }
  }

  /// Columns up to which multiply_mma_sync() is faster. Tiles up to 32 tokens have nothing else,
  /// nor registers for it.
  static constexpr int kMmaSyncColumns = !is_decoded(Weights::kFormat)   ? 0
                                         : Config::kHasEpilogueWarpgroup ? kTile.max_tokens
                                         : kTile.max_tokens <= 64        ? kMmaSyncTokens
                                                                         : 0;

  /// As multiply_narrowest().
  template <int kN = 8>
  __device__ __forceinline__ static void multiply_narrowest_mma_sync(
      Shared& shared, const Item& item, const Place& place, StageState& stage, Sums& sums) {
    if constexpr (kN < kMmaSyncColumns) {
      if (item.num_tokens > kN) {
        multiply_narrowest_mma_sync<kN + 8>(shared, item, place, stage, sums);
        return;
      }
    }
    multiply_mma_sync<kN>(shared, item, place, stage, sums);
  }

  /// Sums of one tile.
  __device__ __forceinline__ static void multiply_tile(Shared& shared, const GroupedGemm& p,
                                                       const Item& item, const Place& place,
                                                       StageState& stage, Sums& sums) {
#pragma unroll
    for (int b = 0; b < kTile.row_blocks; ++b) {
#pragma unroll
      for (int i = 0; i < kTile.max_tokens / 2; ++i) sums[b][i] = 0;
      fence_sums(sums[b]);
    }
    if (item.num_tokens <= kMmaSyncColumns && !p.batch_invariant) {
      if constexpr (kMmaSyncColumns > 0) {
        multiply_narrowest_mma_sync(shared, item, place, stage, sums);
      }
    } else if constexpr (kMmaSyncColumns < kTile.max_tokens) {
      multiply_narrowest(shared, item, place, stage, sums);
    }
#pragma unroll
    for (int b = 0; b < kTile.row_blocks; ++b) fence_sums(sums[b]);
  }
};

}  // namespace fusedmoe::cuda
