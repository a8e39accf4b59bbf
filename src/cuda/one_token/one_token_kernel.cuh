// The kernel of one token. A slice is 16 weight rows, as mma.sync takes them; of its 8 columns only
// the first is used. An item is a slice's part of one packed block. A warp takes every 16th item of
// its thread block, slice by slice, and has the weights of the next kDepth on their way; so all K
// of a slice is spread over the warps, whose sums are added at the end, in their order.
#pragma once

#include <cooperative_groups.h>

#include "cuda/activation.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/one_token/one_token.h"
#include "cuda/rows/element.cuh"
#include "cuda/rows/row_transform.cuh"

namespace fusedmoe::cuda {

inline constexpr int kOneTokenThreads = 32 * kOneTokenWarps;

/// sums += A (16, K) B (K, 8), of 32 bytes of K.
template <typename Element>
__device__ __forceinline__ void multiply_16x8(const std::uint32_t (&a)[4], std::uint32_t b0,
                                              std::uint32_t b1, float (&sums)[4]) {
  if constexpr (sizeof(Element) == 2) {
    MmaSyncAtom<Element>::fma(sums[0], sums[1], sums[2], sums[3], a[0], a[1], a[2], a[3], b0, b1,
                              sums[0], sums[1], sums[2], sums[3]);
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Weights of an item in registers, and the order of K in which they are multiplied: by decoders as
/// wgmma has them.
template <typename Operands>
struct ItemWeights {
  typename Operands::Codes codes;

  __device__ static ItemWeights load(const std::uint8_t* block, int slice, int lane) {
    return {Operands::load(block, 32 * slice + lane)};
  }
  __device__ void decode(const typename Operands::Tables& /*tables*/, int half,
                         std::uint32_t (&a)[2][4]) const {
    Operands::decode(codes, half, a);
  }
  /// Where 4 bytes of a K block lie among the words of the lane that multiplies them.
  __device__ static int place_of(int word) {
    const int step = word / 8, half = word / 4 % 2, lane = word % 4;
    return lane * 8 + 2 * step + half;
  }
};

/// Decoded to FP8.
template <typename Operands>
  requires(Operands::kDecodes && sizeof(typename Operands::Activation) == 1)
struct ItemWeights<Operands> {
  uint4 halves[2];
  typename Operands::Scales scales;

  __device__ static ItemWeights load(const std::uint8_t* block, int slice, int lane) {
    const int thread = 32 * slice + lane;
    return {{Operands::words(block, thread, 0), Operands::words(block, thread, 1)},
            Operands::load_scales(block, thread)};
  }
  __device__ void decode(const typename Operands::Tables& tables, int half,
                         std::uint32_t (&a)[2][4]) const {
    Operands::decode(halves[half], scales, tables, half, a);
  }
  __device__ static int place_of(int word) {
    const int step = word / 8, half = word / 4 % 2, lane = word % 4;
    return lane * 8 + 2 * step + half;
  }
};

/// As they are. A lane reads 16 bytes of K at a time, so its K is in another order.
template <typename Operands>
  requires(!Operands::kDecodes)
struct ItemWeights<Operands> {
  uint4 chunks[2][2];  // of rows g and g + 8: chunk q and q + 4

  __device__ static ItemWeights load(const std::uint8_t* block, int slice, int lane) {
    const int g = lane / 4, q = lane % 4;
    const std::uint8_t* row = block + (16 * slice + g) * 128;
    ItemWeights item;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        item.chunks[r][c] =
            *reinterpret_cast<const uint4*>(row + r * 8 * 128 + ((q + 4 * c) ^ g) * 16);
      }
    }
    return item;
  }
  __device__ void decode(const typename Operands::Tables& /*tables*/, int half,
                         std::uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        a[0][r + 2 * c] = half == 0 ? chunks[r][c].x : chunks[r][c].z;
        a[1][r + 2 * c] = half == 0 ? chunks[r][c].y : chunks[r][c].w;
      }
    }
  }
  __device__ static int place_of(int word) {
    const int chunk = word / 4, step = word % 4;
    return chunk % 4 * 8 + 2 * step + chunk / 4;
  }
};

/// The slots that have a local expert, in order: lane i of every warp knows the i-th.
struct ActiveSlots {
  int count;
  int slot, expert;  // of this lane's

