// The epilogue of FP8 tiles of 256 weight rows where rows are quantized in groups of 128. A gated
// tile has the 128 activated features of a group, so GEMM 1 quantizes what GEMM 2 reads, and both
// GEMMs are one launch.
#pragma once

#include "cuda/mlp/epilogue.cuh"
#include "cuda/rows/row_transform.cuh"

namespace fusedmoe::cuda {

/// The largest magnitude of a token's group, where two warpgroups have half of its features each:
/// the larger of `own` and the other's. All threads of both; `chunk`: its number in the tile.
template <typename K>
__device__ __forceinline__ void exchange_amax(SharedMemory<K>& shared,
                                              const WarpgroupCoords<K>& coords, int chunk,
                                              const int (&tokens)[K::kGroupTokens],
                                              float (&amax)[K::kGroupTokens]) {
  if constexpr (K::kRowGroups > 1 && !K::kHasEpilogueWarpgroup) {
    static_assert(K::kRowGroups == 2);
    constexpr int kBarrier = 2 * K::kRowGroups;  // behind those of Turns
    // Chunks take turns at two arrays. When one is written again, all have met since it was read:
    // at the chunk in between or, before the first of a tile, here. (racecheck
    // reports each write with the read behind it, although a named barrier lies between them.)
    if (chunk == 0) sync_threads(256, kBarrier);
    auto& maxima = shared.group_amax[chunk % 2];
#pragma unroll
    for (int i = 0; i < K::kGroupTokens; ++i) maxima[coords.row_group()][tokens[i]] = amax[i];
    sync_threads(256, kBarrier);
#pragma unroll
    for (int i = 0; i < K::kGroupTokens; ++i) {
      amax[i] = fmaxf(amax[i], maxima[coords.row_group() ^ 1][tokens[i]]);
    }
  }
}

/// As store_rows(), of GEMM 1 with GemmParams::out_scales.
template <typename K, typename Read>
__device__ __forceinline__ void store_groups(SharedMemory<K>& shared, const FusedMlpParams& p,
                                             const WorkTile& tile, const WarpgroupCoords<K>& coords,
                                             const ScaleAndBias<K>& factors, const Read& read) {
  constexpr int kBlocks = kStoredRowBlocks<K>;
  // Lanes of a token: each has a unit of 8 features.
  constexpr int kLanes = kBlocks * kBlockRows / 2 / 8, kTokensAtOnce = 128 / kLanes;
  constexpr bool kIsF16 = K::Operands::kRowDType == DType::kF16;
  const GemmParams& gemm = p.gemms[0];
  const int first_block = first_row_block(tile, coords), num_tokens = tile.num_tokens;
  const int unit = coords.thread() % kLanes;
  const int feature = first_block * (kBlockRows / 2) + unit * 8;
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
    int tokens[K::kGroupTokens];
    UnitValues values[K::kGroupTokens];
    float amax[K::kGroupTokens];
#pragma unroll
    for (int i = 0; i < K::kGroupTokens; ++i) {
      tokens[i] = i * kTokensAtOnce + coords.thread() / kLanes;
      uint4 raw{};
      if (feature < gemm.width) {
        raw = *reinterpret_cast<const uint4*>(&rows[tokens[i]][unit * 8]);
      }
      read_values(kIsF16, raw, values[i]);
      amax[i] = amax_of_lanes<kLanes>(amax_of_values(values[i]));
    }
    exchange_amax(shared, coords, first / K::kChunkTokens, tokens, amax);
#pragma unroll
    for (int i = 0; i < K::kGroupTokens; ++i) {
      const float scale = core::e4m3_group_scale(amax[i], gemm.out_power_of_two);
      const uint2 codes = divide_to_fp8(values[i], scale);
      if (first + tokens[i] >= num_tokens) continue;
      const std::int64_t row = tile.first_row + first + tokens[i];
      if (feature < gemm.width) {
        *reinterpret_cast<uint2*>(static_cast<char*>(gemm.out) + row * gemm.out_pitch + feature) =
            codes;
      }
      if (unit == 0 && first_block == tile.row_block) {
        gemm.out_scales[tile.row_block / kBlocksOfGroup * gemm.out_scale_pitch + row] = scale;
      }
    }
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
