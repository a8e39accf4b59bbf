// The roles of single threads of the grouped GEMM kernel: they load weights, load rows, and tell of
// tiles that are stored.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "cuda/device/bulk_copy.cuh"
#include "cuda/device/tensor_map.h"
#include "cuda/gemm/claim.cuh"

namespace fusedmoe::cuda {

/// Tensor maps of the rows of both GEMMs, by the rows of a box: 64, 32, 16, 8 of a K block. A copy
/// costs much the same whatever it brings. With Config::kWideCopies only the last, and first the
/// one of 8 rows of a whole stage.
inline constexpr int kRowBoxes = 4;
struct RowMaps {
  CUtensorMap boxes[2][kRowBoxes];
  static constexpr int rows(int box) { return kMostRows >> box; }
  /// The largest box of which a tile has the rows.
  static constexpr int first_box(int max_tokens) {
    int box = 0;
    while (rows(box) > max_tokens) ++box;
    return box;
  }
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
  __device__ static void prefetch_weights(const GroupedGemm& p, const Item& item) {
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
    const auto claim = [&] { return rank == 0 ? atomicAdd(p.counters, 1) : 0; };
    // While the counters are still made, each block brings some tile's first records near, for
    // whichever claims it. In the loop: code is slow when it runs for the first time.
    bool is_ahead = p.topk_ids != nullptr;
    int claimed = is_ahead ? static_cast<int>(blockIdx.x) / kTile.cluster : claim();
    while (true) {
      int number = claimed;
      if (!is_ahead) {
        number = share_number(shared, slot, rank, claimed);
        wait(&shared.item_free[slot.index], slot.phase ^ 1);
      }
      const Item item = make_item(shared, p, number, rank);
      if (is_ahead) {
        prefetch_weights(p, item);
        cudaGridDependencySynchronize();  // for the counters
        claimed = claim();
        is_ahead = false;
        continue;
      }
      shared.items[slot.index] = item;
      arrive(&shared.item_full[slot.index]);
      slot.advance();
      if (item.phase < 0) return;
      claimed = claim();  // its latency hides behind the stream

      const GemmPhase& phase = p.phases[item.phase];
      const int row_blocks =
          max(0, min(kTile.tile_row_blocks(), phase.row_blocks - item.row_block));
      const std::int64_t row_pitch =
          static_cast<std::int64_t>(phase.k_blocks) * Config::kRecordBytes;
      const auto* weights = static_cast<const std::uint8_t*>(phase.weights) +
                            item.expert * phase.expert_bytes + item.row_block * row_pitch +
                            item.k_begin * Config::kRecordBytes;
      const std::int32_t* tiles = shared.tile_prefix + item.expert;
      const bool read_once = tiles[1] - tiles[0] == 1;
      const auto hint = p.weights_evict_first && read_once ? kEvictFirst : kEvictNormal;
      for (int left = item.k_end - item.k_begin; left > 0; left -= Config::kBlocks) {
        const int bytes = min(Config::kBlocks, left) * Config::kRecordBytes;
        std::uint64_t* full = &shared.stage_full[stage.index];
        std::uint8_t* records = record_of(shared, stage.index, 0, 0);
        wait(&shared.stage_free[stage.index], stage.phase ^ 1);
        Barrier::arrive_and_expect_tx(full, row_blocks * bytes);
#pragma unroll
        for (int b = 0; b < kTile.tile_row_blocks(); ++b) {
          if (b >= row_blocks) break;
          bulk_copy(records + b * kRecordStride, weights + b * row_pitch, bytes, full, hint);
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

  /// One thread: tells of tiles that are stored. It waits for the memory, not those that store.
  __device__ static void release_tiles(Shared& shared, const GroupedGemm& p) {
    ItemState slot;
    while (true) {
      wait(&shared.item_full[slot.index], slot.phase);
      const Item& item = shared.items[slot.index];
      if (item.phase < 0) return;
      const int counter = item.counter;
      const int row_blocks =
          min(kTile.tile_row_blocks(), p.phases[item.phase].row_blocks - item.row_block);
      const bool inner = item.phase == 0 && p.num_phases == 2;  // GEMM 2 waits for it
      wait(&shared.item_stored[slot.index], slot.phase);
      arrive(&shared.item_free[slot.index]);
      slot.advance();
      if (inner && row_blocks > 0) {
        asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p.counters + 1 + counter),
                     "r"(row_blocks)
                     : "memory");
      }
    }
  }

  /// One tensor copy, to all blocks of the cluster.
  __device__ static void copy_rows(const CUtensorMap* map, std::uint64_t* full, void* target,
                                   int column, int row) {
    if constexpr (kTile.cluster == 1) {
      cute::SM90_TMA_LOAD_2D::copy(map, full, kEvictLast, target, column, row);
    } else {
      constexpr std::uint16_t kAll = (1 << kTile.cluster) - 1;
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(map, full, kAll, kEvictLast, target, column, row);
    }
  }

  /// `count` rows, a multiple of 8, of a K block in as few copies as there are boxes for; the
  /// blocks of a cluster take turns.
  __device__ static void copy_k_block(const CUtensorMap* boxes, std::uint64_t* full,
                                      std::uint8_t* target, int column, int first_row, int count,
                                      int rank) {
    int turn = 0;
    const auto copy = [&](int box, int n) {
      if (turn == rank) {
        copy_rows(&boxes[box], full, target + n / kRowUnit * Config::kRowPitch, column,
                  first_row + n);
      }
      turn = turn + 1 < kTile.cluster ? turn + 1 : 0;
    };
    int n = 0;
    for (; count - n >= kMostRows; n += kMostRows) copy(0, n);
#pragma unroll
    for (int box = 1; box < kRowBoxes; ++box) {
      if (count & RowMaps::rows(box)) {
        copy(box, n);
        n += RowMaps::rows(box);
      }
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
      arrive(&shared.item_free[slot.index]);
      slot.advance();
      if (item.phase < 0) return;

      if (p.topk_ids) cudaGridDependencySynchronize();
      if (item.phase == 1) {
        wait_for_rows(p, item);
        asm volatile("fence.proxy.async.global;" ::: "memory");  // they were stored another way
      }
      const CUtensorMap* boxes = maps.boxes[item.phase];
      const int k = p.phases[item.phase].k;
      const int count = (item.num_tokens + kRowUnit - 1) / kRowUnit * kRowUnit;
      const int bytes = count * kRecordK * 2;
      for (int block = item.k_begin; block < item.k_end; block += Config::kBlocks) {
        std::uint64_t* full = &shared.stage_full[stage.index];
        wait(&shared.stage_free[stage.index], stage.phase ^ 1);
        // Boxes of whole K blocks do not know where the last ends.
        if (Config::kWideCopies &&
            (k % kRecordK == 0 || (block + Config::kBlocks) * kRecordK <= k)) {
          Barrier::arrive_and_expect_tx(full, Config::kBlocks * bytes);
          for (int n = 0; n < count; n += kRowUnit) {
            cute::SM90_TMA_LOAD_3D::copy(
                boxes, full, kEvictLast,
                tokens_of(shared, stage.index, 0) + n / kRowUnit * Config::kRowPitch, 0,
                item.first_row + n, block);
          }
        } else {
          const int k_blocks = min(Config::kBlocks, item.k_end - block);
          Barrier::arrive_and_expect_tx(full, k_blocks * bytes);
          for (int b = 0; b < k_blocks; ++b) {
            std::uint8_t* target = tokens_of(shared, stage.index, b);
            const int column = (block + b) * kRecordK;
            if constexpr (Config::kWideCopies) {
              for (int n = 0; n < count; n += kRowUnit) {
                copy_rows(&boxes[kRowBoxes - 1], full, target + n / kRowUnit * Config::kRowPitch,
                          column, item.first_row + n);
              }
            } else {
              copy_k_block(boxes, full, target, column, item.first_row, count, rank);
            }
          }
        }
        stage.advance();
      }
    }
  }
};

}  // namespace fusedmoe::cuda
