// Routing data of few slots, by every block on its own: for kernels that also permute the rows.
#pragma once

#include <cstdint>

#include "cuda/rows/routing_data.h"
#include "cuda/rows/row_transform.cuh"
#include "cuda/rows/sort_slots.cuh"
#include "moe/local_experts.h"

namespace fusedmoe::cuda {

/// Slots up to which every block sorts all of them, which is faster than sharing.
inline constexpr std::int64_t kMaxFewSlots = 2048;
/// More experts need more shared memory than a block has.
inline constexpr std::int64_t kMaxSortedExperts = 16384;

/// What a sort of the slots writes, and what it does besides.
struct RoutingDataParams {
  const std::int32_t* topk_ids;
  std::int64_t slots;
  int topk;
  int num_experts;  // local ones
  int warps;        // of a block, that own slots
  core::LocalExperts local_experts;
  std::int32_t* expert_num_tokens;
  std::int32_t* expert_offsets;    // or null
  std::int32_t* permuted_to_slot;  // or null
  std::int32_t* slot_to_row;
  std::int64_t capacity;  // 0: rows without gaps; else row r of expert e is e * capacity + r
  std::int32_t* zeroed;
  std::int64_t num_zeroed;
  RowTransform rows;  // null `to`: nothing is permuted

  __device__ int row_of(const SlotCounters& counters, int expert, int number) const {
    if (expert < 0) return -1;
    return capacity > 0 ? static_cast<int>(expert * capacity + number)
                        : counters.offsets[expert] + number;
  }
};

/// Warps that own slots where a block sorts so many: as many as counters fit.
inline int sorting_warps(std::int64_t slots, std::int64_t num_experts, int threads) {
  constexpr std::int64_t kCounterBytes = 64 << 10;
  const std::int64_t most = kCounterBytes / (4 * num_experts);
  const std::int64_t wanted = (slots + 31) / 32;
  const std::int64_t warps = wanted < threads / 32 ? wanted : threads / 32;
  return static_cast<int>(warps < most ? (warps > 1 ? warps : 1) : (most > 1 ? most : 1));
}

/// Zeroes this thread's part of the words.
__device__ inline void zero_words(const RoutingDataParams& p, int rank, int num_ranks) {
  const std::int64_t step = static_cast<std::int64_t>(num_ranks) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(rank) * blockDim.x + threadIdx.x;
       i < p.num_zeroed; i += step) {
    p.zeroed[i] = 0;
  }
}

/// Counts, offsets, and -1 behind the last row, from counters that are complete.
__device__ inline void write_counts(const RoutingDataParams& p, const SlotCounters& counters) {
  for (int e = static_cast<int>(threadIdx.x); e <= p.num_experts;
       e += static_cast<int>(blockDim.x)) {
    const int offset = counters.offsets[e];
    if (e < p.num_experts) p.expert_num_tokens[e] = counters.offsets[e + 1] - offset;
    if (p.expert_offsets) p.expert_offsets[e] = offset;
  }
  if (!p.permuted_to_slot) return;
  for (std::int64_t row = counters.offsets[p.num_experts] + static_cast<int>(threadIdx.x);
       row < p.slots; row += blockDim.x) {
    p.permuted_to_slot[row] = -1;
  }
}

