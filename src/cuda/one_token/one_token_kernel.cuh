// The kernel of one token. A slice is 16 weight rows, as mma.sync takes them; of its 8 columns only
// the first is used. An item is a slice's part of one packed block. The items of a thread block are
// divided evenly among its warps, each of which has the weights of its next kItemDepth items on
// their way. At the end the sums of all warps are added in their order.
#pragma once

#include <cooperative_groups.h>

#include "cuda/activation.cuh"
#include "cuda/device/prefetch.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/one_token/one_token.h"
#include "cuda/rows/element.cuh"
#include "cuda/rows/row_transform.cuh"

namespace fusedmoe::cuda {

inline constexpr int kOneTokenThreads = 32 * kOneTokenWarps;

/// The elements that mma.sync multiplies: E4M3 numbers as f16, which holds them and their products'
/// factors exactly. (mma.sync of E4M3 is made of the same instructions on Hopper.)
template <typename Operands>
using MmaElement = std::conditional_t<sizeof(typename Operands::Activation) == 1, __half,
                                      typename Operands::Activation>;
template <typename Operands>
inline constexpr bool kIsFp8 = sizeof(typename Operands::Activation) == 1;

/// The two low, or the two high E4M3 codes of a word as f16.
__device__ __forceinline__ std::uint32_t fp8_to_f16(std::uint32_t codes, int half) {
  const auto pair = static_cast<__nv_fp8x2_storage_t>(codes >> (16 * half));
  const __half2_raw result = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
  return result.x | static_cast<std::uint32_t>(result.y) << 16;
}

/// sums += A (16, K) B (K, 8) of 32 bytes of K of the activations: one instruction, of FP8 two.
/// `b`: the lane's words of B for these instructions, two each.
template <typename Operands>
__device__ __forceinline__ void multiply_16x8(const std::uint32_t (&a)[4], const std::uint32_t* b,
                                              float (&sums)[4]) {
  using Atom = MmaSyncAtom<MmaElement<Operands>>;
  const auto multiply = [&](const std::uint32_t(&w)[4], const std::uint32_t* x) {
    Atom::fma(sums[0], sums[1], sums[2], sums[3], w[0], w[1], w[2], w[3], x[0], x[1], sums[0],
              sums[1], sums[2], sums[3]);
  };
  if constexpr (kIsFp8<Operands>) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t w[4] = {fp8_to_f16(a[0], half), fp8_to_f16(a[1], half),
                                  fp8_to_f16(a[2], half), fp8_to_f16(a[3], half)};
      multiply(w, b + 2 * half);
    }
  } else {
    multiply(a, b);
  }
}

/// A packed block in global memory, which is read once; of one that is not `present` nothing is
/// read, and what read() returns must not be used. Without a branch: where the lanes of a warp meet
/// again they would wait for what they have read.
struct StreamedBlock {
  const std::uint8_t* bytes;
  bool present;

  template <typename T>
  __device__ __forceinline__ T read(int offset) const {
    const std::uint8_t* from = bytes + offset;
    const int predicate = present;
    T value;
#define FUSEDMOE_STREAMED "@p ld.global.nc.L1::no_allocate.L2::256B"
#define FUSEDMOE_IF_PRESENT(N) "{.reg .pred p;\nsetp.ne.s32 p, %" #N ", 0;\n"
    if constexpr (sizeof(T) == 16) {
      asm volatile(FUSEDMOE_IF_PRESENT(5) FUSEDMOE_STREAMED ".v4.u32 {%0, %1, %2, %3}, [%4];}"
                   : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                   : "l"(from), "r"(predicate));
    } else if constexpr (sizeof(T) == 8) {
      std::uint32_t words[2];
      asm volatile(FUSEDMOE_IF_PRESENT(3) FUSEDMOE_STREAMED ".v2.u32 {%0, %1}, [%2];}"
                   : "=r"(words[0]), "=r"(words[1])
                   : "l"(from), "r"(predicate));
      memcpy(&value, words, sizeof(value));
    } else if constexpr (sizeof(T) == 4) {
      asm volatile(FUSEDMOE_IF_PRESENT(2) FUSEDMOE_STREAMED ".u32 %0, [%1];}"
                   : "=r"(value)
                   : "l"(from), "r"(predicate));
    } else {
      static_assert(sizeof(T) == 2);
      asm volatile(FUSEDMOE_IF_PRESENT(2) FUSEDMOE_STREAMED ".u16 %0, [%1];}"
                   : "=h"(value)
                   : "l"(from), "r"(predicate));
    }
#undef FUSEDMOE_STREAMED
#undef FUSEDMOE_IF_PRESENT
    return value;
  }
};

