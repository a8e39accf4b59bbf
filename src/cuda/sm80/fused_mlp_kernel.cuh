// The fused MLP kernel of mma.sync and cp.async, which every GPU since compute capability 8.0 has:
// persistent, both GEMMs of a layer in one launch. All warps do the same. In each step of a thread
// block
//
//   * the copies of one stage of operands start; they go on from tile to tile without a pause,
//   * the stage that has come is multiplied,
//   * behind the last stage of a tile its accumulators become rows.
//
// Tile indexes are drawn in order. Tiles of GEMM 2 read what tiles of GEMM 1 store, or what those
// of the row pass make of it; a block looks in each step whether these rows are there, and copies
// nothing before they are. It goes on with the tile that it has, so it never waits while it owns
// tiles that others may wait for: no order of blocks can lock up.
#pragma once

#include "cuda/mlp/epilogue_groups.cuh"
#include "cuda/mlp/row_pass.cuh"
#include "cuda/mlp/stored_rows.cuh"
#include "cuda/mlp/tile_scheduler.cuh"
#include "cuda/sm80/copies.cuh"
#include "cuda/sm80/mainloop.cuh"

namespace fusedmoe::cuda::sm80 {

/// Draws tiles ahead and tells all threads of them. Its steps are those of the kernel, each behind
/// a barrier of the block: what the first thread writes in one, all read in the next.
template <typename K>
class TileQueue {
 public:
  __device__ TileQueue(SharedMemory<K>& shared, const FusedMlpParams& params)
      : shared_(shared), p_(params) {}

  /// At the beginning of a step.
  __device__ __forceinline__ void advance() {
    ++step_;
    const bool was_there = state_ >= State::kWritten;
    if (was_there) state_ = State::kThere;
    if (state_ == State::kAsked) state_ = State::kWritten;
    if (threadIdx.x > 0 || state_ < State::kWritten) return;
    WorkTile& tile = shared_.tiles[next_ % K::kTileSlots];
    if (!was_there) tile = make_tile(shared_, p_, index_);
    shared_.rows_are_stored[step_ % 2] =
        (was_there && can_start()) || tile.gemm <= 0 || rows_are_stored(tile);
  }
  /// Asks for the next tile, if nobody has.
  __device__ __forceinline__ void ask() {
    if (state_ != State::kNone) return;
    if (threadIdx.x == 0) index_ = atomicAdd(p_.counters, 1);  // used a step later
    state_ = State::kAsked;
  }
  /// The next tile; null: it is not known yet.
  __device__ __forceinline__ const WorkTile* next() const {
    return state_ == State::kThere ? &shared_.tiles[next_ % K::kTileSlots] : nullptr;
  }
  /// Whether its token rows can be read.
  __device__ __forceinline__ bool can_start() const { return shared_.rows_are_stored[~step_ % 2]; }
  /// The one taken last.
  __device__ __forceinline__ const WorkTile& taken() const {
    return shared_.tiles[(next_ - 1) % K::kTileSlots];
  }
  /// Goes on to the one behind it.
  __device__ __forceinline__ void take() {
    ++next_;
    state_ = State::kNone;
  }
  /// Drops a tile of the row pass, which has no operands: the next one takes its slot. Behind a
  /// barrier after it was read last.
  __device__ __forceinline__ void skip() { state_ = State::kNone; }

 private:
  enum class State : std::uint8_t { kNone, kAsked, kWritten, kThere };

  __device__ __forceinline__ bool rows_are_stored(const WorkTile& tile) const {
    return count_of_stored(p_, tile) >= count_needed<K>(p_, tile);
  }

