// Every step of core::Backend on the GPU against the CPU. Their sums are defined to the last bit,
// so all but the router is compared bit for bit.
#include "moe/backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "backend_cases.h"
#include "cuda/rows/rows.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "layer/backend.h"
#include "testing/cases.h"

namespace fusedmoe {
namespace {

using layer::backend_of;
using testing::BackendRows;
using testing::bitwise_equal;
using testing::compare;
using testing::kGpu;
using testing::kGpuStream;
using testing::kHost;
using testing::poison;
using testing::random_floats;
using testing::random_ids;
using testing::row_cases;
using testing::shifted_to_gpu;
using testing::to_gpu;
using testing::to_host;

/// Every third expert is remote, local ids run backwards; returns the number of local ones.
std::pair<Tensor, std::int64_t> make_map(std::int64_t num_experts) {
  Tensor map = Tensor::empty({num_experts}, DType::kI32);
  std::int64_t local = 0;
  for (std::int64_t e = num_experts - 1; e >= 0; --e) {
    map.as<std::int32_t>()[e] = e % 3 == 2 ? -1 : static_cast<std::int32_t>(local++);
  }
  return {map, local};
}

INSTANTIATE_TEST_SUITE_P(Rows, BackendRows, ::testing::ValuesIn(row_cases()));

TEST_P(BackendRows, WeightOnInput) {
  const Tensor x = random_floats(c_.dtype, shape_, 1);
  const Tensor weights = random_floats(DType::kF32, {c_.num_tokens, 1}, 2);
  const Tensor expected = poisoned(shape_), actual = gpu(poisoned(shape_));
  if (c_.num_tokens > 0) backend_of(kHost).weight_rows(x, weights, expected, {});
  backend_of(kGpu).weight_rows(gpu(x), to_gpu(weights), actual, kGpuStream);
  EXPECT_TRUE(bitwise_equal(to_host(actual), expected));
}

// Into what there is or over it; of one dtype, from f32 and to f32 with scales of which one is 0.
TEST_P(BackendRows, Add) {
  const Tensor scale = random_floats(DType::kF32, {c_.num_tokens, 1}, 5);
  if (c_.num_tokens > 2) scale.as<float>()[2] = 0;
  const Tensor gpu_scale = to_gpu(scale);
  for (const int kind : {0, 1, 2}) {
    const DType to = kind == 2 ? DType::kF32 : c_.dtype, from = kind == 1 ? DType::kF32 : c_.dtype;
    for (const bool accumulate : {false, true}) {
      const Tensor target = random_floats(to, shape_, 3), source = random_floats(from, shape_, 4);
      const Tensor actual = gpu(target), gpu_source = gpu(source);
      const auto either = [&](const Tensor& of) {
        return kind > 0 ? TensorView(of) : TensorView();
      };
      backend_of(kGpu).add({actual, gpu_source, either(gpu_scale), accumulate, kGpuStream});
      backend_of(kHost).add({target, source, either(scale), accumulate, {}});
      EXPECT_TRUE(bitwise_equal(to_host(actual), target)) << kind << accumulate;
    }
  }
}

/// Rows of slots that select nothing are NaN, here and on the GPU: they must be skipped.
TEST_P(BackendRows, ReduceOfSlotRows) {
  constexpr std::int64_t kTopk = 3, kExperts = 7;
  const auto [map, num_local] = make_map(kExperts);
  for (const bool weighted : {true, false}) {
    for (const bool with_map : {true, false}) {
      core::ReduceArgs host;
      const Tensor ids = random_ids(c_.num_tokens, kTopk, kExperts);
      const Tensor weights = random_floats(DType::kF32, {c_.num_tokens, kTopk}, 6);
      const Tensor rows = random_floats(c_.dtype, {c_.num_tokens * kTopk, c_.hidden}, 7);
      for (std::int64_t slot = 0; slot < ids.numel(); ++slot) {
        const std::int32_t id = ids.as<const std::int32_t>()[slot];
        if (id < 0 || (with_map && map.as<const std::int32_t>()[id] < 0)) {
          poison(rows.slice(0, slot, slot + 1));
        }
      }
      const Tensor expected = poisoned(shape_), actual = gpu(poisoned(shape_));
      host.output = expected;
      host.fused_output = rows;
      host.topk_ids = ids;
      host.topk_weights = weights;
      if (with_map) host.expert_map = map;
      host.num_local_experts = with_map ? num_local : kExperts;
      host.router_weight_on_input = !weighted;
      if (c_.num_tokens > 0) backend_of(kHost).reduce(host, {});

      const Tensor gpu_rows = gpu(rows), gpu_ids = to_gpu(ids), gpu_weights = to_gpu(weights);
      const Tensor gpu_map = to_gpu(map);
      core::ReduceArgs there = host;
      there.output = actual;
      there.fused_output = gpu_rows;
      there.topk_ids = gpu_ids;
      there.topk_weights = gpu_weights;
      if (with_map) there.expert_map = gpu_map;
      there.stream = kGpuStream;
      backend_of(kGpu).reduce(there, {});
      EXPECT_TRUE(bitwise_equal(to_host(actual), expected)) << weighted << with_map;
    }
  }
}

/// f32 output, an output that is added to, and rows with gaps: the sum of slots in f32 on the CPU,
/// then what is defined for each.
TEST_P(BackendRows, ReduceToOtherOutputs) {
  constexpr std::int64_t kTopk = 3, kExperts = 7;
  const Tensor ids = random_ids(c_.num_tokens, kTopk, kExperts);
  const Tensor weights = random_floats(DType::kF32, {c_.num_tokens, kTopk}, 6);
  const Tensor rows = random_floats(c_.dtype, {c_.num_tokens * kTopk, c_.hidden}, 7);
  const Tensor gpu_rows = gpu(rows), gpu_ids = to_gpu(ids), gpu_weights = to_gpu(weights);
  for (const DType dtype : {c_.dtype, DType::kF32}) {
    for (const bool accumulate : {false, true}) {
      const Tensor wide = random_floats(dtype, {c_.num_tokens, c_.hidden + 16 + c_.offset}, 8);
      const Tensor memory = to_gpu(wide);
      core::ReduceArgs args;
      args.output = memory.slice(1, c_.offset, c_.offset + c_.hidden);
      args.fused_output = gpu_rows;
      args.topk_ids = gpu_ids;
      args.topk_weights = gpu_weights;
      args.num_local_experts = kExperts;
      args.stream = kGpuStream;
      args.accumulate = accumulate;
      cuda::reduce_rows(args, {});
      for (std::int64_t token = 0; token < c_.num_tokens; ++token) {
        for (std::int64_t column = 0; column < c_.hidden; ++column) {
          float sum = 0;
          for (std::int64_t slot = token * kTopk; slot < (token + 1) * kTopk; ++slot) {
            if (ids.as<const std::int32_t>()[slot] < 0) continue;
            const float product = weights.as<const float>()[slot] *
                                  load_f32(rows.data(), c_.dtype, slot * c_.hidden + column);
            sum += product;
          }
          const std::int64_t index = token * wide.size(1) + c_.offset + column;
          if (accumulate) sum += load_f32(wide.data(), dtype, index);
          store_f32(wide.data(), dtype, index, sum);
        }
      }
      EXPECT_TRUE(bitwise_equal(to_host(memory), wide)) << name(dtype) << accumulate;
    }
  }
}

/// Rows of the input with gaps between them.
TEST_P(BackendRows, WeightAndDispatchOfStridedRows) {
  if (c_.num_tokens < 2) return;  // one row has no stride
  const Tensor wide = random_floats(c_.dtype, {c_.num_tokens, c_.hidden + 8}, 19);
  const Tensor x = random_floats(c_.dtype, shape_, 20);
  for (std::int64_t token = 0; token < c_.num_tokens; ++token) {
    std::memcpy(x.as<char>() + bytes(c_.dtype, token * c_.hidden),
                wide.as<char>() + bytes(c_.dtype, token * wide.size(1)),
                static_cast<std::size_t>(bytes(c_.dtype, c_.hidden)));
  }
  const Tensor memory = gpu(wide);
  const TensorView strided = memory.slice(1, 0, c_.hidden);
  const Tensor weights = random_floats(DType::kF32, {c_.num_tokens, 1}, 2);
  const Tensor expected = poisoned(shape_), actual = gpu(poisoned(shape_));
  backend_of(kHost).weight_rows(x, weights, expected, {});
  backend_of(kGpu).weight_rows(strided, to_gpu(weights), actual, kGpuStream);
  EXPECT_TRUE(bitwise_equal(to_host(actual), expected));

  const Tensor ids = random_ids(c_.num_tokens, 2, 4),
               slot_rows = Tensor::zeros(ids.shape(), DType::kI32);
  backend_of(kHost).assign_rows(ids, {}, {slot_rows, Tensor::zeros({4}, DType::kI32)}, {});
  const Tensor dispatched = poisoned({4, c_.num_tokens, c_.hidden}), there = gpu(dispatched);
  backend_of(kHost).copy_to_slots(slot_rows, x, dispatched, {});
  backend_of(kGpu).copy_to_slots(to_gpu(slot_rows), strided, there, kGpuStream);
  EXPECT_TRUE(bitwise_equal(to_host(there), dispatched));
}

/// To the batched format and back: assignment and rows bit for bit, and what nobody owns untouched.
TEST_P(BackendRows, AssignDispatchReduceBatched) {
  constexpr std::int64_t kTopk = 4, kExperts = 9;
  const auto [map, num_local] = make_map(kExperts);
  const Tensor ids = random_ids(c_.num_tokens, kTopk, kExperts);
  const Tensor weights = random_floats(DType::kF32, {c_.num_tokens, kTopk}, 8);
  const Tensor x = random_floats(c_.dtype, shape_, 9);
  const Shape batched{num_local, c_.num_tokens, c_.hidden};
  const auto run = [&](Device device) {
    const Stream stream{device};
    const core::Backend& backend = backend_of(device);
    const auto there = [&](const Tensor& tensor) {
      return device.is_cpu() ? tensor : shifted_to_gpu(tensor, c_.offset);
    };
    const Tensor slot_rows = to_device(Tensor::zeros(ids.shape(), DType::kI32), device);
    const Tensor counts = Tensor::zeros({num_local}, DType::kI32, device);
    const Tensor rows = there(poisoned(batched)), output = there(poisoned(shape_));
    const Tensor ids_there = to_device(ids, device), map_there = to_device(map, device);
    const Tensor weights_there = to_device(weights, device);
    backend.assign_rows(ids_there, map_there, {slot_rows, counts}, stream);
    backend.copy_to_slots(slot_rows, there(x), rows, stream);
    core::ReduceArgs args;
    args.output = output;
    args.fused_output = rows;
    args.topk_ids = ids_there;
    args.topk_weights = weights_there;
    args.expert_map = map_there;
    args.num_local_experts = num_local;
    args.stream = stream;
    backend.reduce(args, slot_rows);
    return std::vector<Tensor>{to_host(slot_rows), to_host(counts), to_host(rows), to_host(output)};
  };
  const std::vector<Tensor> expected = run(kHost), actual = run(kGpu);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(bitwise_equal(actual[i], expected[i])) << "result " << i;
  }
}

using BackendTest = testing::CudaTest;

TEST_F(BackendTest, AssignManySlots) {
  for (const auto& [num_tokens, topk, num_experts] :
       std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>{{0, 2, 4},
                                                                         {1, 1, 1},
                                                                         {129, 8, 256},
                                                                         {256, 8, 64},
                                                                         {257, 8, 64},
                                                                         {20000, 8, 64},
                                                                         {511, 1, 2}}) {
    const Tensor ids = random_ids(num_tokens, topk, num_experts);
    const Tensor slot_rows = Tensor::zeros(ids.shape(), DType::kI32);
    const Tensor counts = Tensor::zeros({num_experts}, DType::kI32);
    const Tensor gpu_rows = to_gpu(slot_rows), gpu_counts = to_gpu(counts);
    backend_of(kHost).assign_rows(ids, {}, {slot_rows, counts}, {});
    backend_of(kGpu).assign_rows(to_gpu(ids), {}, {gpu_rows, gpu_counts}, kGpuStream);
    EXPECT_TRUE(bitwise_equal(to_host(gpu_rows), slot_rows)) << num_tokens;
    EXPECT_TRUE(bitwise_equal(to_host(gpu_counts), counts)) << num_tokens;
  }
}

/// What the CPU refuses must not reach memory that is not ours: one row per token and expert.
TEST_F(BackendTest, AssignKeepsTheFirstOfDuplicatesAndIgnoresIdsOutOfRange) {
  const Tensor ids = Tensor::empty({3, 4}, DType::kI32);
  const std::vector<std::int32_t> values{1, 1, 0, 1, 7, -5, 2, 2, 0, 1, 3, 2147483647};
  std::memcpy(ids.data(), values.data(), values.size() * sizeof(std::int32_t));
  const Tensor slot_rows = Tensor::zeros({3, 4}, DType::kI32, kGpu);
  const Tensor counts = Tensor::zeros({3}, DType::kI32, kGpu);
  backend_of(kGpu).assign_rows(to_gpu(ids), {}, {slot_rows, counts}, kGpuStream);
  const Tensor rows = to_host(slot_rows), host_counts = to_host(counts);
  // Rows of expert e begin at 3 e.
  const std::vector<std::int32_t> expected{3, -1, 0, -1, -1, -1, 6, -1, 1, 4, -1, -1};
  EXPECT_EQ(std::vector<std::int32_t>(rows.as<std::int32_t>(), rows.as<std::int32_t>() + 12),
            expected);
  const auto* count = host_counts.as<const std::int32_t>();
  EXPECT_EQ(std::vector<std::int32_t>(count, count + 3), (std::vector<std::int32_t>{2, 2, 1}));
}

/// Scales of quantized rows travel like rows: any dtype, any width.
TEST_F(BackendTest, DispatchOfBytes) {
  for (const std::int64_t width : {1, 2, 3, 4, 16, 17, 2048}) {
    const Tensor ids = random_ids(50, 2, 4);
    const Tensor slot_rows = Tensor::zeros(ids.shape(), DType::kI32);
    backend_of(kHost).assign_rows(ids, {}, {slot_rows, Tensor::zeros({4}, DType::kI32)}, {});
    const Tensor x = Tensor::empty({50, width}, DType::kU8);
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      x.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(i * 31);
    }
    const Tensor expected = Tensor::zeros({4, 50, width}, DType::kU8);
    const Tensor actual = to_gpu(expected);
    backend_of(kHost).copy_to_slots(slot_rows, x, expected, {});
    backend_of(kGpu).copy_to_slots(to_gpu(slot_rows), to_gpu(x), actual, kGpuStream);
    EXPECT_TRUE(bitwise_equal(to_host(actual), expected)) << width;
  }
}

