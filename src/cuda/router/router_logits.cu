// The router's first half as a kernel of its own, for any number of tokens; what it
// computes: logits_tile.cuh.
#include "cuda/device/launch.h"
#include "cuda/device/overlap.cuh"
#include "cuda/router/logits_tile.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = kSlices * kWarpSize;

/// Grid: the tiles, experts first. Warp w computes slice w of K.
template <typename X, typename W, typename Shape>
__global__ void __launch_bounds__(kThreads)
    router_logits_kernel(const LogitsParams p, int expert_blocks, int aligned_chunks) {
  extern __shared__ float partial[];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int first_expert = static_cast<int>(blockIdx.x) % expert_blocks * Shape::kNumExperts;
  const std::int64_t first_token =
      static_cast<std::int64_t>(static_cast<int>(blockIdx.x) / expert_blocks) * Shape::kNumTokens;
  const int num_chunks = (p.hidden + kChunk - 1) / kChunk;
  const int slice_chunks = (num_chunks + kSlices - 1) / kSlices;
  const int begin = min(warp * slice_chunks, num_chunks);
  const int end = min(begin + slice_chunks, num_chunks);
  const LaneRows<X, W, Shape> rows(p, first_token, first_expert, lane);

  let_next_launch_begin();
  if constexpr (Shape::kTokenTiles == 1) {
    prefetch_weights(rows, begin, min(end, p.hidden / kChunk), lane);
    if (threadIdx.x == 0 && p.bias.data) prefetch_l2(address(p.bias, first_expert));
  }
  wait_for_previous_launch();
  Accumulators<X, W, Shape> accumulators = {};
  multiply_slice<X, W, Shape>(rows, begin, end, aligned_chunks, p.hidden, accumulators);

  store_accumulators<X, W, Shape>(accumulators, partial + warp * Shape::kNumTokens * Shape::kPitch,
                                  lane);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kNumTokens * Shape::kNumExperts;
       i += kThreads) {
    const int row = i / Shape::kNumExperts, column = i % Shape::kNumExperts;
    const std::int64_t token = first_token + row;
    const int expert = first_expert + column;
    if (token >= p.num_tokens || expert >= p.num_experts) continue;
    p.logits[token * p.num_experts + expert] = add_slices<Shape>(p, partial, row, column, expert);
  }
}

// ---------------------------------------------------------------------------------------------

std::int64_t num_blocks(const LogitsParams& p, std::int64_t tokens, std::int64_t experts) {
  return (p.num_tokens + tokens - 1) / tokens * ((p.num_experts + experts - 1) / experts);
}

template <typename X, typename W, typename Shape>
void launch_tiles(const LogitsParams& p, Stream stream) {
  const std::int64_t blocks = num_blocks(p, Shape::kNumTokens, Shape::kNumExperts);
  const int expert_blocks = (p.num_experts + Shape::kNumExperts - 1) / Shape::kNumExperts;
  launch(router_logits_kernel<X, W, Shape>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
         Shape::kSharedBytes, stream, false, p, expert_blocks, aligned_chunks<X, W>(p));
}

/// Larger tiles read less and so are chosen as soon as they fill 3/4 of the multiprocessors; a
/// middle one at 1/4, because many small ones are bound by the L2 cache.
template <typename X, typename W>
void launch_pair(const LogitsParams& p, Stream stream) {
  const int eighth = multiprocessor_count(stream.device) / 8;
  if constexpr (kPieces<X> * kPieces<W> == 1) {
    if (p.num_experts > 32 && num_blocks(p, 64, 64) >= 6 * eighth) {
      launch_tiles<X, W, Tile<64, 64, 1>>(p, stream);
      return;
    }
  }
  if (num_blocks(p, 32, 32) >= 2 * eighth) {
    launch_tiles<X, W, Tile<32, 32, kPieces<X> * kPieces<W> == 1 ? 2 : 1>>(p, stream);
  } else {
    launch_tiles<X, W, Tile<16, 8, kPieces<X> * kPieces<W> == 1 ? 6 : 2>>(p, stream);
  }
}

}  // namespace

void launch_router_logits(const LogitsParams& params, Stream stream) {
  with_element(params.x.dtype, [&](auto x) {
    with_element(params.weight.dtype,
                 [&](auto weight) { launch_pair<decltype(x), decltype(weight)>(params, stream); });
  });
}

}  // namespace fusedmoe::cuda
