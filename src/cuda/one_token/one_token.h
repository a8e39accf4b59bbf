// The experts of one token: both GEMMs and the combine in one launch. Plain C++.
//
// One token reads the weights of its experts once and does little with them, so each further launch
// and each detour of rows through memory shows. Here every thread block quantizes the token itself,
// and adds up its output rows over all slots. One barrier of all blocks lies between the GEMMs.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "core/host_device.h"
#include "cuda/formats/weight_format.h"
#include "cuda/mlp/fused_mlp.h"

namespace fusedmoe::cuda {

inline constexpr int kMaxSlotsOfOneToken = 32;
inline constexpr int kOneTokenWarps = 16;
/// Weight rows of a slice: what one warp multiplies at a time.
inline constexpr int kSliceRows = 16;
/// Of an element of a token row in shared memory: E4M3 codes are kept as f16.
inline constexpr int kRowElementBytes = 2;

/// Device pointers throughout. Of `gemms` only weights, scales, biases, sizes and the epilogue
/// count, and where GEMM 1 stores its rows, one for each slot.
struct OneTokenParams {
  GemmParams gemms[2];
  ResolvedActivation activation{};
  RowTransform hidden;                     ///< of the token; `to` and `scales` do not count
  RowTransform activated;                  ///< of what GEMM 1 stores
  const std::int32_t* topk_ids = nullptr;  ///< (topk)
  const float* topk_weights = nullptr;     ///< (topk); null: 1
  int topk = 0;                            ///< at most kMaxSlotsOfOneToken
  core::LocalExperts local_experts;
  void* output = nullptr;  ///< (hidden), of the layer's dtype or f32
  bool output_f32 = false;
  bool accumulate = false;  ///< add the sum to what the output holds, before the rounding
};

/// Which bit of `mask` is the n-th of those that are set, from 0; 31 if there are not so many.
FUSEDMOE_HD constexpr int nth_set_bit(unsigned mask, int n) {
  int bit = 0;
  for (int step = 16; step > 0; step /= 2) {
    // With at most n set bits below a bit, the n-th is this one or above it.
    if (std::popcount(mask & ((1U << (bit + step)) - 1)) <= n) bit += step;
  }
  return bit;
}

/// Where things are in a thread block's shared memory: bytes from its beginning.
struct OneTokenLayout {
  std::int64_t words[2];   ///< of both GEMMs: token rows
  std::int64_t scales[2];  ///< fp32, of each row and K block
  std::int64_t factors;    ///< fp32, of 16 weight rows for each segment of the larger GEMM
  std::int64_t partials;   ///< fp32, of 16 weight rows for each slice and warp
  std::int64_t bytes;
};

constexpr std::int64_t slices_of(std::int64_t width, bool gated) {
  return ceil_div(width, gated ? kSliceRows / 2 : kSliceRows);
}

/// The sizes of a launch. The grid and the layout of shared memory both follow from `blocks`: a
/// block has room for its share of the slices.
struct OneTokenShape {
  std::int64_t slots = 0, blocks = 0;  ///< thread blocks
  std::int64_t slices[2] = {};         ///< of GEMM 1 for each slot, of GEMM 2 for all
  std::int64_t k_blocks[2] = {};
  std::int64_t block_k = 0;   ///< elements of a K block
  bool rows_by_slot = false;  ///< hidden states differ from expert to expert

  constexpr std::int64_t block_slices(int gemm) const {
    return ceil_div(slices[gemm] * (gemm == 0 ? slots : 1), blocks);
  }
  constexpr OneTokenLayout layout() const {
    const std::int64_t rows[2] = {rows_by_slot ? slots : 1, slots};
    OneTokenLayout m{};
    std::int64_t end = 0;
    const auto take = [&](std::int64_t bytes) {
      const std::int64_t begin = end;
      end += ceil_div(bytes, 16) * 16;
      return begin;
    };
    const std::int64_t row_bytes = block_k * kRowElementBytes;
    for (int i = 0; i < 2; ++i) m.words[i] = take(rows[i] * k_blocks[i] * row_bytes);
    for (int i = 0; i < 2; ++i) m.scales[i] = take(rows[i] * k_blocks[i] * 4);
    const std::int64_t first = block_slices(0), second = block_slices(1);
    m.factors = take((first > second * slots ? first : second * slots) * kSliceRows * 4);
    m.partials = take((first > second ? first : second) * kOneTokenWarps * kSliceRows * 4);
    m.bytes = end;
    return m;
  }
};

/// Enqueues the experts of one token.
using OneTokenLaunch = void (*)(const OneTokenParams&, const OneTokenShape&, const Stream&);

/// That of one format.
struct OneTokenKernel {
  std::string_view format;
  OneTokenLaunch launch;
};

/// Of weights in this format: one of the generated files (cmake/FusedmoeKernels.cmake). Null: there
/// is none, and OneTokenPlan::supports() says so.
OneTokenLaunch one_token_launch(const WeightFormat& format);

/// Shared memory that the kernel takes at most, beside tables.
inline constexpr std::int64_t kOneTokenSharedBytes = 220 << 10;

}  // namespace fusedmoe::cuda
