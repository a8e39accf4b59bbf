// Groups of 128 features that several tiles of GEMM 1 share: whoever stores the last part of a
// group quantizes it for GEMM 2. So both GEMMs are one launch, as where a tile has whole groups.
#pragma once

#include "cuda/mlp/epilogue.cuh"
#include "cuda/rows/row_transform.cuh"
#include "cuda/sm90/kernel.cuh"

namespace fusedmoe::cuda::sm90 {

/// Adds 1 to a counter, and says what it was. What the calling thread knows to be stored, who
/// counts later sees, and it sees what those before have stored.
__device__ __forceinline__ int count_part(std::int32_t* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

/// By each warp of the epilogue warpgroup behind its part of a tile of GEMM 1. Half of a warp has
/// the group of one token.
template <typename K>
__device__ __forceinline__ void join_group(const FusedMlpParams& p, const WorkTile& tile) {
  static_assert(!kWritesTogether<K>, "a warp counts what it has written itself");
  constexpr int kParts = kBlocksOfGroup / K::kTileRowBlocks, kTokens = 32 / kGroupLanes;
  static_assert(kBlocksOfGroup % K::kTileRowBlocks == 0);
  const RowTransform& t = p.pass.rows;
  const int row_blocks = p.gemms[0].row_blocks, lane = static_cast<int>(threadIdx.x % 32);
  const int group = tile.row_block / kBlocksOfGroup;
  const int groups = (row_blocks + kBlocksOfGroup - 1) / kBlocksOfGroup;
  const int tiles = min(
      kParts, (row_blocks - group * kBlocksOfGroup + K::kTileRowBlocks - 1) / K::kTileRowBlocks);
  __syncwarp();  // all lanes have written
  int before = 0;
  if (lane == 0) {
    before = count_part(p.counters + p.pass.group_counters + tile.token_tile * groups + group);
  }
  if (__shfl_sync(~0U, before, 0) + 1 < 4 * tiles) return;

  const int unit = group * kGroupLanes + lane % kGroupLanes;
  int token = lane / kGroupLanes;
  const auto read = [&] {
    return token < tile.num_tokens ? read_unit(t, tile.first_row + token, unit) : uint4{};
  };
  uint4 raw = read();
#pragma unroll 1
  for (int left = tile.num_tokens; left > 0; left -= kTokens) {
    const uint4 own = raw;
    const bool has_token = token < tile.num_tokens;
    const int row = tile.first_row + token;
    token += kTokens;
    raw = read();  // the next while this one becomes codes
    const Converted value = to_fp8(t, own, 1);
    if (has_token) write_unit<RowKind::kFp8>(t, row, unit, value);
  }
}

}  // namespace fusedmoe::cuda::sm90
