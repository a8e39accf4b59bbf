// Tiles whose tokens are wgmma's rows and whose weight rows are its columns (TileShape): the main
// loop and the epilogue of a token group. A thread has the accumulators of two tokens, t and t + 8;
// of each slice of 8 weight rows those of two neighbours. So to add a K block it needs the scales
// of two tokens, where with weights as rows it needs those of a quarter of the tile's tokens. And a
// warp has whole rows of the output, which it writes 128 bytes at a time.
#pragma once

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/mainloop.cuh"

namespace fusedmoe::cuda {

/// Slices of 8 weight rows of a tile.
template <typename K>
inline constexpr int kTileSlices = K::kTileRowBlocks* kSlices;

/// The first of a warp's 16 tokens, in the tile.
template <typename K>
__device__ inline int warp_token(const WarpgroupCoords<K>& coords) {
  return coords.first_token() + coords.thread() / 32 * 16;
}

/// Which weight scales a K block has in a tile.
enum class KBlockScales : std::uint8_t {
  kNone,      ///< and no token scales either
  kTwo,       ///< one for the even slices, one for the odd: GemmParams::two_scales_a_tile
  kOfSlices,  ///< one for each slice
};

/// A thread's products of token scales and weight scales of a K block. A scale that is missing
/// counts as 1, which leaves the bits as they are.
template <KBlockScales kScales, typename K>
struct TokenRowScales {
  static constexpr int kCount = kScales == KBlockScales::kTwo ? 2 : kTileSlices<K>;
  using Products = float[kCount][2];
  int first_token;  // of the thread's two, among the scales in shared memory
  int has_weights, has_tokens;

  __device__ __forceinline__ TokenRowScales(const GemmParams& gemm, const WorkTile& tile,
                                            const WarpgroupCoords<K>& coords)
      : first_token(TokenScaleCopy::offset(tile) + warp_token(coords) + coords.thread() % 32 / 4),
        has_weights(gemm.block_scales != nullptr),
        has_tokens(gemm.token_scale_pitch > 0) {
    // In registers, or the compiler makes them anew for each K block.
    asm volatile("" : "+r"(first_token), "+r"(has_weights), "+r"(has_tokens));
  }
  __device__ __forceinline__ void multiply(SharedMemory<K>& shared, int stage,
                                           Products& products) const {
    float of_tokens[2] = {1, 1};
    if (has_tokens) {
      const float* scales = shared.token_scales_at(stage, 0) + first_token;
      of_tokens[0] = scales[0];
      of_tokens[1] = scales[8];
    }
    const auto* weights = reinterpret_cast<const float2*>(shared.weight_scales_at(stage, 0));
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float2 two = has_weights ? weights[i / 2] : make_float2(1, 1);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        products[i][t] = two.x * of_tokens[t];
        products[i + 1][t] = two.y * of_tokens[t];
        // Before the wait for wgmma.
        asm volatile("" : "+f"(products[i][t]), "+f"(products[i + 1][t]));
      }
    }
  }
};

/// As multiply_promoted(). While one token group promotes, the tensor cores work for the other.
template <KBlockScales kScales, typename K>
__device__ __forceinline__ void multiply_k_blocks(SharedMemory<K>& shared, const GemmParams& gemm,
                                                  const WorkTile& tile,
                                                  const WarpgroupCoords<K>& coords,
                                                  StageState<K>& stage,
                                                  float (&accumulators)[K::kAccumulators]) {
  constexpr bool kScaled = kScales != KBlockScales::kNone;
  using Scales = TokenRowScales<kScales, K>;
  const Scales scales(gemm, tile, coords);
  for (int left = tile.k_end - tile.k_begin; left > 0; --left) {
    const StageOperands<K> operands = acquire(shared, stage, coords);
    const Descriptor<> weights(cute::cast_smem_ptr_to_uint(operands.weights));
    const Descriptor<> tokens(cute::cast_smem_ptr_to_uint(operands.activations) +
                              coords.first_token() * kSwizzleBytes);
    float sums[K::kAccumulators];
    fence_accumulators(sums);
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < kSteps<K>; ++j) {
      multiply_apart<typename K::Activation, K::kColumns>(tokens.at(j), weights.at(j), j == 0,
                                                          sums);
    }
    cute::warpgroup_commit_batch();
    typename Scales::Products products;
    if constexpr (kScaled) scales.multiply(shared, stage.index, products);
    cute::warpgroup_wait<0>();
    fence_accumulators(sums);
    release_stage(shared, stage.index);
    stage.advance();
#pragma unroll
    for (int i = 0; i < K::kAccumulators; ++i) {
      const int slice = i / 4 % Scales::kCount;
      accumulators[i] += kScaled ? sums[i] * products[slice][i % 4 / 2] : sums[i];
    }
  }
}

