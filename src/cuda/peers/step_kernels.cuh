// What the kernels of a step through peer memory share.
//
// Order between GPUs: whoever writes for others ends with a release of system scope (the signal),
// whoever reads begins with an acquire (the wait), and what lies between in the same block or
// behind it in the stream comes after. What other GPUs have or have written is read past the
// L1.
#pragma once

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/device/check.h"
#include "cuda/device/launch.h"
#include "cuda/peers/device_words.cuh"
#include "cuda/peers/steps.h"

namespace fusedmoe::cuda {

/// Threads that work on one row, or on one chunk of a sum. A block has several such teams where
/// there is much to do: as all blocks look at the same words while they wait, there are no more of
/// them than multiprocessors.
template <int kSize>
struct Team {
  static constexpr int kThreads = kSize;
  static constexpr int kMost = 1024 / kThreads;

  int thread = static_cast<int>(threadIdx.x) % kThreads;
  int first = static_cast<int>(blockIdx.x * (blockDim.x / kThreads) + threadIdx.x / kThreads);
  int step = static_cast<int>(gridDim.x * (blockDim.x / kThreads));
};
inline constexpr int kMostThreads = 1024;

struct StepParams {
  PeerContext context;
  StepKey fixed_key;               // without the placement
  const std::uint32_t* placement;  // as in PeerStep
  std::int32_t topk, most_tokens;
  std::int64_t ids, weights, own_ids;  // as in PeerStep

  __device__ StepKey key() const {
    StepKey key = fixed_key;
    key.placement = DeviceWords::load(placement);
    return key;
  }
};

inline StepParams step_params(const PeerContext& context, const PeerStep& step) {
  StepParams p{};
  p.context = context;
  p.fixed_key = {step.layer, static_cast<std::uint32_t>(step.most_tokens),
                 static_cast<std::uint32_t>(step.topk), static_cast<std::uint32_t>(step.row_bytes)};
  p.placement = step.placement;
  p.topk = static_cast<std::int32_t>(step.topk);
  p.most_tokens = static_cast<std::int32_t>(step.most_tokens);
  p.ids = step.ids;
  p.weights = step.weights;
  p.own_ids = step.own_ids;
  return p;
}

template <typename Value>
__device__ Value* in_arena(const Peers& peers, int rank, std::int64_t offset) {
  return reinterpret_cast<Value*>(reinterpret_cast<char*>(peers.arenas[rank]) + offset);
}

/// As in ArenaHead.
__device__ inline std::uint32_t number_before(const StepParams& p, Round round) {
  return DeviceWords::load(&p.context.peers.own().before[static_cast<int>(round)]);
}

/// By all threads of a block: waits until all ranks have come to the round. False, for all of them:
/// the step has failed. `before`: as in ArenaHead.
__device__ inline bool await_all(const StepParams& p, Round round, std::uint32_t before) {
  const Peers& peers = p.context.peers;
  const int from = static_cast<int>(threadIdx.x);
  const bool here =
      from >= peers.size || await_signal<DeviceWords>(peers, round, p.key(), from, before,
                                                      p.context.patience, blockIdx.x == 0);
  if (__syncthreads_and(here)) return true;
  if (threadIdx.x == 0) give_up<DeviceWords>(peers, round, p.key(), before, *p.context.record);
  return false;
}
__device__ inline bool await_all(const StepParams& p, Round round) {
  return await_all(p, round, number_before(p, round));
}

/// By all threads of a block, behind what other ranks may read: the last block of the grid tells
/// them all. What each block has written is with the other ranks before its ticket is drawn.
/// Returns, to the first warp alone, whether this is that block.
__device__ inline bool signal_when_all_done(const StepParams& p, Round round, const StepKey& key,
                                            std::uint32_t before) {
  const Peers& peers = p.context.peers;
  const int to = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (to >= 32) return false;
  int is_last = 0;
  if (to == 0) {
    __threadfence_system();
    std::uint32_t& ticket = peers.own().ticket;
    is_last = gridDim.x == 1 || DeviceWords::count_acquire(&ticket) == gridDim.x - 1 ? 1 : 0;
    if (is_last != 0) ticket = 0;
  }
  is_last = __shfl_sync(~0U, is_last, 0);
  __syncwarp();  // the signals are behind the ticket
  if (is_last == 0) return false;
  if (to < peers.size) send_signal<DeviceWords>(peers, round, key, to, before);
  return true;
}

/// What another GPU may have written.
__device__ inline uint4 load_far(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
template <typename Unit>
__device__ Unit load_far(const Unit* from) {
  return *const_cast<const volatile Unit*>(from);
}

/// For work of so many pieces, a team for each where there is room, on this lane's share of the
/// multiprocessors: else kernels that wait could keep from them what other ranks wait for. One
/// block at least: somebody has to wait and to tell. `overlap_previous`: see launch(). `together`:
/// few pieces are for one block, which need not find out when others are done.
template <typename TeamType, typename Kernel, typename Params>
void launch_teams(Kernel kernel, std::int64_t pieces, Stream stream, bool overlap_previous,
                  const Params& params, bool together = false) {
  const std::int64_t most = together && pieces <= TeamType::kMost
                                ? 1
                                : multiprocessor_count(stream.device) / params.step.context.lanes;
  const std::int64_t teams =
      std::clamp<std::int64_t>(core::ceil_div(pieces, most), 1, TeamType::kMost);
  const std::int64_t blocks = std::clamp<std::int64_t>(core::ceil_div(pieces, teams), 1, most);
  launch(kernel, dim3(static_cast<unsigned>(blocks)),
         dim3(static_cast<unsigned>(teams * TeamType::kThreads)), 0, stream, overlap_previous,
         params);
}

/// On the current device.
template <typename... Params>
void load_kernel(void (*kernel)(Params...)) {
  cudaFuncAttributes attributes{};
  FUSEDMOE_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
}

}  // namespace fusedmoe::cuda