TEST_F(BackendTest, RoutingOfSharedExperts) {
  for (const bool gated : {false, true}) {
    const Tensor weights = random_floats(DType::kF32, {1000, 1}, 10);
    weights.as<float>()[0] = -200;
    weights.as<float>()[1] = 200;
    weights.as<float>()[2] = std::numeric_limits<float>::quiet_NaN();
    const Tensor ids = Tensor::empty({1000, 1}, DType::kI32);
    poison(ids);
    const Tensor gpu_weights = to_gpu(weights), gpu_ids = to_gpu(ids);
    backend_of(kGpu).route_shared({gpu_ids, gpu_weights}, gated, kGpuStream);
    backend_of(kHost).route_shared({ids, weights}, gated, {});
    EXPECT_TRUE(bitwise_equal(to_host(gpu_ids), ids));
    // Both in double; the last bit of exp may differ, which rounding to fp32 hides but at ties.
    const testing::Difference difference = compare(to_host(gpu_weights), weights);
    EXPECT_FALSE(difference.nonfinite_mismatch);
    EXPECT_LE(difference.max_element, 1e-7) << difference.to_string();
  }
}

TEST_F(BackendTest, RouterLogits) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::int64_t num_tokens : {1, 7, 130}) {
      const Tensor x = random_floats(dtype, {num_tokens, 720}, 11);
      const RouterWeights weights{
          random_floats(DType::kBF16, {33, 720}, 12), random_floats(DType::kF32, {33}, 13), {}};
      const RouterWeights there{to_gpu(weights.weight), to_gpu(weights.bias), {}};
      const Tensor expected = Tensor::empty({num_tokens, 33}, DType::kF32);
      const Tensor actual = to_gpu(expected);
      backend_of(kHost).router_logits(weights, x, expected, {});
      backend_of(kGpu).router_logits(there, to_gpu(x), actual, kGpuStream);
      // 720 fp32 products summed in another order: 720 * 2^-24 = 4.3e-5 is the bound of the worst
      // case, its square root 1.6e-6 what is to be expected.
      const testing::Difference difference = compare(to_host(actual), expected);
      EXPECT_LE(difference.max_element, 1e-5) << difference.to_string();
    }
  }
}