/// Where 4 bytes of a K block of activations are multiplied: by which lane, in which step, and
/// whether as its second word.
struct WordPlace {
  unsigned lane, step, second;
};

/// Weights of an item in registers, and the order of K in which they are multiplied: by decoders as
/// wgmma has them.
template <typename Operands>
struct ItemWeights {
  typename Operands::Codes codes;

  /// `thread`: of 128, 32 for each slice of the block.
  __device__ static ItemWeights load(const StreamedBlock& block, int thread) {
    return {Operands::load(block, thread)};
  }
  __device__ void decode(const typename Operands::Tables& /*tables*/, int half,
                         std::uint32_t (&a)[2][4]) const {
    Operands::decode(codes, half, a);
  }
  __device__ static WordPlace place_of(unsigned word) { return {word % 4, word / 8, word / 4 % 2}; }
};

/// Decoded to FP8.
template <typename Operands>
requires(Operands::kDecodes &&
         sizeof(typename Operands::Activation) == 1) struct ItemWeights<Operands> {
  uint4 halves[2];
  typename Operands::Scales scales;

  __device__ static ItemWeights load(const StreamedBlock& block, int thread) {
    return {{Operands::words(block, thread, 0), Operands::words(block, thread, 1)},
            Operands::load_scales(block, thread)};
  }
  __device__ void decode(const typename Operands::Tables& tables, int half,
                         std::uint32_t (&a)[2][4]) const {
    Operands::decode(halves[half], scales, tables, half, a);
  }
  __device__ static WordPlace place_of(unsigned word) { return {word % 4, word / 8, word / 4 % 2}; }
};

/// As they are. A lane reads 16 bytes of K at a time, so its K is in another order.
template <typename Operands>
requires(!Operands::kDecodes) struct ItemWeights<Operands> {
  uint4 chunks[2][2];  // of rows g and g + 8: chunk q and q + 4

  __device__ static ItemWeights load(const StreamedBlock& block, int thread) {
    const int g = thread % 32 / 4, q = thread % 4;
    const int row = (thread / 32 * 16 + g) * 128;
    ItemWeights item;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        item.chunks[r][c] = block.read<uint4>(row + r * 8 * 128 + ((q + 4 * c) ^ g) * 16);
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
  __device__ static WordPlace place_of(unsigned word) {
    return {word / 4 % 4, word % 4, word / 16};
  }
};

/// Items whose weights a warp has on their way.
template <typename Operands>
inline constexpr int kItemDepth = sizeof(ItemWeights<Operands>) > 40 ? 2 : 4;

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
    const int from = __fns(mask, 0, lane + 1);  // place of the (lane + 1)-th bit
    ActiveSlots active;
    active.count = __popc(mask);
    active.slot = from & 31;
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
    const unsigned place = work.adds_slots ? at : work.first + at;
    const unsigned slow = place / count, fast = place % count;
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
  float* partials;       // (slices, warps, 16), zero where a warp has no item
};

/// Words of a K block that a lane multiplies.
template <typename Operands>
inline constexpr int kLaneWords = kIsFp8<Operands> ? 16 : 8;

/// Where the weights of an item are.
template <typename Operands>
struct ItemPosition {
  Segment segment;
  unsigned k_block;
  const std::uint8_t* blocks;       ///< the packed block
  int thread;                       ///< of 128, as ItemWeights::load() has it
  const float* k_scales = nullptr;  ///< the two scales of its slice

  __device__ ItemPosition(const BlockWork& work, unsigned item)
      : segment(work, item / work.gemm.k_blocks), k_block(item % work.gemm.k_blocks) {
    find(work);
  }
  __device__ __forceinline__ void advance(const BlockWork& work) {
    blocks += Operands::kBlock.bytes;
    if constexpr (Operands::kHasKScales) k_scales += 8;
    if (++k_block < work.gemm.k_blocks) return;
    k_block = 0;
    segment.advance(work);
    find(work);
  }