  SharedMemory<K>& shared_;
  const FusedMlpParams& p_;
  unsigned step_ = 0, next_ = 0;
  State state_ = State::kNone;
  int index_ = 0;  // of the first thread
};

/// Accumulators -> rows.
template <typename K>
__device__ __forceinline__ void store_tile(SharedMemory<K>& shared, const FusedMlpParams& p,
                                           const WorkTile& tile, const WarpgroupCoords<K>& coords,
                                           const typename K::Accumulators& accumulators) {
  if constexpr (K::kHasPartials) {
#pragma unroll
    for (int i = 0; i < K::kAccumulators; ++i) {
      shared.partials[coords.k_group()][i][coords.thread()] = accumulators[0][i];
    }
    __syncthreads();
    if (coords.k_group() > 0) return;
  }
  const ScaleAndBias<K> factors = read_scale_and_bias(p.gemms[tile.gemm], tile, coords);
  store_results(shared, p, tile, coords, factors, [&](int chunk, Chunk<K>& values) {
    Sums<K> sums;
    if constexpr (K::kHasPartials) {
      read_partials(shared, chunk, sums);
    } else {
      read_accumulators<K>(accumulators, chunk, sums);
    }
#pragma unroll
    for (int i = 0; i < 4 * kEights<K>; ++i) values[i] = sums[i];  // int32 is rounded here alone
  });
}

/// Until the copies for this step are there: all but those of the last `stages` - 2 steps. A ring
/// has up to kStages.
template <int kStages>
__device__ __forceinline__ void wait_for_stage(int stages) {
  if constexpr (kStages > 2) {
    if (stages < kStages) return wait_for_stage<kStages - 1>(stages);
  }
  wait_for_copies<kStages - 2>();
}

/// K is a Kernel.
template <typename K>
__global__ void __launch_bounds__(K::kThreads, K::kBlocks)
    fused_mlp_kernel(const __grid_constant__ FusedMlpParams params) {
  extern __shared__ __align__(128) std::uint8_t memory[];
  auto& shared = *reinterpret_cast<SharedMemory<K>*>(memory);
  std::uint8_t* const ring = memory + ring_offset<K>(params);
  const WarpgroupCoords<K> coords{static_cast<int>(threadIdx.x) / 128};
  const int expert = read_expert(params);
  shared.tables.make(threadIdx.x, K::kThreads);
  wait_for_previous_launch();
  let_next_launch_begin();
  count_tiles(shared, params, expert);

  TileQueue<K> queue(shared, params);
  TileCopies<K> copies;
  typename K::Accumulators accumulators;
  unsigned copied = 0;      // of the stages on their way, bit 0: the one for this step has copies
  unsigned multiplied = 0;  // tiles so far
  int stages_left = 0;      // of the tile that is multiplied
  int num_tokens = 0;       // of it
  int step = 0;             // place of this step's copies in the ring
  int alike = 0;            // steps in which no tile begins, ends or is asked for
  bool is_last = false, was_prefetched = false;
  bool was_stored = false;  // a tile, in the step before
  queue.ask();
  while (true) {
    wait_for_stage<K::kTile.stages>(params.stages);
    __syncthreads();
    const bool is_alike = alike > 0;
    if (!is_alike) {
      if (was_stored && threadIdx.x == 0) {
        const WorkTile& tile = shared.tiles[(multiplied - 1) % K::kTileSlots];
        const int count = count_of<K>(params, tile);
        if (count > 0) count_stored(params, tile.token_tile, count);
      }
      was_stored = false;
      if (is_last && copied == 0) return;
      queue.advance();

      if (copies.stages_left() == 0 && !is_last) {
        if (const WorkTile* next = queue.next()) {
          if (next->gemm < 0) {
            is_last = true;
          } else if (is_row_pass<K>(*next)) {
            if constexpr (K::kHasRowPass) {
              if (queue.can_start()) {
                quantize_rows<K>(shared, params.pass.rows, *next, coords.warpgroup);
                __syncthreads();
                if (threadIdx.x == 0)
                  count_stored(params, next->token_tile, count_of<K>(params, *next));
                queue.skip();
                queue.ask();
              }
            }
          } else if (queue.can_start()) {
            copies.start(params, *next);
            queue.take();
            was_prefetched = false;
          } else if (!was_prefetched) {
            TileCopies<K>::prefetch(params, *next);
            was_prefetched = true;
          }
        }
      }
    }
    const bool copies_now = is_alike || copies.stages_left() > 0;
    if (copies_now) {
      copies.copy(params, queue.taken(), cute::cast_smem_ptr_to_uint(ring + step * K::kStageBytes));
    }
    commit_copies();

    step = step + 1 < params.stages ? step + 1 : 0;  // now that of the stage that has come
    if (is_alike || (copied & 1)) {
      int blocks = K::kDepth;
      if (!is_alike) {
        const WorkTile& tile = shared.tiles[multiplied % K::kTileSlots];
        if (stages_left == 0) {
          stages_left = num_stages<K>(tile);
          num_tokens = tile.num_tokens;
          prefetch_scale_and_bias<K>(params.gemms[tile.gemm], tile, coords);
#pragma unroll
          for (auto& of_block : accumulators) {
#pragma unroll
            for (auto& sum : of_block) sum = 0;
          }
        }
        const int done = (num_stages<K>(tile) - stages_left) * K::kStageBlocks;
        blocks = tile.k_end - tile.k_begin - done - coords.k_group() * K::kDepth;
      }
      multiply_stage<K>(shared.tables, ring + step * K::kStageBytes, blocks, num_tokens, coords,
                        accumulators);
      --stages_left;
      if (!is_alike && stages_left == 0) {
        store_tile(shared, params, shared.tiles[multiplied % K::kTileSlots], coords, accumulators);
        ++multiplied;
        was_stored = true;
      }
    } else if (is_last || copied == 0) {
      __nanosleep(20);  // for the rows of others
    }
    if (is_alike) {
      --alike;
      continue;
    }
    copied = copied >> 1 | (copies_now ? 1U << (params.stages - 2) : 0U);
    // The next tile is asked for, and known, while the last two stages are copied.
    if (copies_now && copies.stages_left() <= 2) queue.ask();
    const bool all_copied = copied == (2U << (params.stages - 2)) - 1;
    if (all_copied && !was_stored) alike = min(copies.stages_left() - 3, stages_left - 1);
  }
}

}  // namespace fusedmoe::cuda::sm80
