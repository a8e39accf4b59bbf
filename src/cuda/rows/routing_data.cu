// Routing data on the device: one block for each local expert reads all ids, which counts its rows
// and, for the offset, those of the experts before it; then it reads them again and places its rows
// in order, each warp those of a range of slots. No block waits for another, so one launch does for
// every size; few rows it copies as well, many are a launch of their own.
#include <algorithm>

#include "cuda/device/launch.h"
#include "cuda/device/prefetch.cuh"
#include "cuda/rows/routing_data.h"
#include "moe/local_experts.h"

namespace fusedmoe::cuda {
namespace {

struct RoutingDataParams {
  const std::int32_t* topk_ids;
  int slots;
  core::LocalExperts local_experts;
  std::int32_t* expert_num_tokens;
  std::int32_t* expert_offsets;
  std::int32_t* permuted_to_slot;
  std::int32_t* slot_to_permuted;
  RoutingDataExtras extras;
  int topk;
  bool copy;  // the rows, here
};

constexpr int kMaxThreads = 1024;

/// Sums over the block, in every thread; called once.
__device__ int2 block_sums(int2 value) {
  __shared__ int2 sums[kMaxThreads / 32];
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  const int2 sum = {__reduce_add_sync(~0u, value.x), __reduce_add_sync(~0u, value.y)};
  if (threadIdx.x % 32 == 0) sums[warp] = sum;
  __syncthreads();
  int2 total{};
  for (int w = 0; w < num_warps; ++w) {
    total.x += sums[w].x;
    total.y += sums[w].y;
  }
  return total;
}

constexpr int kCopyThreads = 128;
/// Bytes of rows that blocks of the first launch copy, on average, at most.
constexpr std::int64_t kCopiedBytes = 128 << 10;

/// `count` rows from `begin` on, whose slots are known, by the threads of a block.
__device__ void copy_rows(const RoutingDataParams& p, std::int64_t begin, unsigned count) {
  const auto chunks = static_cast<unsigned>(p.extras.row_bytes / 16);
  const auto* from = static_cast<const uint4*>(p.extras.rows);
  auto* to = static_cast<uint4*>(p.extras.permuted);
  for (unsigned i = threadIdx.x; i < count * chunks; i += blockDim.x) {
    const std::int64_t row = begin + i / chunks;
    const unsigned chunk = i % chunks;
    const std::int64_t token = p.permuted_to_slot[row] / p.topk;
    to[row * chunks + chunk] = from[token * chunks + chunk];
  }
}

/// Bit i of the result: whether slot `first` + i is of `expert`. One warp.
__device__ unsigned slots_of(const RoutingDataParams& p, int first, int expert) {
  const int slot = first + static_cast<int>(threadIdx.x % 32);
  return __ballot_sync(~0u, slot < p.slots && p.local_experts(p.topk_ids[slot]) == expert);
}

/// Places the rows of one expert, from row `next` to `end`, in the order of their slots.
__device__ void place_rows(const RoutingDataParams& p, int expert, int next, int end) {
  __shared__ int warp_rows[kMaxThreads / 32];
  constexpr int kMaxWords = 32;  // of 32 slots each: a lane keeps one
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  const int threads = static_cast<int>(blockDim.x);
  const int words = min((p.slots + threads - 1) / threads, kMaxWords);
  for (int first = 0; first < p.slots && next < end; first += words * threads) {
    const int warp_first = first + warp * words * 32;
    unsigned word = 0;
#pragma unroll 8
    for (int i = 0; i < words; ++i) {
      const unsigned slots = slots_of(p, warp_first + i * 32, expert);
      if (lane == i) word = slots;
    }
    int inclusive = __popc(word);  // rows up to this lane's word
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    if (lane == 31) warp_rows[warp] = inclusive;
    __syncthreads();
    const int rows = lane < num_warps ? warp_rows[lane] : 0;
    const int word_row =
        next + __reduce_add_sync(~0u, lane < warp ? rows : 0) + inclusive - __popc(word);
    for (unsigned left = __ballot_sync(~0u, word != 0); left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const unsigned slots = __shfl_sync(~0u, word, i);
      const int row = __shfl_sync(~0u, word_row, i) + __popc(slots & ((1u << lane) - 1));
      if (slots >> lane & 1) {
        const int slot = warp_first + i * 32 + lane;
        p.permuted_to_slot[row] = slot;
        p.slot_to_permuted[slot] = row;
      }
    }
    next += __reduce_add_sync(~0u, rows);
    __syncthreads();
  }
}

__global__ void routing_data_kernel(const RoutingDataParams p) {
  const int expert = static_cast<int>(blockIdx.x), num_experts = static_cast<int>(gridDim.x);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int first = expert * threads + thread, step = num_experts * threads;  // of the grid
  cudaTriggerProgrammaticLaunchCompletion();
  for (std::int64_t i = first; i < p.extras.num_zeroed; i += step) p.extras.zeroed[i] = 0;

  if (p.copy) {  // the rows' way from memory, while ids are read
    const std::int64_t bytes = p.slots / p.topk * p.extras.row_bytes;
    constexpr std::int64_t kLine = 128;
    for (std::int64_t at = first * kLine; at < bytes; at += step * kLine) {
      prefetch_l2(static_cast<const char*>(p.extras.rows) + at);
    }
  }

  int2 count{};  // rows of this expert, and of those before
#pragma unroll 8
  for (int slot = thread; slot < p.slots; slot += threads) {
    const int local = p.local_experts(p.topk_ids[slot]);
    count.x += local == expert;
    count.y += local >= 0 && local < expert;
    // Slots that no block places.
    if (local < 0 && expert == 0) p.slot_to_permuted[slot] = -1;
  }
  count = block_sums(count);
  const int mine = count.x, before = count.y;
  if (threadIdx.x == 0) {
    p.expert_num_tokens[expert] = mine;
    p.expert_offsets[expert] = before;
    if (expert == num_experts - 1) p.expert_offsets[num_experts] = before + mine;
  }
  if (expert == num_experts - 1) {
    for (int row = before + mine + thread; row < p.slots; row += threads) {
      p.permuted_to_slot[row] = -1;
    }
  }

  place_rows(p, expert, before, before + mine);
  if (p.copy) copy_rows(p, before, static_cast<unsigned>(mine));
}

/// A block reads the row of a token, and writes it wherever it belongs.
__global__ void __launch_bounds__(kCopyThreads) permute_rows_kernel(const RoutingDataParams p) {
  constexpr int kChunks = 4;  // of a thread, on their way at the same time
  const std::int64_t token = blockIdx.x;
  const auto chunks = static_cast<int>(p.extras.row_bytes / 16);
  const auto* from = static_cast<const uint4*>(p.extras.rows) + token * chunks;
  cudaGridDependencySynchronize();
  for (int first = threadIdx.x; first < chunks; first += kChunks * kCopyThreads) {
    uint4 values[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int chunk = first + c * kCopyThreads;
      if (chunk < chunks) values[c] = from[chunk];
    }
    for (int j = 0; j < p.topk; ++j) {
      const std::int64_t row = p.slot_to_permuted[token * p.topk + j];
      if (row < 0) continue;
      auto* to = static_cast<uint4*>(p.extras.permuted) + row * chunks;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int chunk = first + c * kCopyThreads;
        if (chunk < chunks) to[chunk] = values[c];
      }
    }
  }
}

}  // namespace

