// The grouped GEMM kernel: persistent, warp-specialised, both GEMMs of a layer in one launch.
//
// Warpgroup 0 loads. One of its threads claims tiles in order from a counter and streams their
// weights (bulk copies of records); another brings the rows of the tile (tensor copies in the
// 128-byte swizzle). The other warpgroups multiply and store. Weights never wait for rows: those of
// GEMM 2 are under way while the last tiles of GEMM 1 are still computed, and only the rows wait
// until the tile of GEMM 1 that they are is complete. Tiles are claimed in order, so a block that
// waits always waits for blocks that run: no order of launches can lock up.
//
// The blocks of a cluster take neighbouring row tiles of the same tokens: each loads a part of the
// rows for all. Its first block claims, and tells the others.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "cuda/activation.cuh"
#include "cuda/device/tensor_map.h"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/grouped_gemm.h"
#include "cuda/gemm/schedule.h"
#include "cuda/gemm/weights.cuh"

namespace fusedmoe::cuda {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

/// Rows of one tensor copy: many where a tile has them, else few.
inline constexpr int kFewRows = 8, kManyRows = 64;

/// Of the rows of both GEMMs.
struct RowMaps {
  CUtensorMap few[2], many[2];
};

// ---- Configuration ------------------------------------------------------------------------------

template <typename Weights, TileConfig kTile>
struct GemmConfig {
  static constexpr int kWarpgroups = kTile.warpgroups();
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kMultiplyWarps = 4 * kWarpgroups;
  static constexpr int kGroupThreads = 128 * kTile.k_groups;

  // Registers of a block are 64 Ki; at launch every thread has the same share of them.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kAllRegisters = kLaunchRegisters * (kWarpgroups + 1);
  static constexpr int kMultiplyRegisters = (kAllRegisters - 56) / kWarpgroups / 8 * 8;
  static constexpr int kLoadRegisters = kAllRegisters - kWarpgroups * kMultiplyRegisters;

  static constexpr int kTokenBytes = kTile.max_tokens * kRecordK * 2;  // of one K block
  static constexpr int kRecordBytes = record_bytes(Weights::kFormat);
  // K blocks of a stage: kDepth neighbours for each K group.
  static constexpr int kDepth =
      kTile.row_blocks == 1 && kTile.max_tokens <= 64 ? Weights::kDepth : 1;
  static constexpr int kBlocks = kTile.k_groups * kDepth;
  static constexpr int kStageBytes =
      static_cast<int>(
          ceil_div(kBlocks * (kTokenBytes + kTile.tile_row_blocks() * kRecordBytes), 1024)) *
      1024;

  static constexpr int kStoreTokens = kTile.max_tokens < 32 ? kTile.max_tokens : 32;
  static constexpr int kStorePitch = kRecordRows + 4;  // keeps fragments off each other's banks

  static constexpr int kItemSlots = 8;
  // Of a block, sm_90, less what a block of the next kernel needs to wait beside it.
  static constexpr int kSharedLimit = 232448 - 1024;
  static constexpr int kFixedBytes =
      kWarpgroups * kStoreTokens * kStorePitch * 4 + (kMaxExperts + 1) * 4 + 2048;
  static constexpr int kStages = (kSharedLimit - kFixedBytes) / kStageBytes;
  static_assert(kTile.max_tokens % 8 == 0 && kTile.max_tokens <= 256, "N of wgmma");
  static_assert(kStages >= 3, "a pipeline needs stages");
  static_assert(kStageBytes % 1024 == 0, "the swizzle repeats every 1024 bytes");
};

/// One tile, as every role needs it.
struct Item {
  int phase;  // -1: no work left
  int expert;
  int row_block;  // first of the tile
  int k_begin, k_end;
  int first_row;   // of the grouped GEMM
  int num_tokens;  // rows of the tile
  int split;
  int counter;  // of the token tile: row blocks of GEMM 1 that are stored
};

template <typename Config>
struct SharedStorage {
  alignas(1024) std::uint8_t stages[Config::kStages][Config::kStageBytes];
  alignas(16) float sums[Config::kWarpgroups][Config::kStoreTokens][Config::kStorePitch];
  std::uint64_t stage_full[Config::kStages];
  std::uint64_t stage_free[Config::kStages];
  std::uint64_t item_full[Config::kItemSlots];
  std::uint64_t item_free[Config::kItemSlots];
  Item items[Config::kItemSlots];
  // What the first block of a cluster has claimed.
  std::uint64_t number_full[Config::kItemSlots];
  std::uint64_t number_free[Config::kItemSlots];
  int numbers[Config::kItemSlots];
  std::int32_t tile_prefix[kMaxExperts + 1];
};

/// Position in a ring of barriers.
template <int kCount>
struct RingState {
  int index = 0;
  std::uint32_t phase = 0;
  __device__ void advance() {
    if (++index == kCount) {
      index = 0;
      phase ^= 1;
    }
  }
};

// ---- Roles --------------------------------------------------------------------------------------

template <typename Weights, TileConfig kTile>
struct GemmKernel {
  using Config = GemmConfig<Weights, kTile>;
  using Shared = SharedStorage<Config>;
  using StageState = RingState<Config::kStages>;
  using ItemState = RingState<Config::kItemSlots>;
  static_assert(sizeof(Shared) <= Config::kSharedLimit);
  static constexpr int kClusterRowBlocks = kTile.tile_row_blocks() * kTile.cluster;
  static constexpr int kRecordStride = Config::kBlocks * Config::kRecordBytes;  // of row blocks

