// Which rows go to which rank: for each rank the list of its rows. Block r handles rank r: it flags
// the rows and numbers them by a prefix sum.
#include "cuda/rows/rank_rows.h"

#include <algorithm>
#include <cub/block/block_scan.cuh>
#include <limits>
#include <vector>

#include "core/ceil_div.h"
#include "cuda/device/launch.h"
#include "cuda/device/overlap.cuh"
#include "fusedmoe/runtime.h"
#include "moe/local_experts.h"
#include "moe/replica.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 512;
/// What a thread looks at between two prefix sums.
constexpr int kItems = 8;

/// In ascending order over [0, count): visit(i, number) for each i, with a number if found(i), else
/// -1. Returns how many were found.
template <typename Found, typename Visit>
__device__ int number_found(std::int64_t count, const Found& found, const Visit& visit) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  int first = 0;
  for (std::int64_t begin = 0; begin < count; begin += kThreads * kItems) {
    const std::int64_t mine = begin + threadIdx.x * kItems;
    bool is_found[kItems];
    int found_here = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      is_found[i] = mine + i < count && found(mine + i);
      found_here += is_found[i];
    }
    int before = 0, total = 0;
    Scan(storage).ExclusiveSum(found_here, before, total);
    for (int i = 0; i < kItems && mine + i < count; ++i) {
      visit(mine + i, is_found[i] ? first + before++ : -1);
    }
    first += total;
    __syncthreads();  // before the next sum writes
  }
  return first;
}

struct DestinationParams {
  core::ReplicaTable replicas;
  const std::int32_t* topk_ids;
  const std::int32_t* physical_ranks;
  std::int64_t num_tokens, topk, num_ranks, row_stride;
  std::int64_t tokens_per_block;
  std::int32_t* physical_ids;
  std::int32_t* send_rows;  // null: only the ids
  std::int32_t* send_counts;
  std::int32_t* send_tokens;
};

/// The physical ids; in send_rows 0 where a token goes to a rank, else -1.
__global__ __launch_bounds__(kThreads) void choose_ranks_kernel(const DestinationParams p) {
  const std::int64_t begin = blockIdx.x * p.tokens_per_block;
  const std::int64_t end = min(begin + p.tokens_per_block, p.num_tokens);
  if (p.send_rows) {
    const std::int64_t stop = end * p.num_ranks;
    for (std::int64_t i = begin * p.num_ranks + threadIdx.x; i < stop; i += kThreads) {
      p.send_rows[i] = -1;
    }
    __syncthreads();
  }
  for (std::int64_t slot = begin * p.topk + threadIdx.x; slot < end * p.topk; slot += kThreads) {
    const std::int64_t token = slot / p.topk;
    const std::int32_t physical = p.replicas.choose(p.topk_ids[slot], token);
    p.physical_ids[slot] = physical;
    if (!p.send_rows || physical < 0) continue;
    const std::int32_t rank = p.physical_ranks[physical];
    if (rank >= 0) p.send_rows[token * p.num_ranks + rank] = 0;
  }
}

__global__ __launch_bounds__(kThreads) void number_rows_kernel(const DestinationParams p) {
  wait_for_previous_launch();
  const std::int64_t rank = blockIdx.x;
  const int count = number_found(
      p.num_tokens,
      [&](std::int64_t token) { return p.send_rows[token * p.num_ranks + rank] >= 0; },
      [&](std::int64_t token, int number) {
        if (number < 0) return;
        const std::int64_t row = rank * p.row_stride + number;
        p.send_rows[token * p.num_ranks + rank] = static_cast<std::int32_t>(row);
        p.send_tokens[row] = static_cast<std::int32_t>(token);
      });
  if (threadIdx.x == 0) p.send_counts[rank] = count;
}

struct PackedTensor {
  const char* from;
  char* to;
  std::int64_t from_pitch;
  std::int32_t row_bytes, unit;
};

struct PackPart {
  std::int32_t rank, begin, end, to;
};

struct PackParams {
  PackedTensor tensors[core::RowPacking::kMostTensors];
  int num_tensors, ids;  // which tensor has the ids; -1: none
  int num_parts;
  std::int32_t num_tokens;
  const std::int32_t* tokens;  // null: row i is that of token i
  const std::int32_t* counts;  // null: all tokens go everywhere
  std::int64_t token_stride;
  PackPart parts[kMaxRanks];
};

constexpr int kPackThreads = 256;

template <typename Unit>
__device__ void copy_row(const char* from, char* to, int row_bytes) {
  constexpr int kUnits = 4;  // of a thread, read at the same time
  const auto* source = reinterpret_cast<const Unit*>(from);
  auto* target = reinterpret_cast<Unit*>(to);
  const int units = row_bytes / static_cast<int>(sizeof(Unit));
  for (int first = 0; first < units; first += kUnits * kPackThreads) {
    const int unit = first + static_cast<int>(threadIdx.x);
    Unit values[kUnits] = {};
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (unit + u * kPackThreads < units) values[u] = source[unit + u * kPackThreads];
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (unit + u * kPackThreads < units) target[unit + u * kPackThreads] = values[u];
    }
  }
}

