// Tiles whose tokens are wgmma's rows and whose weight rows are its columns (TileShape): the main
// loop and the epilogue of a row group, a warpgroup with all tokens and half of the weight rows. A
// thread has the accumulators of two tokens of each block of 64, t and t + 8; of each slice of 8
// weight rows those of two neighbours. So to add a K block it needs the scales of two tokens at a
// time, where with weights as rows it needs those of a quarter of the tile's tokens. And a warp has
// whole rows of the output.
#pragma once

#include "cuda/device/matrices.cuh"
#include "cuda/mlp/epilogue_groups.cuh"
#include "cuda/sm90/mainloop_stage.cuh"

namespace fusedmoe::cuda::sm90 {

/// Slices of 8 weight rows of a row group.
template <typename K>
inline constexpr int kGroupSlices = K::kRowBlocks* kSlices;

/// A thread's place in its warpgroup. Read anew wherever it is needed: what depends on it would
/// otherwise be computed before the first tile and occupy registers in all main loops.
template <typename K>
struct TileThread {
  unsigned index;  // without a sign, so that dividing it takes one instruction
  int row_group;
  __device__ __forceinline__ TileThread() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    row_group = static_cast<int>(index / 128) - 1;
    index %= 128;
  }
  /// The first row block of its row group in a tile.
  __device__ int first_row_block(const WorkTile& tile) const {
    return tile.row_block + row_group * K::kRowBlocks;
  }
  __device__ int lane() const { return static_cast<int>(index % 32); }
  /// The first of its warp's 16 tokens, in a block of 64.
  __device__ int warp_token() const { return static_cast<int>(index / 32 * 16); }
  /// The first of its own two tokens.
  __device__ int token() const { return warp_token() + static_cast<int>(index % 32 / 4); }
};

/// Which weight scales a K block has in a tile.
enum class KBlockScales : std::uint8_t {
  kNone,      ///< and no token scales either
  kTwo,       ///< one for the even slices, one for the odd: GemmParams::two_scales_a_tile
  kOfSlices,  ///< one for each slice
};

/// Before anything is copied: a scale that no K block has stays 1, which leaves the bits of a
/// product as they are. All threads.
template <typename K>
__device__ inline void clear_scales(SharedMemory<K>& shared) {
  float* scales = &shared.scales[0][0][0];
  constexpr int kCount = sizeof(shared.scales) / sizeof(float);
  for (int i = threadIdx.x; i < kCount; i += K::kThreads) scales[i] = 1;
  cutlass::arch::fence_view_async_shared();  // before the bulk copies
}

/// As multiply_promoted(), of so many blocks of 64 tokens. While a row group promotes, the tensor
/// cores work for the other.
template <KBlockScales kScales, int kTokenBlocks, typename K>
__device__ __forceinline__ void multiply_k_blocks(SharedMemory<K>& shared, const GemmParams& gemm,
                                                  const WorkTile& tile, int row_group,
                                                  StageState<K>& stage,
                                                  typename K::Accumulators& accumulators) {
  constexpr bool kTwo = kScales == KBlockScales::kTwo,
                 kOfSlices = kScales == KBlockScales::kOfSlices;
  // Of the thread's, among a stage's token scales.
  int first_token = TokenScaleCopy::offset(tile) + TileThread<K>().token();
  asm volatile("" : "+r"(first_token));  // else it is made anew for each K block
  for (int left = tile.k_end - tile.k_begin; left > 0; --left) {
    wait(&shared.stage_full[stage.index], stage.phase);
    const Descriptor<> weights(
        cute::cast_smem_ptr_to_uint(shared.weights_at(stage.index, row_group * K::kRowBlocks, 0)));
    const std::uint32_t activations =
        cute::cast_smem_ptr_to_uint(shared.activations_at(stage.index, 0));
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
      const Descriptor<> tokens(activations + b * kBlockRows * kSwizzleBytes);
      float sums[K::kAccumulators];
      fence_accumulators(sums);
      cute::warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kSteps<K>; ++j) {
        multiply_apart<typename K::Activation, K::kColumns>(tokens.at(j), weights.at(j), j == 0,
                                                            sums);
      }
      cute::warpgroup_commit_batch();
      const float* of_tokens =
          shared.token_scales_at(stage.index, 0) + b * kBlockRows + first_token;
      const auto* of_slices = reinterpret_cast<const float2*>(
          shared.weight_scales_at(stage.index, 0) + row_group * kGroupSlices<K>);
      float products[2][2];
      if constexpr (kTwo) {
        const float2 two = of_slices[0];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          products[0][t] = two.x * of_tokens[8 * t];
          products[1][t] = two.y * of_tokens[8 * t];
          asm volatile("" : "+f"(products[0][t]), "+f"(products[1][t]));  // before the wait
        }
      }
      cute::warpgroup_wait<0>();
      fence_accumulators(sums);
      const bool is_last = b + 1 == kTokenBlocks;
      if (is_last && !kOfSlices) release_stage(shared, stage.index);