  __device__ static ActiveSlots read(const OneTokenParams& p) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int expert = lane < p.topk ? p.local_experts(p.topk_ids[lane]) : -1;
    const unsigned mask = __ballot_sync(~0U, expert >= 0);
    const int from = __fns(mask, 0, lane + 1);  // place of the (lane + 1)-th bit
    ActiveSlots active;
    active.count = __popc(mask);
    active.slot = from & 31;
    active.expert = __shfl_sync(~0U, expert, active.slot);
    return active;
  }
};

/// A slice of one GEMM and one slot.
struct Segment {
  const std::uint8_t* blocks;  // of its row block
  const float* scales;         // of these K blocks, by 8 slices; or null
  int slice;                   // of four in the row block
  int row;                     // of the token rows
};

/// One GEMM of a thread block: its slices, and how items count through them.
template <int kGemm>
struct BlockWork {
  const GemmParams& gemm;
  const ActiveSlots& active;
  int first, slices;      // of this block
  int slices_of_row;      // of one slot, GEMM 1
  bool rows_by_slot;

  __device__ BlockWork(const OneTokenParams& p, const ActiveSlots& slots)
      : gemm(p.gemms[kGemm]), active(slots) {
    const bool gated = gemm.epilogue == Epilogue::kActivate;
    slices_of_row = static_cast<int>(slices_of(gemm.width, gated));
    const int all = slices_of_row * (kGemm == 0 ? active.count : 1);
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    first = static_cast<int>(static_cast<std::int64_t>(all) * block / blocks);
    slices = static_cast<int>(static_cast<std::int64_t>(all) * (block + 1) / blocks) - first;
    rows_by_slot = kGemm == 1 || p.hidden.by_expert();
  }
  /// Of each slice: GEMM 2 adds up all slots.
  __device__ int segments_of_slice() const { return kGemm == 0 ? 1 : active.count; }
  __device__ int segments() const { return slices * segments_of_slice(); }

  /// By whole warps.
  __device__ int slot_of(int segment) const {
    return kGemm == 0 ? (first + segment) / slices_of_row : segment % active.count;
  }
  __device__ int slice_of(int segment) const {
    return kGemm == 0 ? (first + segment) % slices_of_row : first + segment / active.count;
  }
  __device__ Segment at(int segment, int block_bytes) const {
    const int slot = slot_of(segment), slice = slice_of(segment);
    const int expert = __shfl_sync(~0U, active.expert, slot);
    const std::int64_t row_block = slice / 4;
    Segment result;
    result.blocks = static_cast<const std::uint8_t*>(gemm.weights) + expert * gemm.expert_bytes +
                    row_block * gemm.k_blocks * block_bytes;
    result.scales = gemm.block_scales
                        ? gemm.block_scales +
                              (std::int64_t{expert} * gemm.row_blocks + row_block) * gemm.k_blocks * 8
                        : nullptr;
    result.slice = slice % 4;
    result.row = rows_by_slot ? slot : 0;
    return result;
  }
};

/// The items of a warp, in order.
struct ItemCursor {
  int segment, k_block;

  __device__ void advance(int k_blocks) {
    k_block += kOneTokenWarps;
    while (k_block >= k_blocks) {
      k_block -= k_blocks;
      ++segment;
    }
  }
  __device__ static ItemCursor first(int k_blocks) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    return {warp / k_blocks, warp % k_blocks};
  }
};

/// What a block has in shared memory for a GEMM.
struct BlockMemory {
  std::uint32_t* words;  // (rows, K blocks, 4 lanes, 8)
  float* scales;         // (rows, K blocks)
  float* factors;        // (segments, 16)
  float* partials;       // (slices, warps, 16)
};

template <typename Operands, int kGemm, int kDepth>
class WarpItems {
 public:
  using Weights = ItemWeights<Operands>;

  __device__ WarpItems(const BlockWork<kGemm>& work)
      : work_(work),
        k_blocks_(work.gemm.k_blocks),
        segments_(work.segments()),
        next_(ItemCursor::first(k_blocks_)),
        current_(next_) {}

