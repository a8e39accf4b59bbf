// The grouped GEMM kernel: persistent, warp-specialised, both GEMMs of a layer in one launch.
//
// Warpgroup 0 loads. Its first thread claims tiles in order from a counter and streams their
// weights (bulk copies of records); two of its warps gather the rows of the tile (cp.async, in the
// 128-byte swizzle). The other warpgroups multiply and store. Weights never wait for rows: those of
// GEMM 2 are under way while the last tiles of GEMM 1 are still computed, and only the row loaders
// wait until the tile of GEMM 1 that they read is complete. A block claims tiles in order, so one
// that waits always waits for blocks that run: no launch order can lock up.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "cuda/activation.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/grouped_gemm.h"
#include "cuda/gemm/schedule.h"
#include "cuda/gemm/weights.cuh"

namespace fusedmoe::cuda {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

// ---- Configuration ------------------------------------------------------------------------------

template <typename Weights, TileConfig kTile>
struct GemmConfig {
  static constexpr int kWarpgroups = kTile.warpgroups();
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kMultiplyWarps = 4 * kWarpgroups;
  static constexpr int kRowWarps = 2;  // that load rows: the last two of the first warpgroup
  static constexpr int kRowThreads = 32 * kRowWarps;
  static constexpr int kFirstRowThread = 128 - kRowThreads;
  static constexpr int kGroupThreads = 128 * kTile.k_groups;

  // Registers of a block are 64 Ki; at launch every thread has the same share of them.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kAllRegisters = kLaunchRegisters * (kWarpgroups + 1);
  static constexpr int kMultiplyRegisters = (kAllRegisters - 56) / kWarpgroups / 8 * 8;
  static constexpr int kLoadRegisters = kAllRegisters - kWarpgroups * kMultiplyRegisters;

  static constexpr int kTokenBytes = kTile.max_tokens * kRecordK * 2;  // of one K block
  static constexpr int kRecordBytes = record_bytes(Weights::kFormat);
  static constexpr int kRecords = kTile.tile_row_blocks() * kTile.k_groups;  // of a stage
  static constexpr int kStageBytes =
      static_cast<int>(ceil_div(kTile.k_groups * kTokenBytes + kRecords * kRecordBytes, 1024)) *
      1024;

  static constexpr int kStoreTokens = kTile.max_tokens < 32 ? kTile.max_tokens : 32;
  static constexpr int kStorePitch = kRecordRows + 4;  // keeps fragments off each other's banks

  static constexpr int kItemSlots = 8;
  static constexpr int kSharedLimit = 232448;  // of a block, sm_90
  static constexpr int kFixedBytes = kWarpgroups * kStoreTokens * kStorePitch * 4 +
                                     2 * (kTile.max_tokens + 64) * 4 + (kMaxExperts + 1) * 4 + 2048;
  static constexpr int kStages = (kSharedLimit - kFixedBytes) / kStageBytes;
  // Stages that row loaders keep in flight before they wait for the oldest.
  static constexpr int kLag = kStages >= 12 ? 3 : kStages >= 8 ? 2 : 1;

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
  /// In 16 bytes; read beyond the last row, in batches.
  std::uint32_t row_offsets[2][Config::kTokenBytes / kRecordK / 2 + 64];
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
  static constexpr int kRecordStride = kTile.k_groups * Config::kRecordBytes;  // of row blocks

  __device__ static std::uint8_t* tokens_of(Shared& shared, int stage, int k_block) {
    return shared.stages[stage] + k_block * Config::kTokenBytes;
  }
  __device__ static std::uint8_t* record_of(Shared& shared, int stage, int row_block, int k_block) {
    return shared.stages[stage] + kTile.k_groups * Config::kTokenBytes +
           (row_block * kTile.k_groups + k_block) * Config::kRecordBytes;
  }