 private:
  __device__ __forceinline__ void find(const BlockWork& work) {
    const GemmParams& gemm = work.gemm;
    const unsigned lane = threadIdx.x % 32, k_blocks = gemm.k_blocks;
    const int expert = __shfl_sync(~0U, work.active.expert, static_cast<int>(segment.slot % 32));
    const unsigned block = segment.slice / 4 * k_blocks + k_block;
    blocks = static_cast<const std::uint8_t*>(gemm.weights) + expert * gemm.expert_bytes +
             static_cast<std::uint64_t>(block) * Operands::kBlock.bytes;
    thread = static_cast<int>(segment.slice % 4 * 32 + lane);
    if constexpr (Operands::kHasKScales) {
      const std::int64_t first = static_cast<std::int64_t>(gemm.row_blocks * k_blocks) * expert;
      k_scales = gemm.block_scales + (first + block) * 8 + segment.slice % 4 * 2;
    }
  }
};

/// The items of a warp: consecutive ones.
template <typename Operands>
class WarpItems {
 public:
  static constexpr int kDepth = kItemDepth<Operands>;

  /// The first weights are on their way.
  __device__ __forceinline__ explicit WarpItems(const BlockWork& work)
      : work_(work),
        k_blocks_(work.gemm.k_blocks),
        count_(static_cast<int>(share(work, 1) - share(work, 0))),
        next_(work, share(work, 0)),
        current_(next_.segment),
        current_k_(next_.k_block) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) load(d, d < count_);
  }

  /// `zeros`: kLaneWords words.
  __device__ __forceinline__ void run(const BlockMemory& memory, const std::uint32_t* zeros,
                                      bool rows_by_slot, const typename Operands::Tables& tables) {
    float total[2] = {}, of_segment[2] = {}, products[2][4] = {};
    const std::uint32_t* words = zeros;
    const float* token_scales = nullptr;
    const unsigned word_step = lane() < 4 ? 4 * kLaneWords<Operands> : 0;
    const auto find_row = [&] {
      const unsigned block = (rows_by_slot ? current_.slot * k_blocks_ : 0) + current_k_;
      if (lane() < 4) words = memory.words + (block * 4 + lane()) * kLaneWords<Operands>;
      token_scales = memory.scales + block;
    };
    const auto take_products = [&](float first, float second) {
      // Column 0, in lanes 4 g.
      of_segment[0] += (products[0][0] + products[1][0]) * first;
      of_segment[1] += (products[0][2] + products[1][2]) * second;
#pragma unroll
      for (int i = 0; i < 4; ++i) products[0][i] = products[1][i] = 0;
    };
    const auto end_segment = [&] {
      if constexpr (!Operands::kHasKScales) {
        // FP8 rows have one scale, which all K blocks have.
        const float scale = kIsFp8<Operands> ? token_scales[-1] : 1.0F;
        take_products(scale, scale);
      }
      const float* factors = memory.factors + current_.number * kSliceRows + lane() / 4;
      total[0] += of_segment[0] * factors[0];
      total[1] += of_segment[1] * factors[8];
      of_segment[0] = of_segment[1] = 0;
    };
    find_row();
#pragma unroll 1
    for (int n = 0; n < count_; n += kDepth) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (n + d >= count_) break;
        multiply(d, words, tables, products);
        if constexpr (Operands::kHasKScales) {
          const bool has_scales = work_.gemm.block_scales;
          const float scale = *token_scales;
          take_products(has_scales ? scale * scales_[d].x : scale,
                        has_scales ? scale * scales_[d].y : scale);
        }
        words += word_step;
        ++token_scales;
        load(d, n + d + kDepth < count_);
        if (++current_k_ < k_blocks_) continue;
        end_segment();
        const unsigned slice = current_.block_slice(work_);
        current_.advance(work_);
        current_k_ = 0;
        if (current_.block_slice(work_) != slice) publish(memory, slice, total);
        find_row();
      }
    }
    // Behind the last slice there is nothing to publish.
    if (current_k_ > 0) end_segment();
    if (const unsigned slice = current_.block_slice(work_); slice < work_.slices && count_ > 0) {
      publish(memory, slice, total);
    }
  }

 private:
  __device__ static unsigned lane() {
    return threadIdx.x % 32;
  }
  __device__ static unsigned warp() {
    return threadIdx.x / 32;
  }

  /// The sums of a slice.
  __device__ __forceinline__ static void publish(const BlockMemory& memory, unsigned slice,
                                                 float (&total)[2]) {
    if (lane() % 4 == 0) {
      float* to = memory.partials + (slice * kOneTokenWarps + warp()) * kSliceRows + lane() / 4;
      to[0] = total[0];
      to[8] = total[1];
    }
    total[0] = total[1] = 0;
  }

  /// Items of the warps before this one, and of `more`.
  __device__ __forceinline__ static unsigned share(const BlockWork& work, unsigned more) {
    // The same in all lanes, as the compiler is to know.
    const unsigned warps = __shfl_sync(~0U, warp(), 0) + more;
    return work.segments() * work.gemm.k_blocks * warps / kOneTokenWarps;
  }

  /// The weights of the next item, if there is one.
  __device__ __forceinline__ void load(int d, bool present) {
    __builtin_assume(next_.thread >= 0 && next_.thread < 128);
    weights_[d] = ItemWeights<Operands>::load(StreamedBlock{next_.blocks, present}, next_.thread);
    if constexpr (Operands::kHasKScales) {
      const StreamedBlock scales{reinterpret_cast<const std::uint8_t*>(next_.k_scales),
                                 present && work_.gemm.block_scales};
      scales_[d] = scales.read<float2>(0);
    }
    next_.advance(work_);
  }

  __device__ __forceinline__ void multiply(int d, const std::uint32_t* words,
                                           const typename Operands::Tables& tables,
                                           float (&products)[2][4]) {
    constexpr int kHalfWords = kLaneWords<Operands> / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t b[kHalfWords], a[2][4];
#pragma unroll
      for (int i = 0; i < kHalfWords; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(words + half * kHalfWords + i);
        b[i] = four.x, b[i + 1] = four.y, b[i + 2] = four.z, b[i + 3] = four.w;
      }
      weights_[d].decode(tables, half, a);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply_16x8<Operands>(a[i], b + i * kHalfWords / 2, products[half]);
      }
    }
  }

  using Position = ItemPosition<Operands>;

  const BlockWork& work_;
  const unsigned k_blocks_;
  const int count_;
  Position next_;
  Segment current_;
  unsigned current_k_;
  ItemWeights<Operands> weights_[kDepth];
  float2 scales_[kDepth];
};