  __device__ static std::uint8_t* tokens_of(Shared& shared, int stage, int k_block) {
    return shared.stages[stage] + k_block * Config::kTokenBytes;
  }
  __device__ static std::uint8_t* record_of(Shared& shared, int stage, int row_block, int k_block) {
    return shared.stages[stage] + Config::kBlocks * Config::kTokenBytes +
           (row_block * Config::kBlocks + k_block) * Config::kRecordBytes;
  }

  /// First row of each expert where blocks count by themselves; behind the tile prefixes.
  __device__ static std::int32_t* row_prefix(Shared& shared) {
    return shared.tile_prefix + kMaxExperts / 2 + 1;
  }

  /// prefix[1 ... count] = sums up to there of what was in them; one warp.
  __device__ static void sum_up(std::int32_t* prefix, int count) {
    const int lane = threadIdx.x % 32;
    int sum = 0;
    for (int first = 0; first < count; first += 32) {
      const int i = first + lane;
      int inclusive = i < count ? prefix[i + 1] : 0;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += other;
      }
      if (i < count) prefix[i + 1] = sum + inclusive;
      sum += __shfl_sync(~0u, inclusive, 31);
    }
    if (lane == 0) prefix[0] = 0;
  }

  /// tile_prefix from the rows of each expert, and row_prefix where this block counts them; all
  /// threads.
  __device__ static void count_tiles(Shared& shared, const GroupedGemm& p) {
    std::int32_t* tiles = shared.tile_prefix;
    std::int32_t* rows = row_prefix(shared);
    const int thread = threadIdx.x;
    if (p.topk_ids) {
      for (int e = thread; e < p.num_experts; e += Config::kThreads) rows[e + 1] = 0;
      __syncthreads();
      if (thread < p.num_slots) {
        const int expert = p.local_experts(p.topk_ids[thread]);
        if (expert >= 0) atomicAdd(&rows[expert + 1], 1);
      }
      __syncthreads();
    }
    for (int e = thread; e < p.num_experts; e += Config::kThreads) {
      const int count = p.topk_ids ? rows[e + 1] : p.expert_num_tokens[e];
      tiles[e + 1] = num_token_tiles(count, kTile.max_tokens);
    }
    __syncthreads();
    if (thread < 32) {
      sum_up(tiles, p.num_experts);
    } else if (thread < 64 && p.topk_ids) {
      sum_up(rows, p.num_experts);
    }
    __syncthreads();
  }