#pragma unroll
      for (int s = 0; s < kGroupSlices<K>; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float scale = 1;
          if constexpr (kTwo) scale = products[s % 2][i / 2];
          if constexpr (kOfSlices) {
            const float2 two = of_slices[s / 2];
            scale = (s % 2 == 0 ? two.x : two.y) * of_tokens[i / 2 * 8];
          }
          accumulators[b][4 * s + i] += sums[4 * s + i] * scale;
        }
      }
      if (is_last && kOfSlices) release_stage(shared, stage.index);
    }
    stage.advance();
  }
}

template <KBlockScales kScales, typename K>
__device__ __forceinline__ void multiply_token_blocks(SharedMemory<K>& shared,
                                                      const GemmParams& gemm, const WorkTile& tile,
                                                      int row_group, StageState<K>& stage,
                                                      typename K::Accumulators& accumulators) {
  static_assert(K::kTokenBlocks == 2);
  if (tile.num_tokens > kBlockRows) {
    multiply_k_blocks<kScales, 2>(shared, gemm, tile, row_group, stage, accumulators);
  } else {
    multiply_k_blocks<kScales, 1>(shared, gemm, tile, row_group, stage, accumulators);
  }
}

/// For a row group behind the last row block.
template <typename K>
__device__ __forceinline__ void pass_stages(SharedMemory<K>& shared, const WorkTile& tile,
                                            StageState<K>& stage) {
  for (int left = tile.k_end - tile.k_begin; left > 0; --left) {
    wait(&shared.stage_full[stage.index], stage.phase);
    release_stage(shared, stage.index);
    stage.advance();
  }
}

template <typename K>
__device__ __forceinline__ void multiply_token_rows(SharedMemory<K>& shared, const GemmParams& gemm,
                                                    const WorkTile& tile, StageState<K>& stage,
                                                    typename K::Accumulators& accumulators) {
#pragma unroll
  for (auto& block : accumulators) {
#pragma unroll
    for (float& accumulator : block) accumulator = 0;
  }
  // Of the warp: what depends on it is the same for all lanes, and in uniform registers.
  const int row_group = __shfl_sync(~0U, TileThread<K>().row_group, 0);
  if (tile.row_block + row_group * K::kRowBlocks >= gemm.row_blocks) {
    return pass_stages(shared, tile, stage);
  }
  if constexpr (K::Operands::kHasKScales) {
    if (gemm.block_scales || gemm.token_scale_pitch > 0) {
      if (gemm.two_scales_a_tile) {
        multiply_token_blocks<KBlockScales::kTwo>(shared, gemm, tile, row_group, stage,
                                                  accumulators);
      } else {
        multiply_token_blocks<KBlockScales::kOfSlices>(shared, gemm, tile, row_group, stage,
                                                       accumulators);
      }
      return;
    }
  }
  multiply_token_blocks<KBlockScales::kNone>(shared, gemm, tile, row_group, stage, accumulators);
}

/// To the L2, during the main loop.
template <typename K>
__device__ inline void prefetch_column_factors(const GemmParams& gemm, const WorkTile& tile) {
  constexpr unsigned kFloats = 8;  // of a sector
  const TileThread<K> thread;
  if (thread.index >= K::kColumns / kFloats) return;
  const auto block =
      static_cast<std::int64_t>(tile.expert) * gemm.row_blocks + thread.first_row_block(tile);
  const std::int64_t column = block * kBlockRows + thread.index * kFloats;
  if (column >= (tile.expert + std::int64_t{1}) * gemm.row_blocks * kBlockRows) return;
  if (gemm.scales) prefetch_l2(gemm.scales + column);
  if (gemm.bias) prefetch_l2(gemm.bias + column);
}

/// What the epilogue handles at a time: a thread's values of 64 tokens. Of each slice of 8 weight
/// rows it has (t, r), (t, r + 1), (t + 8, r) and (t + 8, r + 1).
template <typename K>
using TokenBlock = float[K::kAccumulators];