RoutingData build_routing_data(const TensorView& topk_ids, const TensorView& expert_map,
                               std::int64_t num_local_experts, void* memory,
                               const RoutingDataExtras& extras, const Stream& stream) {
  const std::int64_t slots = topk_ids.numel();
  RoutingDataParams p{};
  p.topk_ids = topk_ids.as<const std::int32_t>();
  p.slots = static_cast<int>(slots);
  p.local_experts = core::LocalExperts(expert_map, num_local_experts);
  p.expert_num_tokens = static_cast<std::int32_t*>(memory);
  p.expert_offsets = p.expert_num_tokens + num_local_experts;
  p.permuted_to_slot = p.expert_offsets + num_local_experts + 1;
  p.slot_to_permuted = p.permuted_to_slot + slots;
  p.extras = extras;
  p.topk = static_cast<int>(topk_ids.size(1));
  p.copy = extras.permuted && slots * extras.row_bytes <= num_local_experts * kCopiedBytes;
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  const std::int64_t wanted = p.copy ? std::max<std::int64_t>(slots, 512) : slots;
  const auto threads = std::clamp<std::int64_t>((wanted + 31) / 32 * 32, 32, kMaxThreads);
  // What comes before is the caller's, and may be a copy.
  launch(routing_data_kernel, dim3(static_cast<unsigned>(num_local_experts)),
         dim3(static_cast<unsigned>(threads)), 0, handle, false, p);
  if (extras.permuted && !p.copy) {
    launch(permute_rows_kernel, dim3(static_cast<unsigned>(topk_ids.size(0))), dim3(kCopyThreads),
           0, handle, true, p);
  }
  const auto view = [&](std::int32_t* data, std::int64_t count) {
    return TensorView(data, DType::kI32, {count}, topk_ids.device());
  };
  return {view(p.expert_num_tokens, num_local_experts),
          view(p.expert_offsets, num_local_experts + 1), view(p.permuted_to_slot, slots),
          view(p.slot_to_permuted, slots)};
}

}  // namespace fusedmoe::cuda