  __device__ static Item make_item(Shared& shared, const GroupedGemm& p, int number, int rank) {
    PhaseShape shapes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shapes[i] = {static_cast<int>(ceil_div(p.phases[i].row_blocks, kClusterRowBlocks)),
                   p.phases[i].splits};
    }
    const TileIndex tile =
        find_tile(number, shapes, p.num_phases, shared.tile_prefix, p.num_experts);
    Item item{};
    item.phase = tile.phase;
    if (tile.phase < 0) return item;
    const GemmPhase& phase = p.phases[tile.phase];
    const std::int32_t* counted = row_prefix(shared) + tile.expert;
    const int rows = p.topk_ids ? counted[1] - counted[0] : p.expert_num_tokens[tile.expert];
    const int expert_row = p.topk_ids         ? counted[0]
                           : p.expert_offsets ? p.expert_offsets[tile.expert]
                                              : static_cast<int>(tile.expert * p.capacity);
    const int first_tile = shared.tile_prefix[tile.expert];
    const int size = token_tile_size(rows, shared.tile_prefix[tile.expert + 1] - first_tile);
    const int begin = tile.token_tile * size;
    item.expert = tile.expert;
    item.row_block = tile.row_tile * kClusterRowBlocks + rank * kTile.tile_row_blocks();
    item.k_begin = split_begin(phase.k_blocks, phase.splits, tile.split);
    item.k_end = split_begin(phase.k_blocks, phase.splits, tile.split + 1);
    item.first_row = expert_row + begin;
    item.num_tokens = min(size, rows - begin);
    item.split = tile.split;
    item.counter = first_tile + tile.token_tile;
    return item;
  }

  /// As Barrier::wait, for what other blocks of the cluster wrote.
  __device__ static void wait_in_cluster(const std::uint64_t* barrier, std::uint32_t phase) {
    std::uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{ .reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(phase)
          : "memory");
    }
  }

  /// The number that the first block of the cluster claimed, for all of its blocks.
  __device__ static int share_number(Shared& shared, const ItemState& slot, int rank, int number) {
    if constexpr (kTile.cluster > 1) {
      std::uint64_t* full = &shared.number_full[slot.index];
      std::uint64_t* free = &shared.number_free[slot.index];
      if (rank == 0) {
        Barrier::wait(free, slot.phase ^ 1);
        for (int r = 1; r < kTile.cluster; ++r) {
          const std::uint32_t target =
              cute::set_block_rank(cute::cast_smem_ptr_to_uint(&shared.numbers[slot.index]), r);
          const std::uint32_t barrier = cute::set_block_rank(cute::cast_smem_ptr_to_uint(full), r);
          asm volatile(
              "st.shared::cluster.s32 [%0], %1;\n"
              "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%2];" ::"r"(target),
              "r"(number), "r"(barrier)
              : "memory");
        }
      } else {
        wait_in_cluster(full, slot.phase);
        number = *static_cast<volatile int*>(&shared.numbers[slot.index]);
        Barrier::arrive(free, 0, true);
      }
    }
    return number;
  }

  /// Brings the first records of an item to the L2, for the block that will claim it.
  __device__ static void prefetch_weights(Shared& shared, const GroupedGemm& p, int number,
                                          int rank) {
    const Item item = make_item(shared, p, number, rank);
    if (item.phase < 0) return;
    const GemmPhase& phase = p.phases[item.phase];
    const int bytes =
        min(Config::kStages * Config::kBlocks, item.k_end - item.k_begin) * Config::kRecordBytes;
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
      prefetch_weights(shared, p, static_cast<int>(blockIdx.x) / kTile.cluster, rank);
      cudaGridDependencySynchronize();  // for the counters
    }
    int claimed = rank == 0 ? atomicAdd(p.counters, 1) : 0;
    while (true) {
      const int number = share_number(shared, slot, rank, claimed);
      Barrier::wait(&shared.item_free[slot.index], slot.phase ^ 1);
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
        Barrier::wait(&shared.stage_free[stage.index], stage.phase ^ 1);
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
      Barrier::wait(&shared.item_full[slot.index], slot.phase);
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
        Barrier::wait(&shared.stage_free[stage.index], stage.phase ^ 1);
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

  /// What a multiplying thread knows of itself.
  struct Place {
    int thread;     // in its warpgroup
    int warpgroup;  // 0 is the first that multiplies
    int row_group, k_group;
  };

  /// To all blocks of the cluster: each loads rows for this one.
  __device__ static void release(Shared& shared, int stage) {
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if constexpr (kTile.cluster == 1) {
      if (lane == 0) Barrier::arrive(&shared.stage_free[stage]);
    } else {
      Barrier::arrive(&shared.stage_free[stage], lane, lane < kTile.cluster);
    }
  }

  using Sums = float[kTile.row_blocks][kTile.max_tokens / 2];

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
            multiply<kN>(weights.at(j), operands.tokens.at(j), sums[b]);
          }
        }
        cute::warpgroup_commit_batch();
      }
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

  /// Sums of one tile.
  template <int kN>
  __device__ __forceinline__ static void multiply_tile(Shared& shared, const Item& item,
                                                       const Place& place, StageState& stage,
                                                       Sums& sums) {
#pragma unroll
    for (int b = 0; b < kTile.row_blocks; ++b) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) sums[b][i] = 0;
      fence_sums(sums[b]);
    }
    const Share share(item, place);
    if constexpr (Weights::kDecoded) {
      multiply_decoded<kN>(shared, share, place, stage, sums);
    } else {
      multiply_shared<kN>(shared, share, place, stage, sums);
    }
