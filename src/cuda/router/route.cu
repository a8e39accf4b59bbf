// The router's second half as a kernel of its own, for any number of tokens, and the
// histogram of the ids.
#include "cuda/device/cp_async.cuh"
#include "cuda/device/launch.h"
#include "cuda/device/overlap.cuh"
#include "cuda/router/route_token.cuh"

namespace fusedmoe::cuda {
namespace {

/// Shared memory: counts (num_experts) if any, then per warp keys (num_experts + num_groups).
/// Blocks add their histograms to what is there.
template <typename Logit>
__global__ void __launch_bounds__(1024) route_kernel(const RouteParams p) {
  extern __shared__ std::uint32_t shared[];
  const int num_threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int num_warps = num_threads / kWarpSize, warp = thread / kWarpSize;
  auto* counts = p.counts ? reinterpret_cast<std::int32_t*>(shared) : nullptr;
  std::uint32_t* keys =
      shared + (p.counts ? p.num_experts : 0) + warp * (p.num_experts + p.num_groups);
  if (counts) {
    for (int e = thread; e < p.num_experts; e += num_threads) counts[e] = 0;
    __syncthreads();
  }
  let_next_launch_begin();
  if (p.bias) {
    for (int e = thread * kWarpSize; e < p.num_experts; e += num_threads * kWarpSize) {
      prefetch_l2(p.bias + e);
    }
  }
  wait_for_previous_launch();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * num_warps;
  for (std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * num_warps + warp;
       token < p.num_tokens; token += step) {
    const auto* row = static_cast<const Logit*>(p.logits.data) + token * p.num_experts;
    route_token(p, row, p.ids + token * p.topk, p.weights + token * p.topk, keys, counts);
  }
  if (!counts) return;
  __syncthreads();
  for (int e = thread; e < p.num_experts; e += num_threads) {
    if (counts[e] > 0) atomicAdd(p.counts + e, counts[e]);
  }
}

}  // namespace

bool is_route_kernel(const void* function) {
  const auto is_of = [&](auto logit) {
    return function == reinterpret_cast<const void*>(route_kernel<decltype(logit)>);
  };
  return is_of(float{}) || is_of(__nv_bfloat16{}) || is_of(__half{});
}

void launch_route(const RouteParams& params, const RouteLaunch& shape, Stream stream) {
  dispatch_storage(params.logits.dtype, [&](auto logit) {
    launch(route_kernel<decltype(logit)>, dim3(static_cast<unsigned>(shape.blocks)),
           dim3(static_cast<unsigned>(shape.warps * kWarpSize)),
           static_cast<std::size_t>(shape.shared_bytes), stream, false, params);
  });
}

}  // namespace fusedmoe::cuda
