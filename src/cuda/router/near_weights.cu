// The weights of kSparsemixer (PhiMoE): from a token's logits and the ids chosen by them. A launch
// of its own behind top-k, whose kernels have no registers left.
#include "cuda/device/launch.h"
#include "cuda/router/route_token.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kWarps = 4;  // of a block: tokens

/// Sum of exp(x - largest) over the experts near `largest` but those in slots before j.
template <typename Logit>
__device__ double sum_near(const RouteParams& p, const Logit* row, const std::int32_t* ids, int j,
                           float largest, int lane) {
  double sum = 0;
  for (int e = lane; e < p.num_experts; e += kWarpSize) {
    const float x = finite_or(to_f32(row[e]), -kInfinity);
    bool counts = x != -kInfinity;
    for (int before = 0; before < j; ++before) counts &= ids[before] != e;
    const float distance = (largest - x) / fmaxf(fabsf(x), largest);
    if (counts && !(distance > 2 * p.sparsemixer_jitter)) sum += exp_rounded(x - largest);
  }
  return warp_sum(sum);
}

template <typename Logit>
__global__ __launch_bounds__(kWarps* kWarpSize) void near_weights_kernel(const RouteParams p) {
  order_after_previous();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const std::int64_t token =
      static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (token >= p.num_tokens) return;
  const auto* row = static_cast<const Logit*>(p.logits.data) + token * p.num_experts;
  const std::int32_t* ids = p.ids + token * p.topk;
  float weights[kSlotsPerLane];
#pragma unroll
  for (int part = 0; part < kSlotsPerLane; ++part) {
    weights[part] = -kInfinity;
    for (int j = part * kWarpSize; j < min(p.topk, (part + 1) * kWarpSize); ++j) {
      const float largest = finite_or(to_f32(row[ids[j]]), -kInfinity);
      const double sum = sum_near(p, row, ids, j, largest, lane);
      const float weight = largest == -kInfinity ? 0.0f : static_cast<float>(1 / sum);
      if (lane == j % kWarpSize) weights[part] = weight;
    }
  }
  compute_weights(p, weights);
#pragma unroll
  for (int part = 0; part < kSlotsPerLane; ++part) {
    const int slot = part * kWarpSize + lane;
    if (slot < p.topk) p.weights[token * p.topk + slot] = weights[part];
  }
}

}  // namespace

void launch_near_weights(const RouteParams& params, Stream stream) {
  const std::int64_t blocks = (params.num_tokens + kWarps - 1) / kWarps;
  dispatch_storage(params.logits.dtype, [&](auto logit) {
    launch(near_weights_kernel<decltype(logit)>, dim3(static_cast<unsigned>(blocks)),
           dim3(kWarps * kWarpSize), 0, stream, true, params);
  });
}

}  // namespace fusedmoe::cuda