/// Token rows -> the words of a GEMM: a block reads, quantizes and decodes them as the scheme says.
/// Not unrolled: code that is executed once or twice is to be short, as it comes from memory.
template <typename Operands>
struct RowFiller {
  static constexpr unsigned kUnitsOfBlock = kIsFp8<Operands> ? 16 : 8;

  const RowTransform& t;
  const ActiveSlots& active;
  const BlockMemory& memory;
  unsigned rows, k_blocks;
  bool of_slots;

  __device__ static unsigned lane() { return threadIdx.x % 32; }

  /// Calls function(unit's 16 bytes, row, unit) for the spans of the warp: 32 units of a row. The
  /// next one is read meanwhile.
  template <typename Function>
  __device__ __forceinline__ void for_spans(const Function& function) const {
    const unsigned units = units_of(t), of_row = (k_blocks * kUnitsOfBlock + 31) / 32;
    unsigned row = threadIdx.x / 32 / of_row, span = threadIdx.x / 32 % of_row;
    const auto read = [&] {
      const int slot = of_slots ? __shfl_sync(~0U, active.slot, static_cast<int>(row % 32)) : 0;
      const char* from = static_cast<const char*>(t.rows) + slot * t.row_pitch;
      const unsigned unit = span * 32 + lane();
      uint4 value{};
      if (row < rows && unit < units) value = __ldcg(reinterpret_cast<const uint4*>(from) + unit);
      return value;
    };
    uint4 next = read();
#pragma unroll 1
    while (row < rows) {
      const uint4 current = next;
      const unsigned of_current = row, unit = span * 32 + lane();
      for (span += kOneTokenWarps; span >= of_row; span -= of_row) ++row;
      next = read();
      function(current, of_current, unit);
    }
  }

  __device__ __forceinline__ void fill(float* row_amax) const {
    if (kIsFp8<Operands> && t.has_row_scales()) {
      if (threadIdx.x < rows) row_amax[threadIdx.x] = 0;
      __syncthreads();
      for_spans([&](const uint4& raw, unsigned row, unsigned) {
        const uint4 units[1] = {raw};
        const float amax = amax_of_units(t, units);
        if (lane() == 0) atomicMax(reinterpret_cast<int*>(&row_amax[row]), __float_as_int(amax));
      });
      __syncthreads();
    }
    for_spans(
        [&](const uint4& raw, unsigned row, unsigned unit) { convert(raw, row, unit, row_amax); });
  }