TEST_F(BackendTest, Route) {
  RouterConfig config;
  config.num_experts = 64;
  config.topk = 6;
  config.scoring = ScoringFunc::kSigmoid;
  config.renormalize = true;
  config.num_expert_group = 8;
  config.topk_group = 3;
  config.routed_scaling_factor = 2.5f;
  const Tensor logits = random_floats(DType::kF32, {257, 64}, 14);
  const Tensor bias = random_floats(DType::kF32, {64}, 15);
  const Tensor ids = Tensor::zeros({257, 6}, DType::kI32);
  const Tensor weights = Tensor::zeros({257, 6}, DType::kF32);
  const Tensor gpu_ids = to_gpu(ids), gpu_weights = to_gpu(weights);
  const Tensor load = Tensor::zeros({64}, DType::kI32), gpu_load = to_gpu(load);
  for (int i = 0; i < 2; ++i) {  // tokens are added to the load
    backend_of(kHost).route(config, logits, bias, {ids, weights}, load, {});
    backend_of(kGpu).route(config, to_gpu(logits), to_gpu(bias), {gpu_ids, gpu_weights}, gpu_load,
                           kGpuStream);
  }
  EXPECT_TRUE(bitwise_equal(to_host(gpu_ids), ids));
  EXPECT_TRUE(bitwise_equal(to_host(gpu_load), load));
  EXPECT_LE(compare(to_host(gpu_weights), weights).max_element, 1e-6);
}