/// accumulators -> results: times the scales of tokens and weight rows, plus the bias, where there
/// are any.
template <typename K>
__device__ __forceinline__ void finish_block(const GemmParams& gemm, const WorkTile& tile,
                                             int first_block, int first_token,
                                             TokenBlock<K>& values) {
  const TileThread<K> thread;
  if (gemm.token_scales && gemm.token_scale_pitch == 0) {
    const int last = tile.num_tokens - 1, token = first_token + thread.token();
    const float* scales = gemm.token_scales + tile.first_row;
    const float of_tokens[2] = {scales[min(token, last)], scales[min(token + 8, last)]};
#pragma unroll
    for (int i = 0; i < K::kAccumulators; ++i) values[i] *= of_tokens[i % 4 / 2];
  }
  const bool has_bias = gemm.bias && tile.split == 0;
  if (!gemm.scales && !has_bias) return;
#pragma unroll
  for (int b = 0; b < K::kRowBlocks; ++b) {
    const int row_block = min(first_block + b, gemm.row_blocks - 1);
    const std::int64_t first_row =
        (static_cast<std::int64_t>(tile.expert) * gemm.row_blocks + row_block) * kBlockRows +
        thread.lane() % 4 * 2;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      float2 scale = make_float2(1, 1), bias = make_float2(0, 0);
      if (gemm.scales) scale = reinterpret_cast<const float2*>(gemm.scales + first_row)[4 * s];
      if (has_bias) bias = reinterpret_cast<const float2*>(gemm.bias + first_row)[4 * s];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = values[4 * (b * kSlices + s) + i];
        value = value * (i % 2 == 0 ? scale.x : scale.y) + (i % 2 == 0 ? bias.x : bias.y);
      }
    }
  }
}

/// Rounds values of the slices from `begin` on to 16 bits and stages them in a warp's rows.
template <typename K, int kCount>
__device__ __forceinline__ void stage_slices(typename K::Output::Element (*staged)[K::kStagedPitch],
                                             int lane, const float (&values)[kCount], int begin) {
  __syncwarp();  // those before are written
#pragma unroll
  for (int s = 0; s < K::kStagedFeatures / 8; s += 2) {
    std::uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int of_slice = 4 * (begin + s) + 2 * i;
      pairs[i] = K::Output::round(values[of_slice], values[of_slice + 1]);
    }
    store_matrices(&staged[lane % 16][(s + lane / 16) * 8], pairs);
  }
  __syncwarp();
}

/// Rounds values of some slices to 16 bits and writes them to `out`, from `first_feature` on. With
/// `is_gate_up` even slices are gate's features and odd ones up's. Features from the row's width on
/// are left out.
template <typename K, int kCount>
__device__ __forceinline__ void write_slices(SharedMemory<K>& shared, const GemmParams& gemm,
                                             const WorkTile& tile, int first_token,
                                             const float (&values)[kCount], int first_feature,
                                             bool is_gate_up) {
  using Element = typename K::Output::Element;
  constexpr int kWarpTokens = 16, kUnits = K::kStagedFeatures / 8, kTokensAtOnce = 32 / kUnits;
  const TileThread<K> thread;
  const int lane = thread.lane(), unit = lane % kUnits;
  auto* staged = &shared.rows[thread.row_group][thread.warp_token()];
  const int first = first_token + thread.warp_token() + lane / kUnits;
  char* out = static_cast<char*>(gemm.out) +
              (tile.split * gemm.split_pitch + (tile.first_row + first) * gemm.out_pitch) *
                  out_bytes<K>(gemm);
#pragma unroll
  for (int begin = 0; begin < kCount / 4; begin += kUnits) {
    stage_slices<K>(staged, lane, values, begin);
    const int slice = begin + unit;
    const int feature = first_feature + (is_gate_up ? slice / 2 : slice) * 8;
    if (feature >= gemm.width) continue;
    const int column = feature + (is_gate_up && slice % 2 == 1 ? gemm.width : 0);
#pragma unroll
    for (int t = 0; t < kWarpTokens; t += kTokensAtOnce) {
      if (first + t >= tile.num_tokens) break;
      write_staged<K>(gemm, *reinterpret_cast<const uint4*>(&staged[t + lane / kUnits][unit * 8]),
                      out + (t * gemm.out_pitch + column) * out_bytes<K>(gemm));
    }
  }
}

