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

  /// The K blocks of an item that a K group multiplies: kDepth of each stage, less in the last.
  struct Share {
    int stages;  // of the item
    int last;    // blocks of the last stage for this K group
    __device__ Share(const Item& item, const Place& place) {
      const int blocks = item.k_end - item.k_begin;
      stages = (blocks + Config::kBlocks - 1) / Config::kBlocks;
      const int left = blocks - (stages - 1) * Config::kBlocks - place.k_group * Config::kDepth;
      last = max(0, min(Config::kDepth, left));
    }
    __device__ int blocks(int stage) const { return stage + 1 < stages ? Config::kDepth : last; }
  };

  /// Waits for a stage; what it holds of this thread's row blocks and K group.
  struct Operands {
    const std::uint8_t* record;  // of the first row block; kRecordStride to the next
    Descriptor tokens;
  };
  __device__ static Operands acquire(Shared& shared, const StageState& stage, const Place& place) {
    Barrier::wait(&shared.stage_full[stage.index], stage.phase);
    const int block = place.k_group * Config::kDepth;
    return {record_of(shared, stage.index, place.row_group * kTile.row_blocks, block),
            Descriptor(cute::cast_smem_ptr_to_uint(tokens_of(shared, stage.index, block)))};
  }

  /// Weights as they are: the tensor cores read both operands from shared memory, one stage while
  /// the next is awaited.
  template <int kN>
  __device__ __forceinline__ static void multiply_shared(Shared& shared, const Share& share,
                                                         const Place& place, StageState& stage,
                                                         Sums& sums) {
    if (share.stages == 0) return;  // more splits than K blocks
    int previous = -1;
    for (int i = 0; i < share.stages; ++i) {
      const Operands operands = acquire(shared, stage, place);
      if (share.blocks(i) > 0) {
        cute::warpgroup_arrive();
#pragma unroll
        for (int b = 0; b < kTile.row_blocks; ++b) {
          const Descriptor weights(
              cute::cast_smem_ptr_to_uint(operands.record + b * kRecordStride));
#pragma unroll
          for (int j = 0; j < kRecordK / 16; ++j) {
            multiply<typename Weights::Element, kN>(weights.at(j), operands.tokens.at(j), sums[b]);
          }
        }
      }
      // Empty where the last stage has no block for this K group: the wait counts batches.
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      if (previous >= 0) release(shared, previous);
      previous = stage.index;
      stage.advance();
    }
    cute::warpgroup_wait<0>();
    release(shared, previous);
  }

  /// Weights to be decoded: the codes of a stage are read while the tensor cores work on the stage
  /// before, and decoded while they work for the other warpgroups.
  template <int kN>
  __device__ __forceinline__ static void multiply_decoded(Shared& shared, const Share& share,
                                                          const Place& place, StageState& stage,
                                                          Sums& sums) {
    constexpr int kRecords = kTile.row_blocks * Config::kDepth;
    constexpr int kPitch = kTile.row_blocks > 1 ? kRecordStride : Config::kRecordBytes;
    static_assert(kTile.row_blocks == 1 || Config::kDepth == 1);
    typename Weights::Codes codes[kRecords];
    const auto load = [&](const Operands& operands) {
#pragma unroll
      for (int r = 0; r < kRecords; ++r) {
        codes[r] = Weights::load(operands.record + r * kPitch, place.thread);
      }
    };
    if (share.stages == 0) return;  // more splits than K blocks
    Operands operands = acquire(shared, stage, place);
    load(operands);
    for (int i = 0; i < share.stages; ++i) {
      std::uint32_t weights[kRecords][kRecordK / 16][4];
#pragma unroll
      for (int r = 0; r < kRecords; ++r) Weights::decode(codes[r], weights[r]);
      const int blocks = share.blocks(i);
#pragma unroll
      for (int r = 0; r < kRecords; ++r) {
        const int block = kTile.row_blocks > 1 ? 0 : r;
        if (block >= blocks) break;
        cute::warpgroup_arrive();
        const Descriptor tokens = operands.tokens.after(block * Config::kTokenBytes);
#pragma unroll
        for (int j = 0; j < kRecordK / 16; ++j) {
          multiply<kN>(weights[r][j], tokens.at(j), sums[kTile.row_blocks > 1 ? r : 0]);
        }
      }
      cute::warpgroup_commit_batch();
      const int current = stage.index;
      stage.advance();
      if (i + 1 < share.stages) {
        operands = acquire(shared, stage, place);
        load(operands);
      }
      cute::warpgroup_wait<0>();
      release(shared, current);
    }
  }

  /// Widths of wgmma that are compiled: every 16 columns, but few where tiles that narrow are rare.
  static constexpr int kFirstWidth = kTile.max_tokens <= 32    ? 8
                                     : kTile.max_tokens <= 64  ? 16
                                     : kTile.max_tokens <= 128 ? 32
                                                               : 64;
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
    const Share share(item, place);
    if constexpr (is_decoded(Weights::kFormat)) {
      multiply_decoded<kN>(shared, share, place, stage, sums);
    } else {
      multiply_shared<kN>(shared, share, place, stage, sums);
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
