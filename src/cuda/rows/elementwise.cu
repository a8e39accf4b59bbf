// Element by element: the router weight on the input, sums with shared and zero experts, their
// routing, the load of given routing.
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

template <typename Target, typename Source>
struct AddRowsParams {
  Target* target;
  const Source* source;
  const float* scale;  // or null
  std::int64_t columns, target_stride, source_stride;
  bool accumulate;
};

/// Block (token, chunk of columns); target = rnd(target + scale * source).
template <typename Target, typename Source, int kWidth>
__global__ __launch_bounds__(kRowThreads) void add_rows_kernel(
    const AddRowsParams<Target, Source> p) {
  order_after_previous();
  const std::int64_t token = blockIdx.x, column = row_access() * kWidth;
  if (column >= p.columns) return;
  Target* to = p.target + token * p.target_stride + column;
  const float scale = p.scale ? p.scale[token] : 1.0f;
  const auto addend = Pack<Source, kWidth>::load(p.source + token * p.source_stride + column);
  float sums[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    sums[i] = scale == 0 ? 0.0f : __fmul_rn(scale, to_f32(addend.values[i]));
  }
  store_sums(sums, to, p.accumulate);
}

/// A thread for each token.
__global__ __launch_bounds__(kThreads) void split_zero_experts_kernel(
    const std::int32_t* ids, const float* weights, std::int32_t* expert_ids, float* zero_weights,
    std::int64_t num_tokens, std::int64_t topk, std::int64_t num_experts,
    std::int64_t num_choices) {
  order_after_previous();
  const std::int64_t token = flat_thread();
  if (token >= num_tokens) return;
  float sum = 0;
  for (std::int64_t slot = token * topk; slot < (token + 1) * topk; ++slot) {
    const std::int32_t id = ids[slot];
    expert_ids[slot] = id < num_experts ? id : -1;
    if (id >= num_experts && id < num_choices) sum += weights[slot];
  }
  zero_weights[token] = sum;
}

/// A thread for each slot.
__global__ __launch_bounds__(kThreads) void count_choices_kernel(const std::int32_t* ids,
                                                                 std::int32_t* load,
                                                                 std::int64_t num_slots,
                                                                 std::int64_t num_choices) {
  order_after_previous();
  const std::int64_t slot = flat_thread();
  if (slot >= num_slots) return;
  const std::int32_t id = ids[slot];
  if (id >= 0 && id < num_choices) atomicAdd(load + id, 1);
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

void add_rows(const core::AddArgs& args) {
  const TensorView &target = args.target, &source = args.source;
  if (target.numel() == 0) return;
  const std::int64_t num_tokens = target.size(0), columns = target.size(1);
  dispatch_row_and_output(source.dtype(), target.dtype(), [&](auto from, auto to) {
    using Source = decltype(from);
    using Target = decltype(to);
    const AddRowsParams<Target, Source> params{
        .target = target.as<Target>(),
        .source = source.as<const Source>(),
        .scale = args.scale ? args.scale.as<const float>() : nullptr,
        .columns = columns,
        .target_stride = target.stride(0),
        .source_stride = source.stride(0),
        .accumulate = args.accumulate};
    using Wide = std::conditional_t<(sizeof(Source) > sizeof(Target)), Source, Target>;
    dispatch_width<Wide>(
        columns,
        [&](auto width) {
          constexpr int kWidth = decltype(width)::value;
          launch(add_rows_kernel<Target, Source, kWidth>, row_grid(num_tokens, columns / kWidth),
                 kRowThreads, 0, args.stream, true, params);
        },
        params.target, params.target + params.target_stride, params.source,
        params.source + params.source_stride);
  });
}

void split_zero_experts(const core::ZeroExpertsSplit& split, Stream stream) {
  const std::int64_t num_tokens = split.expert_ids.size(0), topk = split.expert_ids.size(1);
  if (num_tokens == 0) return;
  // What comes before may be the caller's: no overlap.
  launch(split_zero_experts_kernel, flat_grid(num_tokens), kThreads, 0, stream, false,
         split.routing.topk_ids.as<const std::int32_t>(),
         split.routing.topk_weights.as<const float>(), split.expert_ids.as<std::int32_t>(),
         split.zero_weights.as<float>(), num_tokens, topk, split.num_experts, split.num_choices);
}

void count_choices(const TensorView& topk_ids, const TensorView& expert_load, Stream stream) {
  const std::int64_t num_slots = topk_ids.numel();
  if (num_slots == 0) return;
  launch(count_choices_kernel, flat_grid(num_slots), kThreads, 0, stream, false,
         topk_ids.as<const std::int32_t>(), expert_load.as<std::int32_t>(), num_slots,
         expert_load.numel());
}

void route_shared(const Routing& out, bool gated, Stream stream) {
  const std::int64_t num_tokens = out.topk_ids.numel();
  if (num_tokens == 0) return;
  launch(route_shared_kernel, flat_grid(num_tokens), kThreads, 0, stream, false,
         out.topk_ids.as<std::int32_t>(), out.topk_weights.as<float>(), num_tokens, gated);
}

}  // namespace fusedmoe::cuda