  __device__ __forceinline__ void convert(const uint4& raw, unsigned row, unsigned unit,
                                          const float* row_amax) const {
    Converted value{raw, 1};
    if constexpr (kIsFp8<Operands>) {
      const bool is_static = t.fp8.scale == Fp8Quantizer::Scale::kStatic;
      const float row_scale = is_static            ? t.fp8.static_scale
                              : t.has_row_scales() ? core::e4m3_row_scale(row_amax[row])
                                                   : 1.0F;
      value = to_fp8(t, raw, row_scale);
      if (is_static) value.scale = 1;  // part of the weights' own
    } else if constexpr (Operands::Output::kQuantizes) {
      if (t.kind == RowTransform::Kind::kQuantizeAndDecode) {
        const int expert = __shfl_sync(~0U, active.expert, static_cast<int>(row));
        value.data = quantize_and_decode(t.decoded, expert, raw, ~0U);
      }
    }
    if (unit >= k_blocks * kUnitsOfBlock) return;
    const std::uint32_t converted[4] = {value.data.x, value.data.y, value.data.z, value.data.w};
    constexpr unsigned kWords = kIsFp8<Operands> ? 2 : 4;
    const unsigned block = row * k_blocks + unit / kUnitsOfBlock;
#pragma unroll
    for (unsigned w = 0; w < kWords; ++w) {
      const WordPlace place = ItemWeights<Operands>::place_of(unit % kUnitsOfBlock * kWords + w);
      std::uint32_t* to = memory.words + (block * 4 + place.lane) * kLaneWords<Operands> +
                          place.step * (kLaneWords<Operands> / 4) + place.second;
      if constexpr (kIsFp8<Operands>) {
        to[0] = fp8_to_f16(converted[w], 0);
        to[2] = fp8_to_f16(converted[w], 1);
      } else {
        to[0] = converted[w];
      }
    }
    if (kIsFp8<Operands> && unit % kUnitsOfBlock == 0) memory.scales[block] = value.scale;
  }
};

/// What the sums of weight rows are multiplied by.
__device__ __forceinline__ void fill_factors(const BlockWork& work, const BlockMemory& memory) {
  const unsigned count = work.segments() * kSliceRows;
#pragma unroll 1
  for (unsigned i = threadIdx.x; i / 32 * 32 < count; i += kOneTokenThreads) {
    const Segment segment(work, i / kSliceRows);
    const int lane = static_cast<int>(segment.slot % 32);
    const int expert = __shfl_sync(~0U, work.active.expert, lane);
    const float weight = __shfl_sync(~0U, work.active.weight, lane);
    if (i >= count) continue;
    const unsigned row = segment.slice * kSliceRows + i % kSliceRows;
    const std::int64_t first = std::int64_t{expert} * work.gemm.row_blocks * kBlockRows;
    const float scale = work.gemm.scales ? work.gemm.scales[first + row] : 1.0F;
    memory.factors[i] = work.adds_slots ? scale * weight : scale;
  }
}

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
    for (int place = 0; gemm.bias && place < work.active.count; ++place) {
      const std::int64_t expert = __shfl_sync(~0U, work.active.expert, place);
      const float weight = __shfl_sync(~0U, work.active.weight, place);
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
                     const __grid_constant__ OneTokenMemory places) {
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
    const BlockMemory of_block{reinterpret_cast<std::uint32_t*>(memory + places.words[g]),
                               reinterpret_cast<float*>(memory + places.scales[g]),
                               reinterpret_cast<float*>(memory + places.factors),
                               reinterpret_cast<float*>(memory + places.partials)};
    fill_factors(work, of_block);  // before the weights, which it would have to wait for
    WarpItems<Operands> items(work);
    if (g == 0) {
      tables.make(threadIdx.x, kOneTokenThreads);
    } else {
      cooperative_groups::this_grid().sync();
    }
    for (unsigned i = threadIdx.x; i < work.slices * kOneTokenWarps * kSliceRows;
         i += kOneTokenThreads) {
      of_block.partials[i] = 0;
    }
    const bool rows_by_slot = g == 1 || p.hidden.by_expert();
    RowFiller<Operands>{g == 0 ? p.hidden : p.activated,
                        active,
                        of_block,
                        rows_by_slot ? static_cast<unsigned>(active.count) : 1,
                        static_cast<unsigned>(work.gemm.k_blocks),
                        g == 1}
        .fill(row_amax);
    __syncthreads();
    items.run(of_block, zeros, rows_by_slot, tables);
    __syncthreads();
    if (g == 0) {
      store_activated<Element>(p, work, of_block);
    } else {
      store_output<Element>(p, work, of_block);
    }
  }
}

}  // namespace fusedmoe::cuda