  /// tile_prefix from the rows of each expert; all threads.
  __device__ static void count_tiles(Shared& shared, const GroupedGemm& p) {
    for (int e = threadIdx.x; e < p.num_experts; e += Config::kThreads) {
      shared.tile_prefix[e + 1] = num_token_tiles(p.expert_num_tokens[e], kTile.max_tokens);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const int lane = threadIdx.x;
      int sum = 0;
      for (int first = 0; first < p.num_experts; first += 32) {
        const int e = first + lane;
        int inclusive = e < p.num_experts ? shared.tile_prefix[e + 1] : 0;
        for (int distance = 1; distance < 32; distance *= 2) {
          const int other = __shfl_up_sync(~0u, inclusive, distance);
          if (lane >= distance) inclusive += other;
        }
        if (e < p.num_experts) shared.tile_prefix[e + 1] = sum + inclusive;
        sum += __shfl_sync(~0u, inclusive, 31);
      }
      if (lane == 0) shared.tile_prefix[0] = 0;
    }
    __syncthreads();
  }

  __device__ static Item make_item(const Shared& shared, const GroupedGemm& p,
                                   std::int64_t number) {
    PhaseShape shapes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shapes[i] = {static_cast<int>(ceil_div(p.phases[i].row_blocks, kTile.tile_row_blocks())),
                   p.phases[i].splits};
    }
    const TileIndex tile =
        find_tile(number, shapes, p.num_phases, shared.tile_prefix, p.num_experts);
    Item item{};
    item.phase = tile.phase;
    if (tile.phase < 0) return item;
    const GemmPhase& phase = p.phases[tile.phase];
    const int rows = p.expert_num_tokens[tile.expert];
    const int first_tile = shared.tile_prefix[tile.expert];
    const int size = token_tile_size(rows, shared.tile_prefix[tile.expert + 1] - first_tile);
    const int begin = tile.token_tile * size;
    const int expert_row = p.expert_offsets ? p.expert_offsets[tile.expert]
                                            : static_cast<int>(tile.expert * p.capacity);
    item.expert = tile.expert;
    item.row_block = tile.row_tile * kTile.tile_row_blocks();
    item.k_begin = split_begin(phase.k_blocks, phase.splits, tile.split);
    item.k_end = split_begin(phase.k_blocks, phase.splits, tile.split + 1);
    item.first_row = expert_row + begin;
    item.num_tokens = min(size, rows - begin);
    item.split = tile.split;
    item.counter = first_tile + tile.token_tile;
    return item;
  }

