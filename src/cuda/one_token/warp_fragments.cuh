// The main loop of the kernel of one token: a warp and its fragments of weights.
#pragma once

#include "cuda/one_token/block_work.cuh"
#include "cuda/one_token/weight_fragment.cuh"

namespace fusedmoe::cuda {

/// Fragments that a warp has on their way.
template <typename Operands>
inline constexpr int kFragmentsAhead = sizeof(WeightFragment<Operands>) > 40 ? 2 : 4;

/// Where a fragment is in global memory.
template <typename Operands>
struct FragmentPosition {
  Segment segment;
  unsigned k_block;
  const std::uint8_t* blocks;       ///< the packed block
  int thread;                       ///< of 128, as WeightFragment::load() has it
  const float* k_scales = nullptr;  ///< the two scales of its slice

  /// `index`: of the block's fragments.
  __device__ FragmentPosition(const BlockWork& work, unsigned index)
      : segment(work, index / work.gemm.k_blocks), k_block(index % work.gemm.k_blocks) {
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

/// The fragments of a warp: consecutive ones.
template <typename Operands>
class WarpFragments {
 public:
  static constexpr int kAhead = kFragmentsAhead<Operands>;

  /// The first weights are on their way.
  __device__ __forceinline__ explicit WarpFragments(const BlockWork& work)
      : work_(work),
        k_blocks_(work.gemm.k_blocks),
        count_(static_cast<int>(share(work, 1) - share(work, 0))),
        next_(work, share(work, 0)),
        current_(next_.segment),
        current_k_(next_.k_block) {
#pragma unroll
    for (int d = 0; d < kAhead; ++d) load(d, d < count_);
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
    for (int n = 0; n < count_; n += kAhead) {
#pragma unroll
      for (int d = 0; d < kAhead; ++d) {
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
        load(d, n + d + kAhead < count_);
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

  /// Fragments of the warps before this one, and of `more`.
  __device__ __forceinline__ static unsigned share(const BlockWork& work, unsigned more) {
    // The same in all lanes, as the compiler is to know.
    const unsigned warps = __shfl_sync(~0U, warp(), 0) + more;
    return work.segments() * work.gemm.k_blocks * warps / kOneTokenWarps;
  }

  /// The next fragment, if there is one.
  __device__ __forceinline__ void load(int d, bool present) {
    __builtin_assume(next_.thread >= 0 && next_.thread < 128);
    fragments_[d] =
        WeightFragment<Operands>::load(StreamedBlock{next_.blocks, present}, next_.thread);
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
      fragments_[d].decode(tables, half, a);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply_16x8<Operands>(a[i], b + i * kHalfWords / 2, products[half]);
      }
    }
  }

  using Position = FragmentPosition<Operands>;

  const BlockWork& work_;
  const unsigned k_blocks_;
  const int count_;
  Position next_;
  Segment current_;
  unsigned current_k_;
  WeightFragment<Operands> fragments_[kAhead];
  float2 scales_[kAhead];
};

}  // namespace fusedmoe::cuda