  /// The first weights are on their way.
  __device__ void start() {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) load(d);
  }

  __device__ void run(const BlockMemory& memory, const typename Operands::Tables& tables) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    float sums[2] = {};
    int slice = 0;
    const auto flush = [&](int until) {
      for (; slice < until; ++slice) {
        if (lane % 4 == 0) {
          float* to = memory.partials + (slice * kOneTokenWarps + warp) * kSliceRows + lane / 4;
          to[0] = sums[0];
          to[8] = sums[1];
        }
        sums[0] = sums[1] = 0;
      }
    };
    while (current_.segment < segments_) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (current_.segment >= segments_) break;
        const int segment = current_.segment, k_block = current_.k_block;
        flush(segment / work_.segments_of_slice());
        multiply(d, segment, k_block, lane, memory, tables, sums);
        current_.advance(k_blocks_);
        load(d);
      }
    }
    flush(work_.slices);
  }

 private:
  __device__ __forceinline__ void load(int d) {
    if (next_.segment >= segments_) return;
    if (next_.segment != loaded_) {
      loaded_ = next_.segment;
      from_ = work_.at(loaded_, Operands::kBlock.bytes);
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    const std::uint8_t* block =
        from_.blocks + static_cast<std::int64_t>(next_.k_block) * Operands::kBlock.bytes;
    weights_[d] = Weights::load(block, from_.slice, lane);
    if constexpr (Operands::kHasKScales) {
      if (from_.scales) {
        scales_[d] = *reinterpret_cast<const float2*>(from_.scales + next_.k_block * 8 +
                                                      from_.slice * 2);
      } else {
        scales_[d] = make_float2(1, 1);
      }
    }
    next_.advance(k_blocks_);
  }

  __device__ __forceinline__ void multiply(int d, int segment, int k_block, int lane,
                                           const BlockMemory& memory,
                                           const typename Operands::Tables& tables,
                                           float (&sums)[2]) {
    const int row = work_.rows_by_slot ? work_.slot_of(segment) : 0;
    const int row_block = row * k_blocks_ + k_block;
    std::uint32_t b[8] = {};
    if (lane < 4) {  // column 0
      const auto* words = reinterpret_cast<const uint4*>(memory.words) + (row_block * 4 + lane) * 2;
      const uint4 low = words[0], high = words[1];
      b[0] = low.x, b[1] = low.y, b[2] = low.z, b[3] = low.w;
      b[4] = high.x, b[5] = high.y, b[6] = high.z, b[7] = high.w;
    }
    float products[4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t a[2][4];
      weights_[d].decode(tables, half, a);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int step = 2 * half + i;
        multiply_16x8<typename Operands::Activation>(a[i], b[2 * step], b[2 * step + 1], products);
      }
    }
    const float* factors = memory.factors + segment * kSliceRows + lane / 4;
    float factor[2] = {factors[0], factors[8]};
    if constexpr (sizeof(typename Operands::Activation) == 1) {
      const float scale = memory.scales[row_block];
      factor[0] *= scale;
      factor[1] *= scale;
    }
    if constexpr (Operands::kHasKScales) {
      factor[0] *= scales_[d].x;
      factor[1] *= scales_[d].y;
    }
    sums[0] += products[0] * factor[0];  // of columns 0, in lanes 4 g
    sums[1] += products[2] * factor[1];
  }

  const BlockWork<kGemm>& work_;
  const int k_blocks_, segments_;
  ItemCursor next_, current_;
  int loaded_ = -1;
  Segment from_{};
  Weights weights_[kDepth];
  float2 scales_[kDepth];
};

