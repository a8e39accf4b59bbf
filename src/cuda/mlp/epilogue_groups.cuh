// The epilogue of FP8 tiles of 256 weight rows where rows are quantized in groups of 128. A gated
// tile has the 128 activated features of a group, so GEMM 1 quantizes what GEMM 2 reads, and both
// GEMMs are one launch.
#pragma once

#include "cuda/mlp/epilogue.cuh"
#include "cuda/rows/row_transform.cuh"

namespace fusedmoe::cuda {

/// Whether two warpgroups have half of the features of each group.
template <typename K>
inline constexpr bool kSharesGroups = K::kRowGroups > 1 && !K::kHasEpilogueWarpgroup;

/// Of both.
template <typename K>
__device__ __forceinline__ void sync_row_groups() {
  if constexpr (kSharesGroups<K>) {
    static_assert(K::kRowGroups == 2);
    sync_threads(256, K::kRowGroups);  // behind those of warpgroups
  }
}

/// The largest magnitude of a token's group, where two warpgroups have half of its features each:
/// the larger of `own` and the other's. All threads of both; several lanes may have the same token.
/// Calls take turns at two arrays. When one is written again, all have met since it was read: in
/// the call between. (racecheck reports each write with the read behind it, although a named
/// barrier lies between them.)
template <typename K>
__device__ __forceinline__ float exchange_amax(SharedMemory<K>& shared,
                                               const WarpgroupCoords<K>& coords, int turn,
                                               int token, float own) {
  if constexpr (!kSharesGroups<K>) {
    return own;
  } else {
    auto& maxima = shared.group_amax[turn];
    maxima[coords.row_group()][token] = own;
    sync_row_groups<K>();
    return fmaxf(own, maxima[coords.row_group() ^ 1][token]);
  }
}

/// Of kTokens numbers the largest of kLanes neighbouring lanes: lane l gets that of number
/// l % kTokens. Both are powers of two.
template <int kLanes, int kTokens>
__device__ __forceinline__ float largest_of_lanes(const float (&numbers)[kTokens]) {
  static_assert(kTokens <= kLanes);
  float left[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) left[i] = numbers[i];
#pragma unroll
  for (int count = kTokens / 2, lane = 1; count > 0; count /= 2, lane *= 2) {
    // Of each two numbers, a lane keeps one and gives the other away.
    const bool keeps_odd = threadIdx.x & lane;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float kept = keeps_odd ? left[2 * i + 1] : left[2 * i];
      const float given = keeps_odd ? left[2 * i] : left[2 * i + 1];
      left[i] = fmaxf(kept, __shfl_xor_sync(~0U, given, lane));
    }
  }
#pragma unroll
  for (int lane = kTokens; lane < kLanes; lane *= 2) {
    left[0] = fmaxf(left[0], __shfl_xor_sync(~0U, left[0], lane));
  }
  return left[0];
}