#pragma unroll
    for (int b = 0; b < kTile.row_blocks; ++b) fence_sums(sums[b]);
  }

  struct Pair {
    float x, y;
  };

  /// Two neighbouring rows of one token, summed over the K groups.
  __device__ static Pair read_sums(const Shared& shared, const Place& place, int token, int row) {
    Pair sum{0, 0};
#pragma unroll
    for (int k = 0; k < kTile.k_groups; ++k) {
      const auto part = *reinterpret_cast<const float2*>(
          &shared.sums[place.row_group * kTile.k_groups + k][token][row]);
      sum.x += part.x;
      sum.y += part.y;
    }
    return sum;
  }

  __device__ static Pair read_pair(const float* bias, int row) {
    if (!bias) return {0, 0};
    const auto pair = *reinterpret_cast<const float2*>(bias + row);
    return {pair.x, pair.y};
  }

  __device__ static void write_pair(const GemmPhase& phase, std::int64_t index, float x, float y) {
    if (phase.out_f32) {
      *reinterpret_cast<float2*>(static_cast<float*>(phase.out) + index) = make_float2(x, y);
    } else {
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(phase.out) + index) =
          __floats2bfloat162_rn(x, y);
    }
  }

  /// Tokens [first, first + count) of a row block, from the sums in shared memory.
  __device__ static void store_rows(const Shared& shared, const GroupedGemm& p, const Item& item,
                                    const Place& place, int row_block, int first, int count) {
    const GemmPhase& phase = p.phases[item.phase];
    const float scale = phase.scales ? phase.scales[item.expert] : 1.0f;
    const float* bias =
        phase.bias && item.split == 0
            ? phase.bias + (static_cast<std::int64_t>(item.expert) * phase.row_blocks + row_block) *
                               kRecordRows
            : nullptr;
    const int thread = place.k_group * 128 + place.thread;
    const std::int64_t out = item.split * phase.split_pitch +
                             static_cast<std::int64_t>(item.first_row + first) * phase.out_pitch;
    if (phase.epilogue == Epilogue::kStore) {
      const int row = thread % 32 * 2;
      const int column = row_block * kRecordRows + row;
      if (column >= phase.width) return;
      const bool activated = item.phase == 0 && p.num_phases == 2;
      const Pair b = read_pair(bias, row);
      for (int token = thread / 32; token < count; token += Config::kGroupThreads / 32) {
        Pair v = read_sums(shared, place, token, row);
        v = {v.x * scale + b.x, v.y * scale + b.y};
        if (activated) {
          v = {activate_gate(p.activation, v.x), activate_gate(p.activation, v.y)};
        }
        write_pair(phase, out + token * phase.out_pitch + column, v.x, v.y);
      }
      return;
    }
    const int pair = thread % 16;
    const int row = pair / 4 * 16 + pair % 4 * 2;  // of gate; up is 8 further on
    const int column = row_block * (kRecordRows / 2) + pair * 2;
    if (column >= phase.width) return;
    const Pair gate_bias = read_pair(bias, row), up_bias = read_pair(bias, row + 8);
    for (int token = thread / 16; token < count; token += Config::kGroupThreads / 16) {
      const Pair g = read_sums(shared, place, token, row);
      const Pair u = read_sums(shared, place, token, row + 8);
      const Pair gate{g.x * scale + gate_bias.x, g.y * scale + gate_bias.y};
      const Pair up{u.x * scale + up_bias.x, u.y * scale + up_bias.y};
      const std::int64_t index = out + token * phase.out_pitch + column;
      if (phase.epilogue == Epilogue::kActivate) {
        write_pair(phase, index, activate(p.activation, gate.x, up.x),
                   activate(p.activation, gate.y, up.y));
      } else {
        write_pair(phase, index, gate.x, gate.y);
        write_pair(phase, index + phase.width, up.x, up.y);
      }
    }
  }

  /// Sums -> shared memory -> output, kStoreTokens at a time. The threads of a row group share
  /// the work; those of other row groups do not wait.
  __device__ static void store_tile(Shared& shared, const GroupedGemm& p, const Item& item,
                                    const Place& place, const Sums& sums) {
    const auto sync_group = [&] {
      cutlass::arch::NamedBarrier::sync(Config::kGroupThreads, 1 + place.row_group);
    };
    constexpr int kN = kTile.max_tokens, kChunk = Config::kStoreTokens;
    const int warp = place.thread / 32, lane = place.thread % 32;
    const int row = warp * 16 + lane / 4;
    auto& buffer = shared.sums[place.warpgroup];
#pragma unroll
    for (int b = 0; b < kTile.row_blocks; ++b) {
      const int row_block = item.row_block + place.row_group * kTile.row_blocks + b;
      if (row_block >= p.phases[item.phase].row_blocks) break;
#pragma unroll
      for (int first = 0; first < kN; first += kChunk) {
        if (first >= item.num_tokens) break;
#pragma unroll
        for (int n = 0; n < kChunk; n += 8) {
          const float* block = &sums[b][(first + n) / 2];
          const int token = n + lane % 4 * 2;
          buffer[token][row] = block[0];
          buffer[token + 1][row] = block[1];
          buffer[token][row + 8] = block[2];
          buffer[token + 1][row + 8] = block[3];
        }
        sync_group();
        store_rows(shared, p, item, place, row_block, first, min(kChunk, item.num_tokens - first));
        sync_group();
      }
      if (item.phase == 0 && p.num_phases == 2 && place.k_group == 0 && place.thread == 0) {
        __threadfence();
        atomicAdd(p.counters + 1 + item.counter, 1);
      }
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

  /// The narrowest that covers the tile, so that padding costs little.
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
    multiply_tile<kN>(shared, item, place, stage, sums);
  }

  __device__ static void multiply_tiles(Shared& shared, const GroupedGemm& p) {
    Place place;
    place.thread = threadIdx.x % 128;
    place.warpgroup = __shfl_sync(~0u, threadIdx.x / 128 - 1, 0);
    place.row_group = place.warpgroup / kTile.k_groups;
    place.k_group = place.warpgroup % kTile.k_groups;
    StageState stage;
    ItemState slot;
    while (true) {
      Barrier::wait(&shared.item_full[slot.index], slot.phase);
      const Item item = shared.items[slot.index];
      __syncwarp();
      if (threadIdx.x % 32 == 0) Barrier::arrive(&shared.item_free[slot.index]);
      slot.advance();
      if (item.phase < 0) return;
      Sums sums;
      multiply_narrowest(shared, item, place, stage, sums);
      if (p.topk_ids) cudaGridDependencySynchronize();
      store_tile(shared, p, item, place, sums);
    }
  }
};

