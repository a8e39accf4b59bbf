// The kernel of one token, and what it does with sums.
//
// A slice is 16 rows of weights, one operand of mma.sync. The other operand has 8 columns: the
// first is the token, the rest are zero. A fragment is one slice by one K block, so the part of a
// slice that lies in one packed block. The 16 warps of a thread block share its fragments evenly.
// Each warp loads its next kFragmentsAhead fragments while it multiplies. In the end the sums of
// all warps are added in the order of the warps, so the same call gives the same bits.
#pragma once

#include <cooperative_groups.h>

#include "cuda/device/cp_async.cuh"
#include "cuda/one_token/fill_rows.cuh"
#include "cuda/one_token/warp_fragments.cuh"
#include "cuda/rows/activation.cuh"
#include "cuda/rows/element.cuh"

namespace fusedmoe::cuda {

__device__ __forceinline__ float sum_of_warps(const BlockMemory& memory, unsigned slice,
                                              unsigned row) {
  const float* partials = memory.partials + slice * kOneTokenWarps * kSliceRows + row;
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kOneTokenWarps; ++warp) sum += partials[warp * kSliceRows];
  return sum;
}

/// GEMM 1's features -> rows in global memory. By whole warps: lanes know the experts.
template <typename Element>
__device__ __forceinline__ void store_activated(const OneTokenParams& p, const BlockWork& work,
                                                const BlockMemory& memory) {
  const GemmParams& gemm = work.gemm;
  const bool gated = gemm.epilogue == Epilogue::kActivate;
  const unsigned features = gated ? kSliceRows / 2 : kSliceRows, count = work.slices * features;
#pragma unroll 1
  for (unsigned i = threadIdx.x; i / 32 * 32 < count; i += kOneTokenThreads) {
    const Segment segment(work, i / features);
    const unsigned feature = i % features, column = segment.slice * features + feature;
    const int lane = static_cast<int>(segment.slot % 32);
    const int expert = __shfl_sync(~0U, work.active.expert, lane);
    const int slot = __shfl_sync(~0U, work.active.slot, lane);
    if (i >= count || column >= gemm.out_pitch) continue;
    const std::int64_t first = std::int64_t{expert} * gemm.row_blocks * kBlockRows;
    const auto result = [&](unsigned row) {
      const float sum = sum_of_warps(memory, segment.number, row);
      return gemm.bias ? sum + gemm.bias[first + segment.slice * kSliceRows + row] : sum;
    };
    const float value = gated ? activate(p.activation, result(feature), result(feature + 8))
                              : activate_gate(p.activation, result(feature));
    static_cast<Element*>(gemm.out)[slot * gemm.out_pitch + column] = from_f32<Element>(value);
  }
}

/// The sums of all slots -> the output.
template <typename Element>
__device__ __forceinline__ void store_output(const OneTokenParams& p, const BlockWork& work,
                                             const BlockMemory& memory) {
  const GemmParams& gemm = work.gemm;
  const unsigned count = work.slices * kSliceRows;
#pragma unroll 1
  for (unsigned i = threadIdx.x; i / 32 * 32 < count; i += kOneTokenThreads) {
    const unsigned column = work.first * kSliceRows + i;
    const bool is_inside = i < count && column < gemm.width;
    float sum = is_inside ? sum_of_warps(memory, i / kSliceRows, i % kSliceRows) : 0;
    for (int slot = 0; gemm.bias && slot < work.active.count; ++slot) {
      const std::int64_t expert = __shfl_sync(~0U, work.active.expert, slot);
      const float weight = __shfl_sync(~0U, work.active.weight, slot);
      if (is_inside) sum += weight * gemm.bias[expert * gemm.row_blocks * kBlockRows + column];
    }
    if (!is_inside) continue;
    if (p.output_f32) {
      float* output = static_cast<float*>(p.output) + column;
      *output = p.accumulate ? sum + *output : sum;
    } else {
      Element* output = static_cast<Element*>(p.output) + column;
      *output = from_f32<Element>(p.accumulate ? sum + to_f32(*output) : sum);
    }
  }
}

template <typename Operands>
__global__ void __launch_bounds__(kOneTokenThreads, 1)
    one_token_kernel(const __grid_constant__ OneTokenParams p,
                     const __grid_constant__ OneTokenLayout layout) {
  extern __shared__ __align__(16) std::uint8_t memory[];
  __shared__ typename Operands::Tables tables;
  __shared__ float row_amax[kMaxSlotsOfOneToken];
  __shared__ __align__(16) std::uint32_t zeros[kLaneWords<Operands>];  // of columns without a token
  if (threadIdx.x < kLaneWords<Operands>) zeros[threadIdx.x] = 0;
  using Element = typename Operands::Output::Element;
  // The token is on its way while the slots are read.
  if (threadIdx.x * 128 < p.hidden.row_bytes) {
    prefetch_l2(static_cast<const char*>(p.hidden.rows) + threadIdx.x * 128);
  }
  const ActiveSlots active = ActiveSlots::read(p);
  // One copy of the code for both GEMMs.
#pragma unroll 1
  for (int g = 0; g < 2; ++g) {
    const BlockWork work(p, active, g);
    const BlockMemory of_block{reinterpret_cast<std::uint32_t*>(memory + layout.words[g]),
                               reinterpret_cast<float*>(memory + layout.scales[g]),
                               reinterpret_cast<float*>(memory + layout.factors),
                               reinterpret_cast<float*>(memory + layout.partials)};
    fill_factors(work, of_block);  // before the weights, which it would have to wait for
    WarpFragments<Operands> fragments(work);
    if (g == 0) {
      tables.make(threadIdx.x, kOneTokenThreads);
    } else {
      cooperative_groups::this_grid().sync();
    }
    for (unsigned i = threadIdx.x; i < work.slices * kOneTokenWarps * kSliceRows;
         i += kOneTokenThreads) {
      of_block.partials[i] = 0;
    }
    const bool rows_by_slot = g == 1 || p.hidden.differ_by_expert();
    RowFiller<Operands>{g == 0 ? p.hidden : p.activated,
                        active,
                        of_block,
                        rows_by_slot ? static_cast<unsigned>(active.count) : 1,
                        static_cast<unsigned>(work.gemm.k_blocks),
                        g == 1}
        .fill(row_amax);
    __syncthreads();
    fragments.run(of_block, zeros, rows_by_slot, tables);
    __syncthreads();
    if (g == 0) {
      store_activated<Element>(p, work, of_block);
    } else {
      store_output<Element>(p, work, of_block);
    }
  }
}

}  // namespace fusedmoe::cuda