TEST_F(BackendTest, WhatRunsOnTheCpuOnlyIsAnError) {
  const Tensor x = Tensor::zeros({2, 64}, DType::kBF16, kGpu);
  EXPECT_THROW(backend_of(kGpu).quantize(x, keys::int8_row(true), {}, x, x, kGpuStream), Error);
  EXPECT_THROW(backend_of(kGpu).dequantize(x, x, keys::nvfp4(true), x, kGpuStream), Error);
  RouterConfig config;
  config.num_experts = 4;
  config.topk = 1;
  config.custom = [](const TensorView&, const TensorView&, const TensorView&) {};
  const Tensor logits = Tensor::zeros({2, 4}, DType::kF32, kGpu);
  const Tensor ids = Tensor::zeros({2, 1}, DType::kI32, kGpu);
  const Tensor weights = Tensor::zeros({2, 1}, DType::kF32, kGpu);
  EXPECT_THROW(backend_of(kGpu).route(config, logits, {}, {ids, weights}, {}, kGpuStream), Error);
}

/// A kernel must not start before the one that wrote its input is done, nor overwrite what the one
/// before still reads: a long chain of small steps, again and again.
TEST_F(BackendTest, StepsOfAStreamAreInOrder) {
  const Shape shape{64, 2880};
  const Tensor x = random_floats(DType::kF32, shape, 16),
               one = random_floats(DType::kF32, shape, 17);
  const Tensor weights = random_floats(DType::kF32, {64, 1}, 18);
  const auto chain = [&](Device device) {
    const core::Backend& backend = backend_of(device);
    const Stream stream{device};
    const Tensor a = Tensor::empty(shape, DType::kF32, device);
    const Tensor b = Tensor::empty(shape, DType::kF32, device);
    const Tensor step = to_device(one, device), factors = to_device(weights, device);
    copy(x, a, stream);
    for (int i = 0; i < 50; ++i) {
      backend.weight_rows(a, factors, b, stream);
      backend.add({.target = b, .source = step, .stream = stream});
      copy(b, a, stream);
      backend.add({.target = a, .source = b, .stream = stream});
      backend.weight_rows(a, factors, b, stream);
      copy(b, a, stream);
      if (i % 5 == 4) copy(step, a, stream);  // keeps the numbers small
    }
    return to_host(a);
  };
  EXPECT_TRUE(bitwise_equal(chain(kGpu), chain(kHost)));
}

}  // namespace
}  // namespace fusedmoe
