// Element by element: the router weight on the input, the sum with shared experts, their routing.
#include "cuda/device/launch.h"
#include "cuda/rows/element.cuh"
#include "cuda/rows/rows.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 256;

/// Blocks that give every one of `count` threads its work.
dim3 flat_grid(std::int64_t count) {
  return dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads));
}

__device__ std::int64_t flat_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

/// Block (token, chunk of columns); weighted = rnd(x * rnd(weight)).
template <typename Storage, int kWidth>
__global__ __launch_bounds__(kRowThreads) void weight_rows_kernel(const Storage* x,
                                                                  const float* topk_weights,
                                                                  Storage* weighted,
                                                                  std::int64_t hidden,
                                                                  std::int64_t x_stride) {
  order_after_previous();
  const std::int64_t token = blockIdx.x, column = row_access() * kWidth;
  if (column >= hidden) return;
  const float weight = to_f32(from_f32<Storage>(topk_weights[token]));
  auto pack = Pack<Storage, kWidth>::load(x + token * x_stride + column);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    pack.values[i] = from_f32<Storage>(__fmul_rn(to_f32(pack.values[i]), weight));
  }
  pack.store(weighted + token * hidden + column);
}

/// Block (token, chunk of columns); target = rnd(target + source).
template <typename Storage, int kWidth>
__global__ __launch_bounds__(kRowThreads) void add_rows_kernel(Storage* target,
                                                               const Storage* source,
                                                               std::int64_t hidden,
                                                               std::int64_t target_stride) {
  order_after_previous();
  const std::int64_t token = blockIdx.x, column = row_access() * kWidth;
  if (column >= hidden) return;
  Storage* to = target + token * target_stride + column;
  auto sum = Pack<Storage, kWidth>::load(to);
  const auto addend = Pack<Storage, kWidth>::load(source + token * hidden + column);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    sum.values[i] = from_f32<Storage>(__fadd_rn(to_f32(sum.values[i]), to_f32(addend.values[i])));
  }
  sum.store(to);
}

/// Weights hold the logits of the gate, if there is one.
__global__ __launch_bounds__(kThreads) void route_shared_kernel(std::int32_t* ids, float* weights,
                                                                std::int64_t num_tokens,
                                                                bool gated) {
  order_after_previous();
  const std::int64_t token = flat_thread();
  if (token >= num_tokens) return;
  ids[token] = 0;
  const auto logit = gated ? static_cast<double>(weights[token]) : 0.0;
  weights[token] = gated ? static_cast<float>(1 / (1 + exp(-logit))) : 1.0f;
}

}  // namespace

void weight_rows(const TensorView& x, const TensorView& topk_weights, const TensorView& weighted,
                 Stream stream) {
  if (x.numel() == 0) return;
  const std::int64_t num_tokens = x.size(0), hidden = x.size(1);
  dispatch_storage(x.dtype(), [&](auto element) {
    using Storage = decltype(element);
    dispatch_width<Storage>(
        hidden,
        [&](auto width) {
          constexpr int kWidth = decltype(width)::value;
          launch(weight_rows_kernel<Storage, kWidth>, row_grid(num_tokens, hidden / kWidth),
                 kRowThreads, 0, stream, false, x.as<const Storage>(),
                 topk_weights.as<const float>(), weighted.as<Storage>(), hidden, x.stride(0));
        },
        x.data(), x.as<const Storage>() + x.stride(0), weighted.data());
  });
}

void add_rows(const TensorView& target, const TensorView& source, Stream stream) {
  if (target.numel() == 0) return;
  const std::int64_t num_tokens = target.size(0), hidden = target.size(1);
  dispatch_storage(target.dtype(), [&](auto element) {
    using Storage = decltype(element);
    dispatch_width<Storage>(
        hidden,
        [&](auto width) {
          constexpr int kWidth = decltype(width)::value;
          launch(add_rows_kernel<Storage, kWidth>, row_grid(num_tokens, hidden / kWidth),
                 kRowThreads, 0, stream, true, target.as<Storage>(), source.as<const Storage>(),
                 hidden, target.stride(0));
        },
        target.data(), target.as<const Storage>() + target.stride(0), source.data());
  });
}

void route_shared(const Routing& out, bool gated, Stream stream) {
  const std::int64_t num_tokens = out.topk_ids.numel();
  if (num_tokens == 0) return;
  launch(route_shared_kernel, flat_grid(num_tokens), kThreads, 0, stream, false,
         out.topk_ids.as<std::int32_t>(), out.topk_weights.as<float>(), num_tokens, gated);
}

}  // namespace fusedmoe::cuda