/// Quantizes staged rows of a chunk and stores them. A thread has a unit of 8 features of some
/// tokens, `token_step` apart; kLanes neighbouring lanes have the units of a token.
template <typename K, int kLanes>
__device__ __forceinline__ void store_staged_groups(SharedMemory<K>& shared, const GemmParams& gemm,
                                                    const WorkTile& tile,
                                                    const WarpgroupCoords<K>& coords,
                                                    int first_token, int own_token,
                                                    int token_step) {
  constexpr bool kIsF16 = K::Operands::kRowDType == DType::kF16;
  using Pair = std::conditional_t<kIsF16, __half2, __nv_bfloat162>;
  constexpr int kTokens = K::kGroupTokens;
  const int unit = static_cast<int>(threadIdx.x % kLanes);
  const int feature = first_row_block(tile, coords) * (kBlockRows / 2) + unit * 8;
  const StagedRows<K>& rows = shared.rows[coords.row_group()];
  uint4 units[kTokens];
  float amax[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    units[i] = {};
    if (feature < gemm.width) {
      units[i] = *reinterpret_cast<const uint4*>(&rows[own_token + i * token_step][unit * 8]);
    }
    Pair largest(0.0F, 0.0F);
    take_larger(units[i], largest);
    amax[i] = larger(largest);
  }
  // A lane makes the scale of one token, and its inverse: each takes a division.
  const int turn = unit % kTokens;
  const int chunk = first_token / K::kChunkTokens;
  if (chunk == 0) sync_row_groups<K>();  // before the array of the last chunk is written again
  const float group_amax = exchange_amax(shared, coords, chunk % 2, own_token + turn * token_step,
                                         largest_of_lanes<kLanes>(amax));
  const float own_scale = core::e4m3_group_scale(group_amax, gemm.out_power_of_two);
  const float own_inverse = 1.0F / own_scale;
  const std::int64_t first_row = tile.first_row + first_token + own_token;
  const int left = tile.num_tokens - first_token - own_token;
  if (unit < kTokens && coords.row_group() == 0 && turn * token_step < left &&
      tile.row_block < gemm.row_blocks) {
    gemm.out_scales[tile.row_block / kBlocksOfGroup * gemm.out_scale_pitch + first_row +
                    turn * token_step] = own_scale;
  }
  char* out = static_cast<char*>(gemm.out) + first_row * gemm.out_pitch + feature;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float scale = __shfl_sync(~0U, own_scale, i, kLanes);
    const float inverse = __shfl_sync(~0U, own_inverse, i, kLanes);
    UnitValues values;
    read_values(kIsF16, units[i], values);
    const uint2 codes = divide_to_fp8(values, scale, inverse);
    if (i * token_step < left && feature < gemm.width) *reinterpret_cast<uint2*>(out) = codes;
    out += token_step * gemm.out_pitch;
  }
}

/// As store_rows(), of GEMM 1 with GemmParams::out_scales.
template <typename K, typename Read>
__device__ __forceinline__ void store_groups(SharedMemory<K>& shared, const FusedMlpParams& p,
                                             const WorkTile& tile, const WarpgroupCoords<K>& coords,
                                             const ScaleAndBias<K>& factors, const Read& read) {
  constexpr int kBlocks = kStoredRowBlocks<K>;
  // Lanes of a token: each has a unit of 8 features.
  constexpr int kLanes = kBlocks * kBlockRows / 2 / 8;
  const GemmParams& gemm = p.gemms[0];
  const int first_block = first_row_block(tile, coords), num_tokens = tile.num_tokens;
  StagedRows<K>& rows = shared.rows[coords.row_group()];
#pragma unroll 1
  for (int first = 0; first < num_tokens; first += K::kChunkTokens) {
#pragma unroll 1
    for (int b = 0; b < min(kBlocks, gemm.row_blocks - first_block); ++b) {
      Chunk<K> values;
      read(b * kChunks<K> + first / K::kChunkTokens, values);
      scale_and_add<K>(factors, b, values);
      if (b == 0) sync_warpgroup(coords);  // the rows before are written
      stage_activated<K>(p.activation, coords, values, b * kBlockRows / 2, rows);
    }
    sync_warpgroup(coords);
    store_staged_groups<K, kLanes>(shared, gemm, tile, coords, first, coords.thread() / kLanes,
                                   128 / kLanes);
  }
}

/// What `read` gives for each chunk of a tile -> rows of the GEMM that it belongs to.
template <typename K, typename Read>
__device__ __forceinline__ void store_results(SharedMemory<K>& shared, const FusedMlpParams& p,
                                              const WorkTile& tile,
                                              const WarpgroupCoords<K>& coords,
                                              const ScaleAndBias<K>& factors, const Read& read) {
  if constexpr (K::kStoresGroups) {
    if (p.gemms[tile.gemm].out_scales) {
      store_groups(shared, p, tile, coords, factors, read);
      return;
    }
  }
  store_rows(shared, p, tile, coords, factors, read);
}

}  // namespace fusedmoe::cuda
