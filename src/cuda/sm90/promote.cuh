// Adding the sums of a K block to a tile's accumulators, times scales.
#pragma once

#include "cuda/sm90/kernel.cuh"

namespace fusedmoe::cuda::sm90 {

/// The scales of a K block in shared memory for a warp, and whether there are any.
struct KScales {
  const float* weights;  // of the warp's first row block: two slices
  const float* tokens;
  bool has_weights;
  bool has_tokens;
};
template <typename K>
__device__ __forceinline__ KScales k_scales(SharedMemory<K>& shared, const GemmParams& gemm,
                                            const WarpgroupCoords<K>& coords, int stage) {
  return {shared.weight_scales_at(stage, coords.k_group()) +
              coords.row_group() * K::kRowBlocks * kSlices + coords.thread() / 32 * 2,
          shared.token_scales_at(stage, coords.k_group()), gemm.block_scales != nullptr,
          gemm.token_scale_pitch > 0};
}

/// accumulators += sums of a row block times scales, if there are any. Each case is code of its own
/// up to the end: otherwise the compiler keeps the products of all columns in registers.
template <typename K, int kN, int kCount, int kAll>
__device__ __forceinline__ void promote(const float (&sums)[kCount], int first_column,
                                        const KScales& scales, int row_block,
                                        float (&accumulators)[kAll]) {
  float* to = &accumulators[first_column / 2];
  // `factors_of` gives those of rows r of tokens t and t + 1, then of rows r + 8.
  const auto add = [&](const auto& factors_of) {
#pragma unroll
    for (int i = 0; i < kN / 2; i += 4) {
      const float4 factors = factors_of(i);
      to[i] += sums[i] * factors.x;
      to[i + 1] += sums[i + 1] * factors.y;
      to[i + 2] += sums[i + 2] * factors.z;
      to[i + 3] += sums[i + 3] * factors.w;
      if constexpr (K::Operands::kHasKScales) {
#pragma unroll
        for (int t = 0; t < 4; ++t) asm volatile("" : "+f"(to[i + t]));
      }
    }
  };
  const auto ones = [](int) { return make_float4(1, 1, 1, 1); };
  if constexpr (!K::Operands::kHasKScales) {
    add(ones);
    return;
  }
  if (!scales.has_weights && !scales.has_tokens) {
    add(ones);
    return;
  }
  float2 rows = make_float2(1, 1);
  if (scales.has_weights) {
    rows = *reinterpret_cast<const float2*>(scales.weights + row_block * kSlices);
  }
  if (!scales.has_tokens) {
    add([&](int) { return make_float4(rows.x, rows.x, rows.y, rows.y); });
    return;
  }
  add([&](int i) {
    const auto tokens = *reinterpret_cast<const float2*>(scales.tokens + first_column + 2 * i +
                                                         threadIdx.x % 4 * 2);
    return make_float4(rows.x * tokens.x, rows.x * tokens.y, rows.y * tokens.x, rows.y * tokens.y);
  });
}

}  // namespace fusedmoe::cuda::sm90
