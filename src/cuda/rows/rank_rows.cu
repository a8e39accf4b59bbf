// Which rows go to which rank. Block r looks for what concerns rank r, chunk by chunk in order; a
// prefix sum over the block numbers what it finds.
#include "cuda/rows/rank_rows.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cuda/device/launch.h"
#include "fusedmoe/runtime.h"
#include "moe/local_experts.h"
#include "moe/replica.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

/// The number of threads before this one that found something; `total` of the whole block.
__device__ int rank_in_block(bool found, int& total) {
  __shared__ int warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned mask = __ballot_sync(~0u, found);
  if (lane == 0) warps[warp] = __popc(mask);
  __syncthreads();
  int before = __popc(mask & ((1u << lane) - 1));
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  __syncthreads();  // before the next call writes
  return before;
}

/// The same, in ascending order over [0, count): visit(i, number) for each i that found(i) names.
/// Returns how many there are.
template <typename Found, typename Visit>
__device__ int number_found(std::int64_t count, const Found& found, const Visit& visit) {
  int first = 0;
  for (std::int64_t begin = 0; begin < count; begin += kThreads) {
    const std::int64_t i = begin + threadIdx.x;
    const bool mine = i < count && found(i);
    int total = 0;
    const int before = rank_in_block(mine, total);
    if (i < count) visit(i, mine ? first + before : -1);
    first += total;
  }
  return first;
}

struct PlanParams {
  core::ReplicaTable replicas;
  const std::int32_t* topk_ids;
  const std::int32_t* physical_ranks;
  std::int64_t num_tokens, topk, num_ranks, row_stride;
  std::int32_t* physical_ids;
  std::int32_t* send_rows;
  std::int32_t* send_counts;
};

__global__ __launch_bounds__(kThreads) void plan_dispatch_kernel(const PlanParams p) {
  const std::int64_t rank = blockIdx.x;
  if (rank == 0) {
    for (std::int64_t slot = threadIdx.x; slot < p.num_tokens * p.topk; slot += kThreads) {
      p.physical_ids[slot] = p.replicas.choose(p.topk_ids[slot], slot / p.topk);
    }
  }
  const auto goes = [&](std::int64_t token) {
    for (std::int64_t slot = token * p.topk; slot < (token + 1) * p.topk; ++slot) {
      const std::int32_t physical = p.replicas.choose(p.topk_ids[slot], token);
      if (physical >= 0 && p.physical_ranks[physical] == rank) return true;
    }
    return false;
  };
  const int count = number_found(p.num_tokens, goes, [&](std::int64_t token, int number) {
    p.send_rows[token * p.num_ranks + rank] =
        number < 0 ? -1 : static_cast<std::int32_t>(rank * p.row_stride + number);
  });
  if (threadIdx.x == 0) p.send_counts[rank] = count;
}

struct LimitParams {
  std::int32_t* send_rows;
  std::int32_t* physical_ids;
  const std::int32_t* physical_ranks;
  std::int32_t* dropped;
  std::int64_t num_tokens, topk, num_ranks, row_stride;
  std::int32_t room[kMaxRanks];
};

/// A thread for each token.
__global__ __launch_bounds__(kThreads) void limit_rows_kernel(const LimitParams p) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  std::int32_t dropped = 0;
  if (token < p.num_tokens) {
    std::int32_t* rows = p.send_rows + token * p.num_ranks;
    const auto fits = [&](std::int64_t rank) {
      return rows[rank] - rank * p.row_stride < p.room[rank];
    };
    for (std::int64_t slot = token * p.topk; slot < (token + 1) * p.topk; ++slot) {
      const std::int32_t id = p.physical_ids[slot];
      const std::int32_t rank = id < 0 ? -1 : p.physical_ranks[id];
      if (rank >= 0 && !fits(rank)) p.physical_ids[slot] = -1;
    }
    for (std::int64_t rank = 0; rank < p.num_ranks; ++rank) {
      if (fits(rank)) continue;
      rows[rank] = -1;
      ++dropped;
    }
  }
  dropped = __reduce_add_sync(~0u, dropped);
  if (p.dropped && dropped > 0 && threadIdx.x % 32 == 0) atomicAdd(p.dropped, dropped);
}