template <typename K>
__device__ __forceinline__ void multiply_token_rows(SharedMemory<K>& shared,
                                                    const FusedMlpParams& p, const WorkTile& tile,
                                                    const WarpgroupCoords<K>& coords,
                                                    StageState<K>& stage,
                                                    float (&accumulators)[K::kAccumulators]) {
#pragma unroll
  for (float& accumulator : accumulators) accumulator = 0;
  const GemmParams& gemm = p.gemms[tile.gemm];
  if (coords.first_token() >= tile.num_tokens) {
    for (int left = tile.k_end - tile.k_begin; left > 0; --left) {
      acquire(shared, stage, coords);
      release_stage(shared, stage.index);
      stage.advance();
    }
  } else if (!gemm.block_scales && gemm.token_scale_pitch == 0) {
    multiply_k_blocks<KBlockScales::kNone>(shared, gemm, tile, coords, stage, accumulators);
  } else if (gemm.two_scales_a_tile) {
    multiply_k_blocks<KBlockScales::kTwo>(shared, gemm, tile, coords, stage, accumulators);
  } else {
    multiply_k_blocks<KBlockScales::kOfSlices>(shared, gemm, tile, coords, stage, accumulators);
  }
}

/// To the L2, during the main loop.
template <typename K>
__device__ inline void prefetch_column_factors(const GemmParams& gemm, const WorkTile& tile,
                                               const WarpgroupCoords<K>& coords) {
  constexpr int kFloats = 8;  // of a sector
  if (coords.thread() >= K::kColumns / kFloats) return;
  const auto block = static_cast<std::int64_t>(tile.expert) * gemm.row_blocks + tile.row_block;
  const std::int64_t column = block * kBlockRows + coords.thread() * kFloats;
  if (column >= (tile.expert + std::int64_t{1}) * gemm.row_blocks * kBlockRows) return;
  if (gemm.scales) prefetch_l2(gemm.scales + column);
  if (gemm.bias) prefetch_l2(gemm.bias + column);
}

/// accumulators -> results: times the scales of tokens and weight rows, plus the bias, where there
/// are any.
template <typename K>
__device__ __forceinline__ void finish_token_rows(const GemmParams& gemm, const WorkTile& tile,
                                                  const WarpgroupCoords<K>& coords,
                                                  float (&values)[K::kAccumulators]) {
  const int lane = coords.thread() % 32;
  if (gemm.token_scales && gemm.token_scale_pitch == 0) {
    const int last = tile.num_tokens - 1, token = warp_token(coords) + lane / 4;
    const float* scales = gemm.token_scales + tile.first_row;
    const float of_tokens[2] = {scales[min(token, last)], scales[min(token + 8, last)]};
#pragma unroll
    for (int i = 0; i < K::kAccumulators; ++i) values[i] *= of_tokens[i % 4 / 2];
  }
  const bool has_bias = gemm.bias && tile.split == 0;
  if (!gemm.scales && !has_bias) return;
  constexpr int kOfBlock = kBlockRows / 2;  // values
#pragma unroll
  for (int b = 0; b < K::kTileRowBlocks; ++b) {
    const int row_block = min(tile.row_block + b, gemm.row_blocks - 1);
    const std::int64_t first_column =
        (static_cast<std::int64_t>(tile.expert) * gemm.row_blocks + row_block) * kBlockRows +
        lane % 4 * 2;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      float2 scale = make_float2(1, 1), bias = make_float2(0, 0);
      if (gemm.scales) {
        scale = reinterpret_cast<const float2*>(gemm.scales + first_column)[4 * s];
      }
      if (has_bias) bias = reinterpret_cast<const float2*>(gemm.bias + first_column)[4 * s];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = values[b * kOfBlock + 4 * s + i];
        value = value * (i % 2 == 0 ? scale.x : scale.y) + (i % 2 == 0 ? bias.x : bias.y);
      }
    }
  }
}

/// A thread's values of 64 features. Of each slice of 8: (t, f), (t, f + 1), (t + 8, f) and (t + 8,
/// f + 1).
using FeatureBlock = float[kBlockRows / 8 * 4];