/// A block for each row of each part. Neighbouring blocks have rows of near tokens, so a token that
/// goes to several ranks is read from memory once.
__global__ __launch_bounds__(kPackThreads) void pack_rows_kernel(
    const __grid_constant__ PackParams p) {
  const PackPart& part = p.parts[blockIdx.x % p.num_parts];
  const std::int32_t i = part.begin + static_cast<std::int32_t>(blockIdx.x / p.num_parts);
  if (i >= part.end) return;
  const std::int64_t row = part.to + std::int64_t{i};
  if (i >= (p.counts ? p.counts[part.rank] : p.num_tokens)) {
    const PackedTensor& ids = p.tensors[max(p.ids, 0)];
    for (int b = static_cast<int>(threadIdx.x); p.ids >= 0 && b < ids.row_bytes;
         b += kPackThreads) {
      ids.to[row * ids.row_bytes + b] = static_cast<char>(-1);
    }
    return;
  }
  const std::int64_t token = p.tokens ? p.tokens[part.rank * p.token_stride + i] : i;
  for (int t = 0; t < p.num_tensors; ++t) {
    const PackedTensor& tensor = p.tensors[t];
    const char* from = tensor.from + token * tensor.from_pitch;
    char* to = tensor.to + row * tensor.row_bytes;
    if (tensor.unit == 16) {
      copy_row<uint4>(from, to, tensor.row_bytes);
    } else if (tensor.unit == 4) {
      copy_row<std::uint32_t>(from, to, tensor.row_bytes);
    } else {
      copy_row<std::uint8_t>(from, to, tensor.row_bytes);
    }
  }
}

PackedTensor packed_tensor(const core::RowPacking::Tensor& tensor) {
  PackedTensor result{};
  result.from = tensor.from.as<const char>();
  result.to = tensor.to.as<char>();
  result.from_pitch = bytes(tensor.from.dtype(), tensor.from.stride(0));
  result.row_bytes = static_cast<std::int32_t>(bytes(tensor.to.dtype(), tensor.to.size(1)));
  const auto all = reinterpret_cast<std::uintptr_t>(result.from) |
                   reinterpret_cast<std::uintptr_t>(result.to) |
                   static_cast<std::uintptr_t>(result.from_pitch | result.row_bytes);
  result.unit = all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
  return result;
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

void find_destinations(const core::TokenDestinations& destinations, Stream stream) {
  const std::int64_t num_ranks = destinations.send_counts ? destinations.send_counts.numel() : 0;
  const std::int64_t num_tokens = destinations.topk_ids.size(0),
                     topk = destinations.topk_ids.size(1);
  const std::int64_t tokens_per_block = std::max<std::int64_t>(kThreads / topk, 1);
  const DestinationParams params{core::ReplicaTable(destinations),
                                 destinations.topk_ids.as<const std::int32_t>(),
                                 destinations.physical_ranks.as<const std::int32_t>(),
                                 num_tokens,
                                 topk,
                                 num_ranks,
                                 destinations.row_stride,
                                 tokens_per_block,
                                 destinations.physical_ids.as<std::int32_t>(),
                                 destinations.send_rows.as<std::int32_t>(),
                                 destinations.send_counts.as<std::int32_t>(),
                                 destinations.send_tokens.as<std::int32_t>()};
  if (num_tokens > 0) {
    const std::int64_t blocks = core::ceil_div(num_tokens, tokens_per_block);
    launch(choose_ranks_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream,
           false, params);
  }
  if (num_ranks == 0) return;
  launch(number_rows_kernel, dim3(static_cast<unsigned>(num_ranks)), dim3(kThreads), 0, stream,
         num_tokens > 0, params);
}

void pack_rows(const core::RowPacking& packing, Stream stream) {
  PackParams params{};
  params.num_tensors = static_cast<int>(packing.tensors.size());
  params.ids = -1;
  for (int t = 0; t < params.num_tensors; ++t) {
    params.tensors[t] = packed_tensor(packing.tensors[t]);
    if (packing.ids && packing.tensors[t].to.data() == packing.ids.data()) params.ids = t;
  }
  params.num_tokens = static_cast<std::int32_t>(packing.tensors.front().from.size(0));
  params.tokens = packing.tokens.as<const std::int32_t>();
  params.counts = packing.counts.as<const std::int32_t>();
  params.token_stride = packing.tokens ? packing.tokens.size(1) : 0;
  std::int64_t most = 0;
  for (const core::RowPacking::Part& part : packing.parts) {
    params.parts[params.num_parts++] = {part.rank, static_cast<std::int32_t>(part.begin),
                                        static_cast<std::int32_t>(part.end),
                                        static_cast<std::int32_t>(part.to)};
    most = std::max(most, part.end - part.begin);
  }
  if (most <= 0) return;
  launch(pack_rows_kernel, dim3(static_cast<unsigned>(most * params.num_parts)), dim3(kPackThreads),
         0, stream, false, params);
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