// ---- The kernel ---------------------------------------------------------------------------------

/// kTile by its number: nvcc cannot name kernels with class-type template arguments.
template <typename Weights, int kConfig>
__global__ __launch_bounds__((GemmConfig<Weights, kTileConfigs[kConfig]>::kThreads),
                             1) void grouped_gemm_kernel(const __grid_constant__ GroupedGemm
                                                             problem,
                                                         const __grid_constant__ RowMaps maps) {
  constexpr TileConfig kTile = kTileConfigs[kConfig];
  using Kernel = GemmKernel<Weights, kTile>;
  using Config = typename Kernel::Config;
  extern __shared__ std::uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  const int rank = kTile.cluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0;

  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::kStages; ++s) {
      Barrier::init(&shared.stage_full[s], 2);  // weights and rows
      Barrier::init(&shared.stage_free[s], Config::kMultiplyWarps * kTile.cluster);
    }
    for (int s = 0; s < Config::kItemSlots; ++s) {
      Barrier::init(&shared.item_full[s], 1);
      Barrier::init(&shared.item_free[s], 1 + Config::kMultiplyWarps);
      Barrier::init(&shared.number_full[s], 1);
      Barrier::init(&shared.number_free[s], kTile.cluster > 1 ? kTile.cluster - 1 : 1);
    }
    cutlass::arch::fence_barrier_init();
  }
  // What the kernels before the one that makes the routing data wrote is there: that waited for it.
  if (!problem.topk_ids) cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  Kernel::count_tiles(shared, problem);
  if constexpr (kTile.cluster > 1) cute::cluster_sync();

  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoadRegisters>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0 && cute::elect_one_sync()) {
      Kernel::load_weights(shared, problem, rank);
    } else if (warp == 1 && cute::elect_one_sync()) {
      Kernel::load_tokens(shared, problem, maps, rank);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kMultiplyRegisters>();
    Kernel::multiply_tiles(shared, problem);
  }
  if constexpr (kTile.cluster > 1) {  // others may still arrive at this block's barriers
    __syncwarp();
    cute::cluster_sync();
  }
}

}  // namespace fusedmoe::cuda