/// Row `row` of `t` -> the words of a GEMM, by a block. Rows of FP8 with one scale need it first.
template <typename Operands>
__device__ __forceinline__ void fill_rows(const RowTransform& t, const ActiveSlots& active,
                                          int rows, bool of_slots, int k_blocks, float* row_amax,
                                          const BlockMemory& memory) {
  constexpr bool kFp8 = sizeof(typename Operands::Activation) == 1;
  constexpr int kUnitsOfBlock = kFp8 ? 16 : 8;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int units = k_blocks * kUnitsOfBlock, spans = (units + kSpanUnits - 1) / kSpanUnits;
  const auto row_of = [&](int row) {
    return of_slots ? __shfl_sync(~0U, active.slot, row) : 0;
  };
  const auto read = [&](int row, int unit) {
    if (unit >= units_of(t)) return uint4{};
    const char* from = static_cast<const char*>(t.rows) + row * t.row_pitch;
    return __ldcg(reinterpret_cast<const uint4*>(from) + unit);
  };
  if constexpr (kFp8) {
    if (t.has_row_scales()) {
      if (threadIdx.x < rows) row_amax[threadIdx.x] = 0;
      __syncthreads();
      for (int i = warp; i < rows * spans; i += kOneTokenWarps) {
        const int row = i / spans;
        const uint4 unit[1] = {read(row_of(row), i % spans * kSpanUnits + lane)};
        const float amax = amax_of_units(t, unit);
        if (lane == 0) atomicMax(reinterpret_cast<int*>(&row_amax[row]), __float_as_int(amax));
      }
      __syncthreads();
    }
  }
  for (int i = warp; i < rows * spans; i += kOneTokenWarps) {
    const int row = i / spans, unit = i % spans * kSpanUnits + lane;
    const int from = row_of(row);
    const int expert = of_slots || t.by_expert() ? __shfl_sync(~0U, active.expert, row) : 0;
    float row_scale = 1;
    if constexpr (kFp8) {
      if (t.has_row_scales()) row_scale = core::e4m3_row_scale(row_amax[row]);
      if (t.fp8.scale == Fp8Quantizer::Scale::kStatic) row_scale = t.fp8.static_scale;
    }
    const Converted value = convert_unit(t, read(from, unit), expert, row_scale);
    if (unit >= units) continue;
    const std::uint32_t converted[4] = {value.data.x, value.data.y, value.data.z, value.data.w};
    constexpr int kWords = kFp8 ? 2 : 4;
    const int block = row * k_blocks + unit / kUnitsOfBlock;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int word = unit % kUnitsOfBlock * kWords + w;
      memory.words[block * 32 + ItemWeights<Operands>::place_of(word)] = converted[w];
    }
    // A static scale is part of the weights' own.
    const bool is_static = t.fp8.scale == Fp8Quantizer::Scale::kStatic;
    if (kFp8 && unit % 16 == 0) memory.scales[block] = is_static ? 1.0F : value.scale;
  }
}

/// What the sums of a segment's weight rows are multiplied by.
template <int kGemm>
__device__ __forceinline__ void fill_factors(const OneTokenParams& p, const BlockWork<kGemm>& work,
                                             const BlockMemory& memory) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  for (int segment = warp; segment < work.segments(); segment += kOneTokenWarps) {
    const int place = work.slot_of(segment);
    const std::int64_t expert = __shfl_sync(~0U, work.active.expert, place);
    const int slot = __shfl_sync(~0U, work.active.slot, place);
    if (lane >= kSliceRows) continue;
    const std::int64_t row =
        expert * work.gemm.row_blocks * kBlockRows + work.slice_of(segment) * kSliceRows + lane;
    float factor = work.gemm.scales ? work.gemm.scales[row] : 1.0F;
    if (kGemm == 1 && p.topk_weights) factor *= p.topk_weights[slot];
    memory.factors[segment * kSliceRows + lane] = factor;
  }
}

__device__ __forceinline__ float sum_of_warps(const BlockMemory& memory, int slice, int row) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kOneTokenWarps; ++warp) {
    sum += memory.partials[(slice * kOneTokenWarps + warp) * kSliceRows + row];
  }
  return sum;
}

/// GEMM 1's features -> rows in global memory.
template <typename Element>
__device__ __forceinline__ void store_activated(const OneTokenParams& p, const BlockWork<0>& work,
                                                const BlockMemory& memory) {
  const GemmParams& gemm = work.gemm;
  const bool gated = gemm.epilogue == Epilogue::kActivate;
  const int features = gated ? kSliceRows / 2 : kSliceRows;
  // Whole warps: experts are known to lanes.
  for (int i = static_cast<int>(threadIdx.x); i / 32 * 32 < work.slices * features;
       i += kOneTokenThreads) {
    const bool is_inside = i < work.slices * features;
    const int segment = is_inside ? i / features : 0, feature = i % features;
    const int place = work.slot_of(segment), slice = work.slice_of(segment);
    const std::int64_t expert = __shfl_sync(~0U, work.active.expert, place);
    const int slot = __shfl_sync(~0U, work.active.slot, place);
    if (!is_inside) continue;
    const auto result = [&](int row) {
      float sum = sum_of_warps(memory, segment, row);
      if (gemm.bias) {
        sum += gemm.bias[expert * gemm.row_blocks * kBlockRows + slice * kSliceRows + row];
      }
      return sum;
    };
    const float value = gated ? activate(p.activation, result(feature), result(feature + 8))
                              : activate_gate(p.activation, result(feature));
    const int column = slice * features + feature;
    if (column < gemm.out_pitch) {
      static_cast<Element*>(gemm.out)[slot * gemm.out_pitch + column] = from_f32<Element>(value);
    }
  }
}

