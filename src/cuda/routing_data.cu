// Routing data on the device: one block for each local expert reads all ids, which counts its rows
// and, for the offset, those of the experts before it; then it reads them again and places its rows
// in order. No block waits for another, so one launch does for every size; few rows it copies as
// well, many are a launch of their own.
#include <algorithm>

#include "core/local_experts.h"
#include "cuda/device/launch.h"
#include "cuda/device/prefetch.cuh"
#include "cuda/routing_data.h"

namespace fusedmoe::cuda {
namespace {

struct RoutingDataParams {
  const std::int32_t* topk_ids;
  std::int64_t slots;
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

__global__ void routing_data_kernel(const RoutingDataParams p) {
  __shared__ int warp_rows[kMaxThreads / 32];
  const int expert = blockIdx.x, num_experts = gridDim.x;
  const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  cudaTriggerProgrammaticLaunchCompletion();
  for (std::int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < p.extras.num_zeroed;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    p.extras.zeroed[i] = 0;
  }

  if (p.copy) {  // the rows' way from memory, while ids are read
    const std::int64_t bytes = p.slots / p.topk * p.extras.row_bytes;
    const auto thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    constexpr int kLine = 128;
    for (std::int64_t at = thread * kLine; at < bytes;
         at += static_cast<std::int64_t>(gridDim.x) * blockDim.x * kLine) {
      prefetch_l2(static_cast<const char*>(p.extras.rows) + at);
    }
  }

  int2 count{};  // rows of this expert, and of those before
  for (std::int64_t slot = threadIdx.x; slot < p.slots; slot += blockDim.x) {
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
    for (std::int64_t row = before + mine + threadIdx.x; row < p.slots; row += blockDim.x) {
      p.permuted_to_slot[row] = -1;
    }
  }

  const int end = before + mine;
  int next = before;  // row of the first slot that is not placed
  for (std::int64_t first = 0; first < p.slots && next < end; first += blockDim.x) {
    const std::int64_t slot = first + threadIdx.x;
    const bool here = slot < p.slots && p.local_experts(p.topk_ids[slot]) == expert;
    const unsigned lanes = __ballot_sync(~0u, here);
    if (threadIdx.x % 32 == 0) warp_rows[warp] = __popc(lanes);
    __syncthreads();
    int row = next, total = 0;
    for (int w = 0; w < num_warps; ++w) {
      if (w < warp) row += warp_rows[w];
      total += warp_rows[w];
    }
    if (here) {
      row += __popc(lanes & ((1u << threadIdx.x % 32) - 1));
      p.permuted_to_slot[row] = static_cast<std::int32_t>(slot);
      p.slot_to_permuted[slot] = row;
    }
    next += total;
    __syncthreads();
  }
  if (p.copy) copy_rows(p, before, static_cast<unsigned>(mine));
}

/// A block is a row.
__global__ void __launch_bounds__(kCopyThreads) permute_rows_kernel(const RoutingDataParams p) {
  cudaGridDependencySynchronize();
  const std::int64_t row = blockIdx.x;
  if (p.permuted_to_slot[row] >= 0) copy_rows(p, row, 1);
}

}  // namespace

RoutingData build_routing_data(const TensorView& topk_ids, const TensorView& expert_map,
                               std::int64_t num_local_experts, void* memory,
                               const RoutingDataExtras& extras, const Stream& stream) {
  const std::int64_t slots = topk_ids.numel();
  RoutingDataParams p{};
  p.topk_ids = topk_ids.as<const std::int32_t>();
  p.slots = slots;
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
    launch(permute_rows_kernel, dim3(static_cast<unsigned>(slots)), dim3(kCopyThreads), 0, handle,
           true, p);
  }
  const auto view = [&](std::int32_t* data, std::int64_t count) {
    return TensorView(data, DType::kI32, {count}, topk_ids.device());
  };
  return {view(p.expert_num_tokens, num_local_experts),
          view(p.expert_offsets, num_local_experts + 1), view(p.permuted_to_slot, slots),
          view(p.slot_to_permuted, slots)};
}

}  // namespace fusedmoe::cuda
