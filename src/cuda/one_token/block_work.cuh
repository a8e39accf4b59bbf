// What a thread block of the kernel of one token has to do: slices of weight rows and slots.
#pragma once

#include "cuda/one_token/one_token.h"

namespace fusedmoe::cuda {

inline constexpr int kOneTokenThreads = 32 * kOneTokenWarps;

/// The slots that have a local expert, in order: lane i of every warp knows the i-th.
struct ActiveSlots {
  int count;
  int slot, expert;  // of this lane's
  float weight;

  __device__ static ActiveSlots read(const OneTokenParams& p) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const bool is_slot = lane < p.topk;
    const float weight = is_slot && p.topk_weights ? p.topk_weights[lane] : 1.0F;
    const int expert = is_slot ? p.local_experts(p.topk_ids[lane]) : -1;
    const unsigned mask = __ballot_sync(~0U, expert >= 0);
    ActiveSlots active;
    active.count = __popc(mask);
    active.slot = nth_set_bit(mask, lane);
    active.expert = __shfl_sync(~0U, expert, active.slot);
    active.weight = __shfl_sync(~0U, weight, active.slot);
    return active;
  }
};

/// One GEMM of a thread block: its slices, each of one slot (GEMM 1) or of all slots in turn (GEMM
/// 2). A slice and a slot are a segment.
struct BlockWork {
  const GemmParams& gemm;
  const ActiveSlots& active;
  bool adds_slots;          ///< GEMM 2
  unsigned slices_of_row;   ///< of all blocks, for one slot
  unsigned first, slices;   ///< of this block
  unsigned slots_of_slice;  ///< 1, or those that are added

  __device__ BlockWork(const OneTokenParams& p, const ActiveSlots& slots, int g)
      : gemm(p.gemms[g]), active(slots), adds_slots(g == 1) {
    const unsigned rows = gemm.epilogue == Epilogue::kActivate ? kSliceRows / 2 : kSliceRows;
    slices_of_row = (static_cast<unsigned>(gemm.width) + rows - 1) / rows;
    const unsigned all = adds_slots ? slices_of_row : slices_of_row * active.count;
    first = all * blockIdx.x / gridDim.x;
    slices = all * (blockIdx.x + 1) / gridDim.x - first;
    slots_of_slice = adds_slots ? active.count : 1;
  }
  __device__ unsigned segments() const { return slices * slots_of_slice; }
};

/// Counts through the segments of a block in order.
struct Segment {
  unsigned number;
  unsigned slot, slice;  // of the active slots, of the slices of a row

  __device__ Segment(const BlockWork& work, unsigned at) : number(at) {
    const unsigned count = work.adds_slots ? max(work.slots_of_slice, 1U) : work.slices_of_row;
    const unsigned index = work.adds_slots ? at : work.first + at;
    const unsigned slow = index / count, fast = index % count;
    slot = work.adds_slots ? fast : slow;
    slice = work.adds_slots ? work.first + slow : fast;
  }
  __device__ __forceinline__ void advance(const BlockWork& work) {
    ++number;
    if (work.adds_slots) {
      if (++slot < work.slots_of_slice) return;
      slot = 0;
      ++slice;
    } else {
      if (++slice < work.slices_of_row) return;
      slice = 0;
      ++slot;
    }
  }
  /// Of the block's.
  __device__ __forceinline__ unsigned block_slice(const BlockWork& work) const {
    return work.adds_slots ? slice - work.first : number;
  }
};

/// What a block has in shared memory for a GEMM.
struct BlockMemory {
  std::uint32_t* words;  // (rows, K blocks, 4 lanes, kLaneWords)
  float* scales;         // (rows, K blocks)
  float* factors;        // (segments, 16)
  float* partials;       // (slices, warps, 16), zero where a warp has no fragment
};

}  // namespace fusedmoe::cuda
