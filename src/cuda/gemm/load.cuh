// The loading roles of the grouped GEMM kernel, a thread each: weights, and rows.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "cuda/device/tensor_map.h"
#include "cuda/gemm/claim.cuh"

namespace fusedmoe::cuda {

/// Rows of one tensor copy: many where a tile has them, else few.
inline constexpr int kFewRows = 8, kManyRows = 64;

/// Of the rows of both GEMMs.
struct RowMaps {
  CUtensorMap few[2], many[2];
};

template <typename Weights, TileConfig kTile>
struct Loaders : Claims<Weights, kTile> {
  using Base = Claims<Weights, kTile>;
  using Base::kRecordStride;
  using Base::make_item;
  using Base::record_of;
  using Base::share_number;
  using Base::tokens_of;
  using typename Base::Config;
  using typename Base::ItemState;
  using typename Base::Shared;
  using typename Base::StageState;

  /// Brings the first records of an item to the L2, for the block that will claim it.
  __device__ static void prefetch_weights(Shared& shared, const GroupedGemm& p, int number,
                                          int rank) {
    const Item item = make_item(shared, p, number, rank);
    if (item.phase < 0) return;
    const GemmPhase& phase = p.phases[item.phase];
    const int bytes =
        min(Config::kStages * Config::kBlocks, item.k_end - item.k_begin) * Config::kRecordBytes;
    if (bytes == 0) return;  // more splits than K blocks
    for (int b = 0; b < kTile.tile_row_blocks(); ++b) {
      const std::int64_t row_block = item.row_block + b;
      if (row_block >= phase.row_blocks) break;
      cute::SM90_BULK_COPY_G2S::PREFETCH::copy(
          static_cast<const std::uint8_t*>(phase.weights) + item.expert * phase.expert_bytes +
              (row_block * phase.k_blocks + item.k_begin) * Config::kRecordBytes,
          bytes);
    }
  }

  /// One thread: claims items and streams their weights.
  __device__ static void load_weights(Shared& shared, const GroupedGemm& p, int rank) {
    StageState stage;
    ItemState slot;
    if (p.topk_ids) {
      // Measured: half a microsecond less for weights as they are, six more for MXFP4.
      if constexpr (!is_decoded(Weights::kFormat)) {
        prefetch_weights(shared, p, static_cast<int>(blockIdx.x) / kTile.cluster, rank);
      }
      cudaGridDependencySynchronize();  // for the counters
    }
    int claimed = rank == 0 ? atomicAdd(p.counters, 1) : 0;
    while (true) {
      const int number = share_number(shared, slot, rank, claimed);
      wait(&shared.item_free[slot.index], slot.phase ^ 1);
      const Item item = make_item(shared, p, number, rank);
      shared.items[slot.index] = item;
      Barrier::arrive(&shared.item_full[slot.index]);
      slot.advance();
      if (item.phase < 0) return;
      if (rank == 0) claimed = atomicAdd(p.counters, 1);  // its latency hides behind the stream

      const GemmPhase& phase = p.phases[item.phase];
      const int row_blocks =
          max(0, min(kTile.tile_row_blocks(), phase.row_blocks - item.row_block));
      const std::int64_t row_pitch =
          static_cast<std::int64_t>(phase.k_blocks) * Config::kRecordBytes;
      const auto* weights = static_cast<const std::uint8_t*>(phase.weights) +
                            item.expert * phase.expert_bytes + item.row_block * row_pitch +
                            item.k_begin * Config::kRecordBytes;
      for (int left = item.k_end - item.k_begin; left > 0; left -= Config::kBlocks) {
        const int bytes = min(Config::kBlocks, left) * Config::kRecordBytes;
        std::uint64_t* full = &shared.stage_full[stage.index];
        std::uint8_t* records = record_of(shared, stage.index, 0, 0);
        wait(&shared.stage_free[stage.index], stage.phase ^ 1);
        Barrier::arrive_and_expect_tx(full, row_blocks * bytes);
#pragma unroll
        for (int b = 0; b < kTile.tile_row_blocks(); ++b) {
          if (b >= row_blocks) break;
          cute::SM90_BULK_COPY_G2S::copy(weights + b * row_pitch, full, records + b * kRecordStride,
                                         bytes);
        }
        weights += bytes;
        stage.advance();
      }
    }
  }

  /// Returns once GEMM 1 has stored all row blocks of the token tile.
  __device__ static void wait_for_rows(const GroupedGemm& p, const Item& item) {
    const std::int32_t* counter = p.counters + 1 + item.counter;
    int stored = 0;
    while (true) {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(stored) : "l"(counter) : "memory");
      if (stored >= p.phases[0].row_blocks) return;
      __nanosleep(20);
    }
  }

  /// One tensor copy, to all blocks of the cluster.
  __device__ static void copy_rows(const CUtensorMap* map, std::uint64_t* full, void* target,
                                   int column, int row) {
    constexpr auto kHint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
    if constexpr (kTile.cluster == 1) {
      cute::SM90_TMA_LOAD_2D::copy(map, full, kHint, target, column, row);
    } else {
      constexpr std::uint16_t kAll = (1 << kTile.cluster) - 1;
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(map, full, kAll, kHint, target, column, row);
    }
  }

  /// One thread: rows of the tiles, K block by K block.
  __device__ static void load_tokens(Shared& shared, const GroupedGemm& p, const RowMaps& maps,
                                     int rank) {
    StageState stage;
    ItemState slot;
    while (true) {
      wait(&shared.item_full[slot.index], slot.phase);
      const Item item = shared.items[slot.index];
      Barrier::arrive(&shared.item_free[slot.index]);
      slot.advance();
      if (item.phase < 0) return;

      if (p.topk_ids) cudaGridDependencySynchronize();
      if (item.phase == 1) {
        wait_for_rows(p, item);
        asm volatile("fence.proxy.async.global;" ::: "memory");  // they were stored another way
      }
      const CUtensorMap* few = &maps.few[item.phase];
      const CUtensorMap* many = &maps.many[item.phase];
      const int first_row = item.first_row;
      const int num_many = kTile.max_tokens >= kManyRows ? item.num_tokens / kManyRows : 0;
      const int num_few = (item.num_tokens - num_many * kManyRows + kFewRows - 1) / kFewRows;
      const int bytes = (num_many * kManyRows + num_few * kFewRows) * kRecordK * 2;
      for (int block = item.k_begin; block < item.k_end; block += Config::kBlocks) {
        const int k_blocks = min(Config::kBlocks, item.k_end - block);
        std::uint64_t* full = &shared.stage_full[stage.index];
        wait(&shared.stage_free[stage.index], stage.phase ^ 1);
        Barrier::arrive_and_expect_tx(full, k_blocks * bytes);
        for (int b = 0; b < k_blocks; ++b) {
          std::uint8_t* target = tokens_of(shared, stage.index, b);
          const int column = (block + b) * kRecordK;
          for (int i = rank; i < num_many; i += kTile.cluster) {
            copy_rows(many, full, target + i * kManyRows * 128, column, first_row + i * kManyRows);
          }
          for (int i = rank; i < num_few; i += kTile.cluster) {
            const int n = num_many * kManyRows + i * kFewRows;
            copy_rows(few, full, target + n * 128, column, first_row + n);
          }
        }
        stage.advance();
      }
    }
  }
};

}  // namespace fusedmoe::cuda
