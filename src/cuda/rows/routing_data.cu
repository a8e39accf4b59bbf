// Routing data on the device, always in one launch: few slots are sorted by every block, which then
// copies a share of the rows; many are shared by the blocks of one cluster. Neither needs memory
// that somebody has cleared.
#include "cuda/rows/routing_data.h"

#include <algorithm>
#include <string>
#include <utility>

#include "cuda/device/cp_async.cuh"
#include "cuda/device/launch.h"
#include "cuda/device/overlap.cuh"
#include "cuda/rows/permute.h"
#include "cuda/rows/routing_data.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kClusterBlocks = 8;  // the most that every device can run as a cluster

/// The local expert of a slot. Where rows have a capacity, a token has at most one row of an
/// expert, for its first slot that names it.
__device__ int expert_of_slot(const RoutingDataParams& p, std::int64_t slot) {
  const int expert = p.local_experts(p.topk_ids[slot]);
  if (p.capacity == 0 || expert < 0) return expert;
  for (std::int64_t other = slot - slot % p.topk; other < slot; ++other) {
    if (p.local_experts(p.topk_ids[other]) == expert) return -1;
  }
  return expert;
}

/// Fetches a share of the rows into the L2 cache, while the slots are sorted.
__device__ void prefetch_rows(const RoutingDataParams& p) {
  constexpr std::int64_t kLine = 128;
  const std::int64_t lines = (p.rows.row_bytes + kLine - 1) / kLine;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < p.slots / p.topk * lines; i += step) {
    prefetch_l2(static_cast<const char*>(p.rows.rows) + i / lines * p.rows.row_pitch +
                i % lines * kLine);
  }
}

template <RowKind kKind>
__global__ void __launch_bounds__(kMaxThreads, 1) sort_few_slots_kernel(const RoutingDataParams p) {
  extern __shared__ int memory[];
  const int rank = static_cast<int>(blockIdx.x), num_ranks = static_cast<int>(gridDim.x);
  let_next_launch_begin();
  zero_words(p, rank, num_ranks);
  if (p.rows.to) prefetch_rows(p);
  sort_few_slots<kKind>(p, memory, rank, num_ranks,
                        [&](std::int64_t slot) { return expert_of_slot(p, slot); });
}

/// By the blocks of one cluster, each of which sorts a range of the slots, or by one block.
template <int kBlocks>
__device__ __forceinline__ void sort_many_slots(const RoutingDataParams& p, int rank) {
  extern __shared__ int memory[];
  const SlotCounters counters(p.num_experts, p.warps, memory);
  let_next_launch_begin();
  zero_words(p, rank, kBlocks);
  const std::int64_t share = (p.slots + kBlocks - 1) / kBlocks;
  sort_slots<kBlocks>(
      counters, min(rank * share, p.slots), min((rank + 1) * share, p.slots),
      [&](std::int64_t slot) { return expert_of_slot(p, slot); },
      [&](std::int64_t slot, int expert, int number) {
        const int row = p.row_of(counters, expert, number);
        p.slot_to_row[slot] = row;
        if (row >= 0 && p.permuted_to_slot) p.permuted_to_slot[row] = static_cast<int>(slot);
      });
  if (rank == 0) write_counts(p, counters);
}
__global__ void FUSEDMOE_CLUSTER(kClusterBlocks) __launch_bounds__(kMaxThreads)
    sort_many_slots_kernel(const RoutingDataParams p) {
  sort_many_slots<kClusterBlocks>(p, cluster_rank());
}
__global__ void __launch_bounds__(kMaxThreads)
    sort_many_slots_alone_kernel(const RoutingDataParams p) {
  sort_many_slots<1>(p, 0);
}

