// Dispatch to the batched format: each slot's row among those of its expert, then the copies.
//
// One block counts one local expert's slots, in order, so rows are in ascending token order and do
// not depend on scheduling. A token has one row per expert at most, whatever ids and map hold, so
// an expert never gets more than num_tokens rows.
#include <cstddef>

#include "cuda/device/launch.h"
#include "cuda/rows/element.cuh"
#include "cuda/rows/rows.h"
#include "moe/local_experts.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kAssignThreads = 512;
constexpr int kWarps = kAssignThreads / 32;

struct AssignParams {
  const std::int32_t* topk_ids;  // (num_tokens, topk)
  std::int64_t num_tokens;
  std::int64_t topk;
  core::LocalExperts local_expert;
  std::int32_t* slot_rows;          // (num_tokens, topk)
  std::int32_t* expert_num_tokens;  // (num_local_experts)
};

/// Whether an earlier slot of the same token has this local expert.
__device__ bool named_before(const AssignParams& p, std::int64_t flat, std::int64_t expert) {
  for (std::int64_t slot = flat - flat % p.topk; slot < flat; ++slot) {
    if (p.local_expert(p.topk_ids[slot]) == expert) return true;
  }
  return false;
}

__global__ __launch_bounds__(kAssignThreads) void assign_rows_kernel(AssignParams p) {
  __shared__ int warp_counts[kWarps];
  order_after_previous();
  const std::int64_t expert = blockIdx.x, num_slots = p.num_tokens * p.topk;
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::int64_t count = 0;
  for (std::int64_t begin = 0; begin < num_slots; begin += kAssignThreads) {
    const std::int64_t flat = begin + threadIdx.x;
    const bool exists = flat < num_slots;
    const std::int64_t local = exists ? p.local_expert(p.topk_ids[flat]) : -1;
    const bool mine = local == expert && !named_before(p, flat, expert);
    const unsigned votes = __ballot_sync(0xffffffffu, mine);
    if (lane == 0) warp_counts[warp] = __popc(votes);
    __syncthreads();
    std::int64_t row = count + __popc(votes & ((1u << lane) - 1));
    for (unsigned w = 0; w < kWarps; ++w) {
      if (w < warp) row += warp_counts[w];
      count += warp_counts[w];
    }
    if (mine) {
      p.slot_rows[flat] = static_cast<std::int32_t>(expert * p.num_tokens + row);
    } else if (exists && (local == expert || (local < 0 && expert == 0))) {
      p.slot_rows[flat] = -1;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) p.expert_num_tokens[expert] = static_cast<std::int32_t>(count);
}

/// Block (token, chunk): reads its part of the token's row once, writes it for every slot.
template <typename Unit>
__global__ __launch_bounds__(kRowThreads) void dispatch_rows_kernel(const std::int32_t* slot_rows,
                                                                    std::int64_t topk,
                                                                    const Unit* from, Unit* to,
                                                                    std::int64_t row_units) {
  order_after_previous();
  const std::int64_t token = blockIdx.x, unit = row_access();
  if (unit >= row_units) return;
  const Unit value = from[token * row_units + unit];
  for (std::int64_t slot = 0; slot < topk; ++slot) {
    const std::int64_t row = slot_rows[token * topk + slot];
    if (row >= 0) to[row * row_units + unit] = value;
  }
}

template <typename Unit>
bool launch_dispatch(const TensorView& slot_rows, const TensorView& from, const TensorView& to,
                     Stream stream) {
  const std::int64_t row_bytes = bytes(from.dtype(), from.size(1));
  constexpr std::int64_t kBytes = sizeof(Unit);
  const auto fits = [](const TensorView& view) {
    return reinterpret_cast<std::uintptr_t>(view.data()) % kBytes == 0;
  };
  if (row_bytes % kBytes != 0 || !fits(from) || !fits(to)) return false;
  launch(dispatch_rows_kernel<Unit>, row_grid(from.size(0), row_bytes / kBytes), kRowThreads, 0,
         static_cast<cudaStream_t>(stream.handle), true, slot_rows.as<const std::int32_t>(),
         slot_rows.size(1), from.as<const Unit>(), to.as<Unit>(), row_bytes / kBytes);
  return true;
}

}  // namespace

void assign_rows(const TensorView& topk_ids, const TensorView& expert_map,
                 const core::RowAssignment& out, Stream stream) {
  const std::int64_t num_local_experts = out.expert_num_tokens.numel();
  const AssignParams params{topk_ids.as<const std::int32_t>(),
                            topk_ids.size(0),
                            topk_ids.size(1),
                            core::LocalExperts(expert_map, num_local_experts),
                            out.slot_rows.as<std::int32_t>(),
                            out.expert_num_tokens.as<std::int32_t>()};
  launch(assign_rows_kernel, dim3(static_cast<unsigned>(num_local_experts)), kAssignThreads, 0,
         static_cast<cudaStream_t>(stream.handle), false, params);
}

void dispatch_rows(const TensorView& slot_rows, const TensorView& from, const TensorView& to,
                   Stream stream) {
  if (from.numel() == 0) return;
  launch_dispatch<uint4>(slot_rows, from, to, stream) ||
      launch_dispatch<std::uint32_t>(slot_rows, from, to, stream) ||
      launch_dispatch<std::uint16_t>(slot_rows, from, to, stream) ||
      launch_dispatch<std::uint8_t>(slot_rows, from, to, stream);
}

}  // namespace fusedmoe::cuda