__global__ void number_parts_kernel(std::int32_t* rows, std::int64_t count, std::int64_t parts,
                                    std::int64_t stride) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) rows[i] = static_cast<std::int32_t>(i % parts * stride + i / parts);
}

/// Where the slots of each source begin.
struct Begins {
  std::int32_t of[kMaxRanks + 1];
};

struct ExpandParams {
  const std::int32_t* ids;
  core::LocalExperts local_experts;
  std::int32_t* slot_rows;
  std::int32_t* row_ids;
  float* row_weights;
  std::int32_t* counts;
};

/// The number of each slot among those of its source, and the counts.
__global__ __launch_bounds__(kThreads) void expand_slots_kernel(const ExpandParams p,
                                                                const Begins begins) {
  const int source = blockIdx.x;
  const std::int32_t begin = begins.of[source];
  const int count = number_found(
      begins.of[source + 1] - begin,
      [&](std::int64_t slot) { return p.local_experts(p.ids[begin + slot]) >= 0; },
      [&](std::int64_t slot, int number) { p.slot_rows[begin + slot] = number; });
  if (threadIdx.x == 0) p.counts[source] = count;
}

/// Moves the numbers of each source behind those of the sources before it, and fills the rows.
__global__ __launch_bounds__(kThreads) void place_slots_kernel(const ExpandParams p,
                                                               const Begins begins) {
  const int source = blockIdx.x;
  std::int32_t base = 0;
  for (int s = 0; s < source; ++s) base += p.counts[s];
  for (std::int32_t slot = begins.of[source] + static_cast<std::int32_t>(threadIdx.x);
       slot < begins.of[source + 1]; slot += kThreads) {
    if (p.slot_rows[slot] < 0) continue;
    const std::int32_t row = p.slot_rows[slot] += base;
    p.row_ids[row] = p.ids[slot];
    p.row_weights[row] = 1;
  }
}

struct NumberParams {
  const std::int32_t* physical_ids;
  const std::int32_t* physical_ranks;
  std::int64_t slots;
  std::int32_t* slot_rows;
  std::int32_t* counts;
};

__device__ std::int32_t rank_of(const NumberParams& p, std::int64_t slot) {
  return p.physical_ids[slot] < 0 ? -1 : p.physical_ranks[p.physical_ids[slot]];
}

__global__ __launch_bounds__(kThreads) void number_slots_kernel(const NumberParams p) {
  const int rank = blockIdx.x;
  const int count = number_found(
      p.slots, [&](std::int64_t slot) { return rank_of(p, slot) == rank; },
      [&](std::int64_t slot, int number) {
        if (number >= 0) p.slot_rows[slot] = number;
        if (rank == 0 && rank_of(p, slot) < 0) p.slot_rows[slot] = -1;
      });
  if (threadIdx.x == 0) p.counts[rank] = count;
}

__global__ __launch_bounds__(kThreads) void base_slots_kernel(const NumberParams p) {
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= p.slots) return;
  const std::int32_t rank = rank_of(p, slot);
  for (std::int32_t r = 0; r < rank; ++r) p.slot_rows[slot] += p.counts[r];
}

dim3 blocks_for(std::int64_t count) {
  return dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads));
}

void read_counts(const TensorView& counts, std::span<std::int64_t> out, Stream stream) {
  std::vector<std::int32_t> host(out.size());
  copy(counts, TensorView(host.data(), DType::kI32, counts.shape()), stream);
  synchronize(stream);
  std::copy(host.begin(), host.end(), out.begin());
}

}  // namespace