/// Whether the rows were permuted.
bool sort_slots_of(RoutingDataParams& p, const RowTransform& rows, const Stream& stream) {
  if (p.num_experts > kMaxSortedExperts) {
    throw Error::unsupported(Reason::kShape, "num_local_experts", std::to_string(p.num_experts),
                             "at most " + std::to_string(kMaxSortedExperts) + " on a CUDA device");
  }
  const bool few = p.slots <= kMaxFewSlots;
  // What comes before is the caller's, and may be a copy: no overlap.
  if (!few) {
    const bool cluster = may_cluster(sort_many_slots_kernel, stream.device);
    const int blocks = cluster ? kClusterBlocks : 1;
    p.warps = sorting_warps(p.slots / blocks, p.num_experts, kMaxThreads);
    launch(cluster ? sort_many_slots_kernel : sort_many_slots_alone_kernel,
           dim3(static_cast<unsigned>(blocks)), dim3(kMaxThreads),
           sizeof(int) * static_cast<std::size_t>(SlotCounters::words(p.num_experts, p.warps)),
           stream, false, p);
    return false;
  }
  constexpr std::int64_t kBlockBytes = 4 << 10, kMostBlockBytes = 128 << 10;  // of rows
  const std::int64_t bytes = rows.to ? p.slots * rows.row_bytes : 0;
  const std::int64_t most_blocks = bytes > 0 ? multiprocessor_count(stream.device) : 1;
  const bool copy = bytes > 0 && bytes <= most_blocks * kMostBlockBytes;
  if (copy) p.rows = rows;
  const std::int64_t blocks =
      copy ? std::clamp<std::int64_t>(bytes / kBlockBytes, 1, most_blocks) : 1;
  const auto threads =
      static_cast<int>(std::clamp<std::int64_t>((p.slots + 31) / 32 * 32, 256, kMaxThreads));
  p.warps = sorting_warps(p.slots, p.num_experts, threads);
  const auto words = static_cast<std::size_t>(few_slots_words(p.slots, p.num_experts, p.warps));
  const auto launch_sort = [&](auto kernel) {
    launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
           sizeof(int) * words, stream, false, p);
  };
  if (p.rows.to && p.rows.kind != RowKind::kCopy) {
    with_kind(p.rows.kind, [&](auto kind) { launch_sort(sort_few_slots_kernel<kind()>); });
  } else {
    launch_sort(sort_few_slots_kernel<RowKind::kCopy>);
  }
  return copy;
}

RoutingDataParams make_params(const TensorView& topk_ids, const TensorView& expert_map,
                              std::int64_t num_local_experts) {
  RoutingDataParams p{};
  p.topk_ids = topk_ids.as<const std::int32_t>();
  p.slots = topk_ids.numel();
  p.topk = static_cast<int>(topk_ids.size(1));
  p.num_experts = static_cast<int>(num_local_experts);
  p.local_experts = core::LocalExperts(expert_map, num_local_experts);
  return p;
}

}  // namespace

RoutingData routing_data_views(const TensorView& topk_ids, std::int64_t num_local_experts,
                               void* memory) {
  const std::int64_t slots = topk_ids.numel();
  auto* next = static_cast<std::int32_t*>(memory);
  const auto view = [&](std::int64_t count) {
    return TensorView(std::exchange(next, next + count), DType::kI32, {count}, topk_ids.device());
  };
  RoutingData data;
  data.expert_num_tokens = view(num_local_experts);
  data.expert_offsets = view(num_local_experts + 1);
  data.permuted_to_slot = view(slots);
  data.slot_to_permuted = view(slots);
  return data;
}

RoutingData build_routing_data(const TensorView& topk_ids, const TensorView& expert_map,
                               std::int64_t num_local_experts, void* memory,
                               const RoutingDataExtras& extras, const Stream& stream) {
  const RoutingData data = routing_data_views(topk_ids, num_local_experts, memory);
  RoutingDataParams p = make_params(topk_ids, expert_map, num_local_experts);
  p.expert_num_tokens = data.expert_num_tokens.as<std::int32_t>();
  p.expert_offsets = data.expert_offsets.as<std::int32_t>();
  p.permuted_to_slot = data.permuted_to_slot.as<std::int32_t>();
  p.slot_to_row = data.slot_to_permuted.as<std::int32_t>();
  p.zeroed = extras.zeroed;
  p.num_zeroed = extras.num_zeroed;
  if (sort_slots_of(p, extras.rows, stream) || !extras.rows.to) return data;
  PermuteRows permute;
  permute.rows = extras.rows;
  permute.slot_to_row = p.slot_to_row;
  permute.num_tokens = topk_ids.size(0);
  permute.topk = topk_ids.size(1);
  permute.topk_ids = p.topk_ids;
  permute.local_experts = p.local_experts;
  permute_rows(permute, stream);
  return data;
}

void assign_rows(const TensorView& topk_ids, const TensorView& expert_map,
                 const core::RowAssignment& out, Stream stream) {
  RoutingDataParams p = make_params(topk_ids, expert_map, out.expert_num_tokens.numel());
  p.expert_num_tokens = out.expert_num_tokens.as<std::int32_t>();
  p.slot_to_row = out.slot_rows.as<std::int32_t>();
  p.capacity = std::max<std::int64_t>(topk_ids.size(0), 1);
  sort_slots_of(p, {}, stream);
}

}  // namespace fusedmoe::cuda