/// The same in fp32, from registers; nothing is gate's or up's.
template <typename K>
__device__ __forceinline__ void write_slices_f32(const GemmParams& gemm, const WorkTile& tile,
                                                 int first_token, const TokenBlock<K>& values,
                                                 int first_feature) {
  const TileThread<K> thread;
  const int feature = first_feature + thread.lane() % 4 * 2;
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const int token = first_token + thread.token() + 8 * t;
    if (token >= tile.num_tokens) return;
    std::int64_t row = tile.first_row + token;
    if (gemm.out_rows) row = gemm.out_rows[row];
    float* out = static_cast<float*>(gemm.out) + tile.split * gemm.split_pitch +
                 row * gemm.out_pitch + feature;
#pragma unroll
    for (int s = 0; s < kGroupSlices<K>; ++s) {
      if (feature + 8 * s >= gemm.width) break;
      *reinterpret_cast<float2*>(out + 8 * s) =
          make_float2(values[4 * s + 2 * t], values[4 * s + 2 * t + 1]);
    }
  }
}

/// As store_groups(), of a block of 64 tokens.
template <typename K, int kCount>
__device__ __forceinline__ void write_groups(SharedMemory<K>& shared, const GemmParams& gemm,
                                             const WorkTile& tile, int first_token,
                                             const float (&values)[kCount]) {
  constexpr int kLanes = K::kStagedFeatures / 8;
  static_assert(kCount / 4 == kLanes);
  const TileThread<K> thread;
  auto* staged = &shared.rows[thread.row_group][thread.warp_token()];
  stage_slices<K>(staged, thread.lane(), values, 0);
  store_staged_groups<K, kLanes>(shared, gemm, tile, WarpgroupCoords<K>{thread.row_group},
                                 first_token, thread.warp_token() + thread.lane() / kLanes,
                                 32 / kLanes);
}

template <typename K>
__device__ __forceinline__ void store_block(SharedMemory<K>& shared, const FusedMlpParams& p,
                                            const WorkTile& tile, int first_token,
                                            TokenBlock<K>& values) {
  static_assert(!K::Output::kQuantizes && !K::Output::kWeightsRows);
  const GemmParams& gemm = p.gemms[tile.gemm];
  const int first_block = TileThread<K>().first_row_block(tile);
  finish_block<K>(gemm, tile, first_block, first_token, values);
  const int first_row = first_block * kBlockRows;
  if (gemm.out_f32) return write_slices_f32<K>(gemm, tile, first_token, values, first_row);
  if (gemm.epilogue == Epilogue::kActivate) {  // slices of gate and up alternate
    constexpr int kActivated = K::kAccumulators / 2;
    // In place, because registers are scarce. Activated value i overwrites values[i], which no
    // later value reads: gate is at least i.
    call_for_gated(p.activation, [&](const ResolvedActivation& known) {
#pragma unroll
      for (int i = 0; i < kActivated; ++i) {
        const int gate = i / 4 * 8 + i % 4;
        values[i] = activate(known, values[gate], values[gate + 4]);
      }
    });
    auto& activated = reinterpret_cast<float(&)[kActivated]>(values);
    if constexpr (K::kStoresGroups) {
      if (gemm.out_scales) {
        return write_groups(shared, gemm, tile, first_token, activated);
      }
    }
    return write_slices(shared, gemm, tile, first_token, activated, first_row / 2, false);
  }
  if (gemm.epilogue == Epilogue::kActivateGate) {
    call_for_not_gated(p.activation, [&](const ResolvedActivation& known) {
#pragma unroll
      for (float& value : values) value = activate_gate(known, value);
    });
  }
  const bool is_gate_up = gemm.epilogue == Epilogue::kStoreGateUp;
  write_slices(shared, gemm, tile, first_token, values, is_gate_up ? first_row / 2 : first_row,
               is_gate_up);
}

/// As store_tile(). One copy of the code handles all blocks of 64 tokens: when one is stored, the
/// others move up.
template <typename K>
__device__ inline void store_token_rows(SharedMemory<K>& shared, const FusedMlpParams& p,
                                        const WorkTile& tile,
                                        typename K::Accumulators& accumulators) {
  int first_token = 0;
#pragma unroll 1
  while (true) {
    store_block(shared, p, tile, first_token, accumulators[0]);
    first_token += kBlockRows;
    if (first_token >= tile.num_tokens) return;
#pragma unroll
    for (int b = 1; b < K::kTokenBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < K::kAccumulators; ++i) accumulators[b - 1][i] = accumulators[b][i];
    }
  }
}

}  // namespace fusedmoe::cuda::sm90