/// Rounds them to 16 bits and writes them to `out` from `column` on. Features from the row's width
/// on are left out; `first_feature` is the first one.
template <typename K>
__device__ __forceinline__ void write_features(SharedMemory<K>& shared, const GemmParams& gemm,
                                               const WorkTile& tile,
                                               const WarpgroupCoords<K>& coords,
                                               const FeatureBlock& values, int first_feature,
                                               int column) {
  using Element = typename K::Output::Element;
  constexpr int kWarpTokens = 16, kUnits = kBlockRows / 8, kTokensAtOnce = 32 / kUnits;
  const int lane = coords.thread() % 32, unit = lane % kUnits;
  auto* staged = &shared.rows[coords.warpgroup][coords.thread() / 32 * kWarpTokens];
  __syncwarp();  // those before are written
#pragma unroll
  for (int s = 0; s < kUnits; s += 2) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = K::Output::round(values[4 * s + 2 * i], values[4 * s + 2 * i + 1]);
    }
    store_matrices(&staged[lane % 16][(s + lane / 16) * 8], pairs);
  }
  __syncwarp();
  if (first_feature + unit * 8 >= gemm.width) return;
  const int first = warp_token(coords) + lane / kUnits;
  auto* out = static_cast<Element*>(gemm.out) + tile.split * gemm.split_pitch +
              (tile.first_row + first) * gemm.out_pitch + column + unit * 8;
#pragma unroll
  for (int t = 0; t < kWarpTokens; t += kTokensAtOnce) {
    if (first + t >= tile.num_tokens) return;
    *reinterpret_cast<uint4*>(out + t * gemm.out_pitch) =
        *reinterpret_cast<const uint4*>(&staged[t + lane / kUnits][unit * 8]);
  }
}

/// The same of all results of the tile in fp32, from registers.
template <typename K>
__device__ __forceinline__ void write_token_rows_f32(const GemmParams& gemm, const WorkTile& tile,
                                                     const WarpgroupCoords<K>& coords,
                                                     const float (&values)[K::kAccumulators]) {
  const int lane = coords.thread() % 32;
  const int first_feature = tile.row_block * kBlockRows + lane % 4 * 2;
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const int token = warp_token(coords) + lane / 4 + 8 * t;
    if (token >= tile.num_tokens) return;
    std::int64_t row = tile.first_row + token;
    if (gemm.out_rows) row = gemm.out_rows[row];
    float* out = static_cast<float*>(gemm.out) + tile.split * gemm.split_pitch +
                 row * gemm.out_pitch + first_feature;
#pragma unroll
    for (int s = 0; s < kTileSlices<K>; ++s) {
      if (first_feature + 8 * s >= gemm.width) break;
      *reinterpret_cast<float2*>(out + 8 * s) =
          make_float2(values[4 * s + 2 * t], values[4 * s + 2 * t + 1]);
    }
  }
}

/// As store_tile().
template <typename K>
__device__ inline void store_token_rows(SharedMemory<K>& shared, const FusedMlpParams& p,
                                        const WorkTile& tile, const WarpgroupCoords<K>& coords,
                                        float (&values)[K::kAccumulators]) {
  static_assert(K::kTileRowBlocks == 2 && !K::Output::kQuantizes && !K::Output::kWeightsRows);
  if (coords.first_token() >= tile.num_tokens) return;
  const GemmParams& gemm = p.gemms[tile.gemm];
  finish_token_rows(gemm, tile, coords, values);
  if (gemm.out_f32) return write_token_rows_f32(gemm, tile, coords, values);
  const auto write = [&](const FeatureBlock& block, int first_feature, int column) {
    write_features(shared, gemm, tile, coords, block, first_feature, column);
  };
  // Slices of gate and up alternate.
  const int gated_feature = tile.row_block * kBlockRows / 2;
  FeatureBlock block;
  if (gemm.epilogue == Epilogue::kActivate) {
    call_for_gated(p.activation, [&](const ResolvedActivation& known) {
#pragma unroll
      for (int i = 0; i < kBlockRows / 2; ++i) {
        const int gate = i / 4 * 8 + i % 4;
        block[i] = activate(known, values[gate], values[gate + 4]);
      }
    });
    return write(block, gated_feature, gated_feature);
  }
  if (gemm.epilogue == Epilogue::kActivateGate) {
    call_for_not_gated(p.activation, [&](const ResolvedActivation& known) {
#pragma unroll
      for (float& value : values) value = activate_gate(known, value);
    });
  }
  const bool is_gate_up = gemm.epilogue == Epilogue::kStoreGateUp;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kBlockRows / 2; ++i) {
      const int of_matrix = i / 4 * 8 + half * 4 + i % 4, of_block = half * kBlockRows / 2 + i;
      block[i] = is_gate_up ? values[of_matrix] : values[of_block];
    }
    const int feature = is_gate_up ? gated_feature : (tile.row_block + half) * kBlockRows;
    write(block, feature, is_gate_up ? feature + half * gemm.width : feature);
  }
}

}  // namespace fusedmoe::cuda