/// This block's share of the permuted rows, a warp at a time. Whole warps call slot_of(row) and
/// expert_of(slot). Copies are kernels of their own: cold code takes time.
template <RowKind kKind, typename SlotOf, typename ExpertOf>
__device__ void permute_share(const RowTransform& t, int rows, int topk, int rank, int num_ranks,
                              const SlotOf& slot_of, const ExpertOf& expert_of) {
  if (!t.to) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warps = static_cast<int>(blockDim.x / 32), warp = static_cast<int>(threadIdx.x / 32);
  const int spans = (units_of(t) + kSpanUnits - 1) / kSpanUnits, count = rows * spans;
  const int step = num_ranks * warps;
  if constexpr (kKind != RowKind::kCopy) {
    // Spans next to each other, as the scale of a row may take all of it.
    const int share = (count + step - 1) / step, first = (rank * warps + warp) * share;
    int last_row = -1;
    float scale = 1;
    for (int i = first; i < min(first + share, count); ++i) {
      const int row = i / spans, slot = slot_of(row), unit = i % spans * kSpanUnits + lane;
      const int expert = t.differ_by_expert() ? expert_of(slot) : 0;
      const uint4 raw = read_unit(t, slot / topk, unit);
      if (row != last_row) scale = scale_of_row<kKind>(t, slot / topk);
      last_row = row;
      write_unit<kKind>(t, row, unit, convert_unit<kKind>(t, raw, expert, scale));
    }
  } else {
    constexpr int kBatch = 4;  // reads of a lane at the same time
    for (int first = rank * warps + warp; first < count; first += kBatch * step) {
      uint4 values[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = first + b * step;
        if (i < count) {
          values[b] = read_unit(t, slot_of(i / spans) / topk, i % spans * kSpanUnits + lane);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = first + b * step;
        const int unit = i % spans * kSpanUnits + lane;
        if (i < count && unit < units_of(t)) {
          auto* to = static_cast<char*>(t.to) + i / spans * t.to_pitch;
          reinterpret_cast<uint4*>(to)[unit] = values[b];
        }
      }
    }
  }
}

/// Words of shared memory of sort_few_slots().
inline int few_slots_words(std::int64_t slots, int num_experts, int warps) {
  return SlotCounters::words(num_experts, warps) + static_cast<int>(slots);
}

/// Up to 32 slots, by every warp on its own: it compares all of them with each other. A warp of
/// block 0 writes a part of the routing data; all permute their rows.
template <RowKind kKind, typename ExpertOf>
__device__ void sort_warp_of_slots(const RoutingDataParams& p, int rank, int num_ranks,
                                   const ExpertOf& expert_of) {
  const int slots = static_cast<int>(p.slots), lane = static_cast<int>(threadIdx.x % 32);
  const int expert = lane < slots ? expert_of(lane) : -1;
  const int rows = __popc(__ballot_sync(~0u, expert >= 0));
  int offset = 0, number = 0;  // of this lane's slot: first row of its expert, rows before it there
  for (int slot = 0; slot < slots; ++slot) {
    const int other = __shfl_sync(~0u, expert, slot);
    offset += other >= 0 && other < expert;
    number += other == expert && slot < lane;
  }
  const int sorted = expert < 0 ? -1 : offset + number;
  int slot_of_lane = -1;  // of row `lane`
  for (int slot = 0; slot < slots; ++slot) {
    if (__shfl_sync(~0u, sorted, slot) == lane) slot_of_lane = slot;
  }
  permute_share<kKind>(
      p.rows, rows, p.topk, rank, num_ranks,
      [&](int row) { return __shfl_sync(~0u, slot_of_lane, row); }, expert_of);
  if (rank > 0) return;
  if (threadIdx.x < slots) {
    const bool has_gaps = p.capacity > 0 && expert >= 0;
    p.slot_to_row[lane] = has_gaps ? static_cast<int>(expert * p.capacity + number) : sorted;
    if (p.permuted_to_slot) p.permuted_to_slot[lane] = slot_of_lane;
  }
  for (int first = 0; first <= p.num_experts; first += static_cast<int>(blockDim.x)) {
    const int e = first + static_cast<int>(threadIdx.x);
    int count = 0, before = 0;
    for (int slot = 0; slot < slots; ++slot) {
      const int other = __shfl_sync(~0u, expert, slot);
      count += other == e;
      before += other >= 0 && other < e;
    }
    if (e < p.num_experts) p.expert_num_tokens[e] = count;
    if (e <= p.num_experts && p.expert_offsets) p.expert_offsets[e] = before;
  }
}

/// All of the routing data, by block 0 of num_ranks, and a share of the permuted rows by each: all
/// sort all slots, so that none waits for another.
template <RowKind kKind, typename ExpertOf>
__device__ void sort_few_slots(const RoutingDataParams& p, int* memory, int rank, int num_ranks,
                               const ExpertOf& expert_of) {
  if (p.slots <= 32) {
    sort_warp_of_slots<kKind>(p, rank, num_ranks, expert_of);
    return;
  }
  const SlotCounters counters(p.num_experts, p.warps, memory);
  int* permuted_to_slot = memory + SlotCounters::words(p.num_experts, p.warps);
  sort_slots<1>(counters, 0, p.slots, expert_of, [&](std::int64_t slot, int expert, int number) {
    const int row = p.row_of(counters, expert, number);
    if (row >= 0 && p.capacity == 0) permuted_to_slot[row] = static_cast<int>(slot);
    if (rank > 0) return;
    p.slot_to_row[slot] = row;
    if (row >= 0 && p.permuted_to_slot) p.permuted_to_slot[row] = static_cast<int>(slot);
  });
  if (rank == 0) write_counts(p, counters);
  __syncthreads();
  permute_share<kKind>(
      p.rows, counters.offsets[p.num_experts], p.topk, rank, num_ranks,
      [&](int row) { return permuted_to_slot[row]; }, expert_of);
}

}  // namespace fusedmoe::cuda