/// The sums of all slots -> the output.
template <typename Output>
__device__ __forceinline__ void store_output(const OneTokenParams& p, const BlockWork<1>& work,
                                             const BlockMemory& memory) {
  const GemmParams& gemm = work.gemm;
  for (int i = static_cast<int>(threadIdx.x); i / 32 * 32 < work.slices * kSliceRows;
       i += kOneTokenThreads) {
    const int slice = work.first + i / kSliceRows, row = i % kSliceRows;
    const int column = slice * kSliceRows + row;
    const bool is_inside = i < work.slices * kSliceRows && column < gemm.width;
    float sum = is_inside && work.active.count > 0 ? sum_of_warps(memory, i / kSliceRows, row) : 0;
    if (gemm.bias) {
      for (int place = 0; place < work.active.count; ++place) {
        const std::int64_t expert = __shfl_sync(~0U, work.active.expert, place);
        const int slot = __shfl_sync(~0U, work.active.slot, place);
        if (!is_inside) continue;
        const float weight = p.topk_weights ? p.topk_weights[slot] : 1.0F;
        sum += weight * gemm.bias[expert * gemm.row_blocks * kBlockRows + column];
      }
    }
    if (!is_inside) continue;
    auto* output = static_cast<Output*>(p.output) + column;
    if (p.accumulate) sum += to_f32(*output);
    *output = from_f32<Output>(sum);
  }
}

/// Items whose weights a warp has on their way.
template <typename Operands>
inline constexpr int kItemDepth = sizeof(ItemWeights<Operands>) > 40 ? 4 : 8;

template <typename Operands>
__global__ void __launch_bounds__(kOneTokenThreads, 1)
    one_token_kernel(const __grid_constant__ OneTokenParams p,
                     const __grid_constant__ OneTokenMemory places) {
  extern __shared__ __align__(16) std::uint8_t memory[];
  __shared__ typename Operands::Tables tables;
  __shared__ float row_amax[kMaxSlotsOfOneToken];
  using Element = typename Operands::Output::Element;
  const auto memory_of = [&](int gemm) {
    return BlockMemory{reinterpret_cast<std::uint32_t*>(memory + places.words[gemm]),
                       reinterpret_cast<float*>(memory + places.scales[gemm]),
                       reinterpret_cast<float*>(memory + places.factors),
                       reinterpret_cast<float*>(memory + places.partials)};
  };
  const ActiveSlots active = ActiveSlots::read(p);
  {
    const BlockWork<0> work(p, active);
    WarpItems<Operands, 0, kItemDepth<Operands>> items(work);
    items.start();
    tables.make(threadIdx.x, kOneTokenThreads);
    const BlockMemory of_block = memory_of(0);
    fill_factors(p, work, of_block);
    const int rows = p.hidden.by_expert() ? active.count : 1;
    fill_rows<Operands>(p.hidden, active, rows, false, work.gemm.k_blocks, row_amax, of_block);
    __syncthreads();
    items.run(of_block, tables);
    __syncthreads();
    store_activated<Element>(p, work, of_block);
  }
  const BlockWork<1> work(p, active);
  WarpItems<Operands, 1, kItemDepth<Operands>> items(work);
  items.start();
  cooperative_groups::this_grid().sync();
  const BlockMemory of_block = memory_of(1);
  fill_factors(p, work, of_block);
  fill_rows<Operands>(p.activated, active, active.count, true, work.gemm.k_blocks, row_amax,
                      of_block);
  __syncthreads();
  items.run(of_block, tables);
  __syncthreads();
  if (p.output_f32) {
    store_output<float>(p, work, of_block);
  } else {
    store_output<Element>(p, work, of_block);
  }
}

}  // namespace fusedmoe::cuda
