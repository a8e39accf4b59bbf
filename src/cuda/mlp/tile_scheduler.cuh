// The tile scheduler. It cuts the rows of each expert into work tiles, numbers the tiles of all
// experts, and finds the expert, rows and columns of a tile from its number.
#pragma once

#include "cuda/mlp/work_tile.cuh"

namespace fusedmoe::cuda {

/// First row of each expert where thread blocks count rows themselves; behind the tile prefixes.
template <typename K>
__device__ inline std::int32_t* row_prefix(SharedMemory<K>& shared, const FusedMlpParams& p) {
  return shared.tile_prefix + K::row_prefix_offset(p.num_experts);
}

/// Rows of an expert; in the batched format as the caller says, within the capacity.
__device__ inline int read_rows(const FusedMlpParams& p, int expert) {
  const int rows = p.expert_num_tokens[expert];
  return p.expert_offsets ? rows : max(0, min(rows, static_cast<int>(p.capacity)));
}

/// The local expert of this thread's slot where thread blocks count rows themselves, else -1. Call
/// early, to hide the load's latency.
__device__ inline int read_expert(const FusedMlpParams& p) {
  const int thread = threadIdx.x;
  return p.topk_ids && thread < p.num_slots ? p.local_experts(p.topk_ids[thread]) : -1;
}

/// tiles[e + 1], so far the rows of e, becomes the number of token tiles of the experts up to e;
/// `rows`, if there, gets the same sums of rows. For one warp: each lane adds neighbouring experts,
/// then one scan adds the lanes.
template <typename K>
__device__ inline void sum_up(std::int32_t* tiles, std::int32_t* rows, int num_experts) {
  const int lane = threadIdx.x;
  const int share = (num_experts + 31) / 32;
  const int begin = min(lane * share, num_experts), end = min(begin + share, num_experts);
  int2 sum{};  // of this lane's experts; from the scan on, up to some expert
#pragma unroll 4
  for (int e = begin; e < end; ++e) {
    const int count = tiles[e + 1];
    sum = {sum.x + num_token_tiles(count, K::kMaxTokens), sum.y + count};
  }
  const int2 own = sum;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int x = __shfl_up_sync(~0u, sum.x, distance);
    const int y = __shfl_up_sync(~0u, sum.y, distance);
    if (lane >= distance) sum = {sum.x + x, sum.y + y};
  }
  sum = {sum.x - own.x, sum.y - own.y};
#pragma unroll 4
  for (int e = begin; e < end; ++e) {
    const int count = tiles[e + 1];
    sum = {sum.x + num_token_tiles(count, K::kMaxTokens), sum.y + count};
    tiles[e + 1] = sum.x;
    if (rows) rows[e + 1] = sum.y;
  }
  if (lane == 0) {
    tiles[0] = 0;
    if (rows) rows[0] = 0;
  }
}

/// tile_prefix, and row_prefix where this thread block counts rows itself; all threads. `expert`:
/// what read_expert() returned.
template <typename K>
__device__ inline void count_tiles(SharedMemory<K>& shared, const FusedMlpParams& p, int expert) {
  std::int32_t* tiles = shared.tile_prefix;  // until the sums, [e + 1] are the rows of e
  const int thread = threadIdx.x;
  for (int e = thread; e < p.num_experts; e += K::kThreads) {
    tiles[e + 1] = p.topk_ids ? 0 : read_rows(p, e);
  }
  __syncthreads();
  if (p.topk_ids) {
    if (expert >= 0) atomicAdd(&tiles[expert + 1], 1);
    __syncthreads();
  }
  if (thread < 32) sum_up<K>(tiles, p.topk_ids ? row_prefix(shared, p) : nullptr, p.num_experts);
  __syncthreads();
}

/// The work tile of an index; where thread blocks form clusters, for the one of this rank.
template <typename K>
__device__ inline WorkTile make_tile(SharedMemory<K>& shared, const FusedMlpParams& p, int index,
                                     int rank = 0) {
  TileOrder order;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i >= p.num_gemms) break;
    order.gemms[i] = {static_cast<int>(ceil_div(p.gemms[i].row_blocks, K::kClusterRowBlocks)),
                      p.gemms[i].splits};
  }
  if constexpr (K::kHasRowPass) order.pass_tiles = p.pass.tiles;
  const TileCoords coords = find_tile(index, order, shared.tile_prefix, p.num_experts);
  WorkTile tile{};
  tile.gemm = coords.gemm;
  if (coords.gemm < 0) return tile;
  const std::int32_t* counted = row_prefix(shared, p) + coords.expert;
  const int rows = p.topk_ids ? counted[1] - counted[0] : read_rows(p, coords.expert);
  const int expert_row = p.topk_ids         ? counted[0]
                         : p.expert_offsets ? p.expert_offsets[coords.expert]
                                            : static_cast<int>(coords.expert * p.capacity);
  const int first_tile = shared.tile_prefix[coords.expert];
  const int size = token_tile_size(rows, shared.tile_prefix[coords.expert + 1] - first_tile,
                                   K::kTile.token_step());
  const int begin = coords.token_tile * size;
  tile.expert = coords.expert;
  tile.token_tile = first_tile + coords.token_tile;
  tile.first_row = expert_row + begin;
  tile.num_tokens = min(size, rows - begin);
  if (is_row_pass<K>(tile)) {  // some of the token tile's rows
    const int tokens = tile.num_tokens, first = tokens * coords.row_tile / p.pass.tiles;
    tile.first_row += first;
    tile.num_tokens = tokens * (coords.row_tile + 1) / p.pass.tiles - first;
    return tile;
  }
  const GemmParams& gemm = p.gemms[coords.gemm];
  tile.row_block = coords.row_tile * K::kClusterRowBlocks + rank * K::kTileRowBlocks;
  tile.k_begin = split_begin(gemm.k_blocks, gemm.splits, coords.split);
  tile.k_end = split_begin(gemm.k_blocks, gemm.splits, coords.split + 1);
  tile.split = coords.split;
  return tile;
}

}  // namespace fusedmoe::cuda