  /// One thread: claims items and streams their weights.
  __device__ static void load_weights(Shared& shared, const GroupedGemm& p) {
    StageState stage;
    ItemState slot;
    std::int64_t number = blockIdx.x;
    while (true) {
      Barrier::wait(&shared.item_free[slot.index], slot.phase ^ 1);
      const Item item = make_item(shared, p, number);
      shared.items[slot.index] = item;
      Barrier::arrive(&shared.item_full[slot.index]);
      slot.advance();
      if (item.phase < 0) return;
      const int claimed = atomicAdd(p.counters, 1);  // its latency hides behind the stream

      const GemmPhase& phase = p.phases[item.phase];
      const int row_blocks = min(kTile.tile_row_blocks(), phase.row_blocks - item.row_block);
      const std::int64_t row_pitch =
          static_cast<std::int64_t>(phase.k_blocks) * Config::kRecordBytes;
      const auto* weights = static_cast<const std::uint8_t*>(phase.weights) +
                            item.expert * phase.expert_bytes + item.row_block * row_pitch +
                            item.k_begin * Config::kRecordBytes;
      for (int left = item.k_end - item.k_begin; left > 0; left -= kTile.k_groups) {
        const int bytes = min(kTile.k_groups, left) * Config::kRecordBytes;
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
      number = static_cast<std::int64_t>(gridDim.x) + claimed;
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

  static constexpr int kChunkElements = 8;  // of 16 bytes

  /// 16 bytes to shared memory, of which the source has `valid`; zeros behind them.
  __device__ static void copy_chunk(std::uint32_t target, const uint4* source, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(valid));
  }

  /// One K block of rows first, first + 8, ... of a tile: the chunk at `column` of each to `target`
  /// and 8 rows of 128 bytes on. Offsets are read ahead of the copies, which keep their order.
  __device__ static void copy_rows(const uint4* x, const std::uint32_t* offsets, int first,
                                   int num_tokens, int column, int k, std::uint32_t target) {
    constexpr int kBatch = kTile.max_tokens >= 64 ? 8 : kTile.max_tokens / 8;
    const int valid = min(16, (k - column) * 2);
    const uint4* source = x + (valid > 0 ? column / kChunkElements : 0);
    for (int n = first; n < num_tokens; n += 8 * kBatch) {
      std::uint32_t offset[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) offset[j] = offsets[n + 8 * j];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (n + 8 * j < num_tokens) {
          copy_chunk(target + (n - first + 8 * j) * 128, source + offset[j], max(0, valid));
        }
      }
    }
  }

  /// Two warps: rows of the tiles, K block by K block, 16 bytes to a thread. Rows of one thread are
  /// 8 apart, so that its place in the swizzle stays.
  __device__ static void load_tokens(Shared& shared, const GroupedGemm& p) {
    static_assert(Config::kRowThreads == 64);
    const int thread = threadIdx.x - Config::kFirstRowThread;
    const int first = thread / 8, chunk = thread % 8;
    const std::uint32_t place = first * 128 + ((chunk ^ first) << 4);
    StageState stage, arrived;
    ItemState slot;
    int buffer = 0;
    int behind = 0;  // stages whose copies are under way
    // The rows of the oldest such stage are there. wgmma reads by another path than they came.
    const auto announce = [&] {
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (thread % 32 == 0) Barrier::arrive(&shared.stage_full[arrived.index]);
      arrived.advance();
    };
    while (true) {
      Barrier::wait(&shared.item_full[slot.index], slot.phase);
      const Item item = shared.items[slot.index];
      __syncwarp();
      if (thread % 32 == 0) Barrier::arrive(&shared.item_free[slot.index]);
      slot.advance();
      if (item.phase < 0) return;

      const GemmPhase& phase = p.phases[item.phase];
      std::uint32_t* offsets = shared.row_offsets[buffer];
      buffer ^= 1;
      const auto pitch = static_cast<std::uint32_t>(phase.x_pitch / kChunkElements);
      for (int n = thread; n < item.num_tokens; n += Config::kRowThreads) {
        const int row = item.first_row + n;
        offsets[n] = (phase.gather ? phase.gather[row] / phase.gather_divisor : row) * pitch;
      }
      if (item.phase == 1 && thread == 0) wait_for_rows(p, item);
      cutlass::arch::NamedBarrier::sync(Config::kRowThreads, 0);

      const auto* x = static_cast<const uint4*>(phase.x);
      const int k = phase.k;
      for (int block = item.k_begin; block < item.k_end; block += kTile.k_groups) {
        const std::uint32_t target =
            cute::cast_smem_ptr_to_uint(tokens_of(shared, stage.index, 0)) + place;
        const int column = block * kRecordK + chunk * kChunkElements;
        Barrier::wait(&shared.stage_free[stage.index], stage.phase ^ 1);
#pragma unroll
        for (int b = 0; b < kTile.k_groups; ++b) {
          if (block + b >= item.k_end) break;
          copy_rows(x, offsets, first, item.num_tokens, column + b * kRecordK, k,
                    target + b * Config::kTokenBytes);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        stage.advance();
        if (++behind > Config::kLag) {
          asm volatile("cp.async.wait_group %0;" ::"n"(Config::kLag) : "memory");
          announce();
          --behind;
        }
      }
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      for (; behind > 0; --behind) announce();
    }
  }

  /// What a multiplying thread knows of itself.
  struct Place {
    int thread;     // in its warpgroup
    int warpgroup;  // 0 is the first that multiplies
    int row_group, k_group;
  };

  __device__ static void release(Shared& shared, int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) Barrier::arrive(&shared.stage_free[stage]);
  }

  /// The K blocks of an item that a K group multiplies: k_group, k_group + k_groups, ..., one to a
  /// stage.
  struct Share {
    int stages;  // of the item
    int mine;    // of them with a block for this K group: all, or all but the last
    __device__ Share(const Item& item, const Place& place) {
      const int blocks = item.k_end - item.k_begin;
      stages = (blocks + kTile.k_groups - 1) / kTile.k_groups;
      mine = (blocks - place.k_group + kTile.k_groups - 1) / kTile.k_groups;
    }
  };

  /// Waits for a stage; what it holds of this thread's row blocks and K group.
  struct Operands {
    const std::uint8_t* record;  // of the first row block; kRecordStride to the next
    Descriptor tokens;
  };
  __device__ static Operands acquire(Shared& shared, const StageState& stage, const Place& place) {
    Barrier::wait(&shared.stage_full[stage.index], stage.phase);
    return {record_of(shared, stage.index, place.row_group * kTile.row_blocks, place.k_group),
            Descriptor(cute::cast_smem_ptr_to_uint(tokens_of(shared, stage.index, place.k_group)))};
  }

  /// Weights as they are: the tensor cores read both operands from shared memory, one stage while
  /// the next is awaited.
  template <int kN>
  __device__ static void multiply_shared(Shared& shared, const Share& share, const Place& place,
                                         StageState& stage,
                                         float (&sums)[kTile.row_blocks][kN / 2]) {
    int previous = -1;
    for (int i = 0; i < share.mine; ++i) {
      const Operands operands = acquire(shared, stage, place);
      cute::warpgroup_arrive();
#pragma unroll
      for (int b = 0; b < kTile.row_blocks; ++b) {
        const Descriptor weights(cute::cast_smem_ptr_to_uint(operands.record + b * kRecordStride));
#pragma unroll
        for (int j = 0; j < kRecordK / 16; ++j) {
          multiply<kN>(weights.at(j), operands.tokens.at(j), sums[b]);
        }
      }
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      if (previous >= 0) release(shared, previous);
      previous = stage.index;
      stage.advance();
    }
    cute::warpgroup_wait<0>();
    if (previous >= 0) release(shared, previous);
  }

  /// Weights to be decoded: one record in registers is multiplied while the next is decoded into
  /// the other set. Nothing is in flight at the end of a step, or else ptxas serializes it all.
  template <int kN>
  __device__ static void multiply_decoded(Shared& shared, const Share& share, const Place& place,
                                          StageState& stage,
                                          float (&sums)[kTile.row_blocks][kN / 2]) {
    if (share.mine == 0) return;
    std::uint32_t codes[2][kRecordK / 16][4];
    int left = share.mine - 1;  // stages behind this one
    Operands operands = acquire(shared, stage, place);
    Weights::decode(operands.record, place.thread, codes[0]);
    // Multiplies row block kBlock of this stage, decodes the record behind it.
    const auto step = [&](auto set, auto block) {
      constexpr int kSet = decltype(set)::value, kBlock = decltype(block)::value;
      constexpr bool kLast = kBlock + 1 == kTile.row_blocks;
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kRecordK / 16; ++j) {
        multiply<kN>(codes[kSet][j], operands.tokens.at(j), sums[kBlock]);
      }
      cute::warpgroup_commit_batch();
      const int current = stage.index;
      if constexpr (kLast) {
        stage.advance();
        if (left > 0) {
          operands = acquire(shared, stage, place);
          Weights::decode(operands.record, place.thread, codes[1 - kSet]);
        }
      } else {
        Weights::decode(operands.record + kRecordStride, place.thread, codes[1 - kSet]);
      }
      cute::warpgroup_wait<0>();
      if constexpr (kLast) release(shared, current);
    };
    using First = std::integral_constant<int, 0>;
    using Second = std::integral_constant<int, 1>;
    if constexpr (kTile.row_blocks == 2) {
      for (; left >= 0; --left) {
        step(First(), First());
        step(Second(), Second());
      }
    } else {
      while (true) {
        step(First(), First());
        if (--left < 0) break;
        step(Second(), First());
        if (--left < 0) break;
      }
    }
  }