void plan_dispatch(const core::DispatchPlan& plan, Stream stream) {
  const std::int64_t num_ranks = plan.send_counts.numel();
  const PlanParams params{core::ReplicaTable(plan),
                          plan.topk_ids.as<const std::int32_t>(),
                          plan.physical_ranks.as<const std::int32_t>(),
                          plan.topk_ids.size(0),
                          plan.topk_ids.size(1),
                          num_ranks,
                          plan.row_stride,
                          plan.physical_ids.as<std::int32_t>(),
                          plan.send_rows.as<std::int32_t>(),
                          plan.send_counts.as<std::int32_t>()};
  launch(plan_dispatch_kernel, dim3(static_cast<unsigned>(num_ranks)), dim3(kThreads), 0, stream,
         false, params);
}

void limit_rows(const core::RowLimits& limits, Stream stream) {
  LimitParams params{limits.send_rows.as<std::int32_t>(),
                     limits.physical_ids.as<std::int32_t>(),
                     limits.physical_ranks.as<const std::int32_t>(),
                     limits.dropped.as<std::int32_t>(),
                     limits.send_rows.size(0),
                     limits.physical_ids ? limits.physical_ids.size(1) : 0,
                     limits.send_rows.size(1),
                     limits.row_stride,
                     {}};
  if (params.num_tokens == 0) return;
  std::copy(limits.room.begin(), limits.room.end(), params.room);
  launch(limit_rows_kernel, blocks_for(params.num_tokens), dim3(kThreads), 0, stream, false,
         params);
}

void number_parts(const TensorView& rows, std::int64_t stride, Stream stream) {
  const std::int64_t count = rows.numel();
  if (count == 0) return;
  launch(number_parts_kernel, blocks_for(count), dim3(kThreads), 0, stream, false,
         rows.as<std::int32_t>(), count, rows.size(1), stride);
}

void expand_slots(const core::SlotExpansion& expansion,
                  std::span<const std::int64_t> rows_of_source, std::span<std::int64_t> counts,
                  Stream stream) {
  const auto num_ranks = static_cast<std::int64_t>(rows_of_source.size());
  Begins begins{};
  for (std::int64_t s = 0; s < num_ranks; ++s) {
    const std::int64_t slots = rows_of_source[s] * expansion.ids.size(1);
    begins.of[s + 1] = begins.of[s] + static_cast<std::int32_t>(slots);
  }
  const ExpandParams params{
      expansion.ids.as<const std::int32_t>(),
      core::LocalExperts(expansion.expert_map, std::numeric_limits<std::int32_t>::max()),
      expansion.slot_rows.as<std::int32_t>(),
      expansion.row_ids.as<std::int32_t>(),
      expansion.row_weights.as<float>(),
      expansion.counts.as<std::int32_t>()};
  const dim3 grid(static_cast<unsigned>(num_ranks));
  launch(expand_slots_kernel, grid, dim3(kThreads), 0, stream, false, params, begins);
  launch(place_slots_kernel, grid, dim3(kThreads), 0, stream, false, params, begins);
  read_counts(expansion.counts, counts, stream);
}

void number_slots(const core::SlotNumbers& numbers, std::span<std::int64_t> counts, Stream stream) {
  const NumberParams params{numbers.physical_ids.as<const std::int32_t>(),
                            numbers.physical_ranks.as<const std::int32_t>(),
                            numbers.physical_ids.numel(), numbers.slot_rows.as<std::int32_t>(),
                            numbers.counts.as<std::int32_t>()};
  launch(number_slots_kernel, dim3(static_cast<unsigned>(counts.size())), dim3(kThreads), 0, stream,
         false, params);
  if (params.slots > 0) {
    launch(base_slots_kernel, blocks_for(params.slots), dim3(kThreads), 0, stream, false, params);
  }
  read_counts(numbers.counts, counts, stream);
}

}  // namespace fusedmoe::cuda
