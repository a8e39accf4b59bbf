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
    const int blocks = item.k_end - item.k_begin;
    const int left =
        blocks - (num_stages(item) - 1) * Config::kBlocks - place.k_group() * Config::kDepth;
    return max(0, min(Config::kDepth, left));
  }

  /// Waits for a stage; what it holds of this thread's row blocks and K group.
  struct Operands {
    const std::uint8_t* record;  // of the first row block; kRecordStride to the next
    Descriptor tokens;
  };
  __device__ static Operands acquire(Shared& shared, const StageState& stage, const Place& place) {
    Barrier::wait(&shared.stage_full[stage.index], stage.phase);
    const int block = place.k_group() * Config::kDepth;
    return {record_of(shared, stage.index, place.row_group() * kTile.row_blocks, block),
            Descriptor(cute::cast_smem_ptr_to_uint(tokens_of(shared, stage.index, block)))};
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
      cute::warpgroup_arrive();
#pragma unroll
      for (int b = 0; b < kTile.row_blocks; ++b) {
        const Descriptor weights(cute::cast_smem_ptr_to_uint(operands.record + b * kRecordStride));
#pragma unroll
        for (int j = 0; j < kRecordK / 16; ++j) {
          multiply<typename Weights::Element, kN>(weights.at(j), operands.tokens.at(j), sums[b]);
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
      Barrier::wait(&shared.stage_full[stage.index], stage.phase);
    }
    cute::warpgroup_wait<0>();
    if (!is_first) release_previous(shared, stage);
    release(shared, stage.index);
    stage.advance();
  }

  /// Weights to be decoded, half a record at a time: where the compiler finds the registers, while
  /// the tensor cores work on the half before, whose operands are the other of two sets.
  template <int kN>
  __device__ __forceinline__ static void multiply_decoded(Shared& shared, const Item& item,
                                                          const Place& place, StageState& stage,
                                                          Sums& sums) {
    constexpr int kRecords = kTile.row_blocks * Config::kDepth;  // of a stage
    constexpr int kPitch = kTile.row_blocks > 1 ? kRecordStride : Config::kRecordBytes;
    constexpr int kSteps = kRecordK / 16 / 2;  // of half a record
    constexpr bool kOverlap = Config::kDepth > 1;
    constexpr int kSets = kOverlap ? 2 : 2 * kRecords;
    static_assert(kTile.row_blocks == 1 || Config::kDepth == 1);
    const int stages = num_stages(item);
    if (stages == 0) return;  // more splits than K blocks
    typename Weights::Codes codes[kRecords];
    std::uint32_t weights[kSets][kSteps][4];
    Operands operands = acquire(shared, stage, place);
    const auto load = [&] {
#pragma unroll
      for (int r = 0; r < kRecords; ++r) {
        codes[r] = Weights::load(operands.record + r * kPitch, place.thread());
      }
    };
    load();
    const auto multiply_half = [&](int r, int half) {
      const int block = kTile.row_blocks > 1 ? 0 : r;
      const Descriptor tokens = operands.tokens.after(block * Config::kTokenBytes);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        multiply<kN>(weights[(2 * r + half) % kSets][j], tokens.at(half * kSteps + j),
                     sums[kTile.row_blocks > 1 ? r : 0]);
      }
      cute::warpgroup_commit_batch();
    };
    // The first `records` of the stage; before() when the stage before is read.
    const auto multiply_stage = [&](int records, const auto& before) {
      if constexpr (kOverlap) {
#pragma unroll
        for (int r = 0; r < kRecords; ++r) {
          if (r >= records) break;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            Weights::decode(codes[r], half, weights[half]);
            multiply_half(r, half);
            cute::warpgroup_wait<1>();
            if (r == 0 && half == 0) before();
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kSets; ++i) Weights::decode(codes[i / 2], i % 2, weights[i]);
#pragma unroll
        for (int i = 0; i < kSets; ++i) multiply_half(i / 2, i % 2);
      }
    };
    const int last = last_blocks(item, place);
    const int full_stages = last < Config::kDepth ? stages - 1 : stages;
    for (int i = 0; i < full_stages; ++i) {
      multiply_stage(kRecords, [&] {
        if (i > 0) release_previous(shared, stage);
      });
      stage.advance();
      if (i + 1 < stages) {
        operands = acquire(shared, stage, place);
        load();
      }
      if constexpr (!kOverlap) {
        cute::warpgroup_wait<0>();
        release_previous(shared, stage);
      }
    }
    cute::warpgroup_wait<0>();
    if (kOverlap && full_stages > 0) release_previous(shared, stage);
    if (Config::kBlocks > 1 && full_stages < stages) {
      multiply_stage(last, [] {});
      cute::warpgroup_wait<0>();
      release(shared, stage.index);
      stage.advance();
    }
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

  /// Sums of one tile.
  __device__ __forceinline__ static void multiply_tile(Shared& shared, const Item& item,
                                                       const Place& place, StageState& stage,
                                                       Sums& sums) {
#pragma unroll
    for (int b = 0; b < kTile.row_blocks; ++b) {
#pragma unroll
      for (int i = 0; i < kTile.max_tokens / 2; ++i) sums[b][i] = 0;
      fence_sums(sums[b]);
    }
    multiply_narrowest(shared, item, place, stage, sums);
#pragma unroll
    for (int b = 0; b < kTile.row_blocks; ++b) fence_sums(sums[b]);
  }
};

}  // namespace fusedmoe::cuda