  /// Sums of one tile.
  template <int kN>
  __device__ static void multiply_tile(Shared& shared, const Item& item, const Place& place,
                                       StageState& stage, float (&sums)[kTile.row_blocks][kN / 2]) {
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
    if (share.mine < share.stages) {
      Barrier::wait(&shared.stage_full[stage.index], stage.phase);
      release(shared, stage.index);
      stage.advance();
    }
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
  template <int kN>
  __device__ static void store_tile(Shared& shared, const GroupedGemm& p, const Item& item,
                                    const Place& place,
                                    const float (&sums)[kTile.row_blocks][kN / 2]) {
    const auto sync_group = [&] {
      cutlass::arch::NamedBarrier::sync(Config::kGroupThreads, 1 + place.row_group);
    };
    constexpr int kChunk = kN < Config::kStoreTokens ? kN : Config::kStoreTokens;
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

  template <int kN>
  __device__ static void process(Shared& shared, const GroupedGemm& p, const Item& item,
                                 const Place& place, StageState& stage) {
    float sums[kTile.row_blocks][kN / 2];
    multiply_tile<kN>(shared, item, place, stage, sums);
    store_tile<kN>(shared, p, item, place, sums);
  }

  /// The narrowest wgmma that covers the tile, so that few rows cost little.
  __device__ static void process_any(Shared& shared, const GroupedGemm& p, const Item& item,
                                     const Place& place, StageState& stage) {
    constexpr int kMax = kTile.max_tokens;
    if (kMax > 8 && kMax <= 32 && item.num_tokens <= 8) {
      process<8>(shared, p, item, place, stage);
    } else if (kMax > 16 && kMax <= 64 && item.num_tokens <= 16) {
      process<16>(shared, p, item, place, stage);
    } else if (kMax > 32 && kMax <= 128 && item.num_tokens <= 32) {
      process<32>(shared, p, item, place, stage);
    } else if (kMax > 64 && item.num_tokens <= 64) {
      process<64>(shared, p, item, place, stage);
    } else if (kMax > 128 && item.num_tokens <= 128) {
      process<128>(shared, p, item, place, stage);
    } else if (kMax > 192 && item.num_tokens <= 192) {
      process<192>(shared, p, item, place, stage);
    } else {
      process<kMax>(shared, p, item, place, stage);
    }
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
      process_any(shared, p, item, place, stage);
    }
  }
};

// ---- The kernel ---------------------------------------------------------------------------------

/// kTile by its number: nvcc cannot name kernels with class-type template arguments.
template <typename Weights, int kConfig>
__global__ __launch_bounds__(
    (GemmConfig<Weights, kTileConfigs[kConfig]>::kThreads),
    1) void grouped_gemm_kernel(const __grid_constant__ GroupedGemm problem) {
  using Kernel = GemmKernel<Weights, kTileConfigs[kConfig]>;
  using Config = typename Kernel::Config;
  extern __shared__ std::uint8_t memory[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);

  if (threadIdx.x == 0) {
    for (int s = 0; s < Config::kStages; ++s) {
      Barrier::init(&shared.stage_full[s], 1 + Config::kRowWarps);
      Barrier::init(&shared.stage_free[s], Config::kMultiplyWarps);
    }
    for (int s = 0; s < Config::kItemSlots; ++s) {
      Barrier::init(&shared.item_full[s], 1);
      Barrier::init(&shared.item_free[s], Config::kRowWarps + Config::kMultiplyWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  cudaGridDependencySynchronize();
  Kernel::count_tiles(shared, problem);

  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kLoadRegisters>();
    if (threadIdx.x == 0) {
      Kernel::load_weights(shared, problem);
    } else if (threadIdx.x >= Config::kFirstRowThread) {
      Kernel::load_tokens(shared, problem);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kMultiplyRegisters>();
    Kernel::multiply_tiles(shared, problem);
  }
}

}  // namespace fusedmoe::cuda
