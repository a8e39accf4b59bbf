// Injection points of unfused experts: what callbacks see, what they may change, and LoRA through
// them against merged weights.
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../examples/lora.h"
#include "fusedmoe/layer.h"
#include "layer_problem.h"
#include "testing/compare.h"

namespace fusedmoe::hooks_test {

using testing::bitwise_equal;
using testing::compare;
using testing::layer_options;
using testing::LayerSpec;
using testing::make_hidden_states;
using testing::make_layer_weights;

Tensor run(const MoeLayer& layer, const Tensor& x, const ExpertsHooks* hooks = nullptr,
           Stream stream = {}) {
  Tensor output = Tensor::empty(x.shape(), x.dtype());
  testing::poison(output);
  const std::size_t bytes = layer.workspace_bytes(x.size(0));
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  layer.forward(x, output, {workspace.data(), bytes}, {.hooks = hooks, .stream = stream});
  return output;
}

class UnfusedExperts : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Hooks, UnfusedExperts,
                         ::testing::Values("cpu_unfused", "reference_unfused"),
                         [](const auto& info) { return info.param; });

TEST_P(UnfusedExperts, WithoutCallbacksTheyAgreeWithFusedOnes) {
  LayerSpec spec;
  spec.experts.bias = true;
  spec.shared_experts = true;
  const MoeLayer fused(make_layer_weights(spec), layer_options(DType::kF32, "reference"));
  const MoeLayer unfused(make_layer_weights(spec), layer_options(DType::kF32, GetParam()));
  const Tensor x = make_hidden_states(DType::kF32, 9, 64);
  const Tensor actual = run(unfused, x);
  // f32 sums, and both GEMMs' outputs rounded to f32.
  EXPECT_LE(compare(actual, run(fused, x)).max_norm_relative, 1e-5);
  const ExpertsHooks none;
  EXPECT_TRUE(bitwise_equal(run(unfused, x, &none), actual));
}

TEST_P(UnfusedExperts, CallbacksSeeEveryStepOnce) {
  LayerSpec spec;
  const MoeLayer layer(make_layer_weights(spec), layer_options(DType::kBF16, GetParam()));
  const Tensor x = make_hidden_states(DType::kBF16, 5, 64);
  std::vector<std::string> steps;
  std::vector<std::int64_t> tokens_of_rows;
  const std::shared_ptr<Executor> executor = make_executor(1);
  const Stream stream = cpu_stream(*executor);
  const void* gemm1 = nullptr;
  const void* activated = nullptr;
  ExpertsHooks hooks;
  hooks.after_gemm1 = [&](const HookArgs& args) {
    steps.emplace_back("gemm1");
    EXPECT_TRUE(bitwise_equal(args.input, x));
    EXPECT_EQ(args.output.shape(), (Shape{10, 96}));
    EXPECT_EQ(args.output.dtype(), DType::kBF16);
    EXPECT_EQ(args.topk, 2);
    EXPECT_EQ(args.stream.handle, stream.handle);
    EXPECT_EQ(args.expert_offsets.shape(), Shape{9});
    EXPECT_EQ(args.expert_offsets.as<std::int32_t>()[8], 10);
    for (std::int64_t r = 0; r < 10; ++r) {
      tokens_of_rows.push_back(args.permuted_to_slot.as<std::int32_t>()[r] / args.topk);
    }
    gemm1 = args.output.data();
  };
  hooks.after_activation = [&](const HookArgs& args) {
    steps.emplace_back("activation");
    EXPECT_EQ(args.input.data(), gemm1);
    EXPECT_EQ(args.output.shape(), (Shape{10, 48}));
    activated = args.output.data();
  };
  hooks.after_gemm2 = [&](const HookArgs& args) {
    steps.emplace_back("gemm2");
    EXPECT_EQ(args.input.data(), activated);
    EXPECT_EQ(args.output.shape(), (Shape{10, 64}));
  };
  const Tensor output = run(layer, x, &hooks, stream);
  EXPECT_EQ(steps, (std::vector<std::string>{"gemm1", "activation", "gemm2"}));
  std::sort(tokens_of_rows.begin(), tokens_of_rows.end());
  EXPECT_EQ(tokens_of_rows, (std::vector<std::int64_t>{0, 0, 1, 1, 2, 2, 3, 3, 4, 4}));
  EXPECT_TRUE(bitwise_equal(output, run(layer, x))) << "looking changes nothing";
}

TEST_P(UnfusedExperts, WhatCallbacksWriteIsUsed) {
  const MoeLayer layer(make_layer_weights({}), layer_options(DType::kF32, GetParam()));
  const Tensor x = make_hidden_states(DType::kF32, 3, 64);
  const auto zero = [](const HookArgs& args) {
    std::fill_n(args.output.as<float>(), args.output.numel(), 0.0f);
  };
  const Tensor zeros = Tensor::zeros(x.shape(), DType::kF32);
  for (int step = 0; step < 3; ++step) {
    ExpertsHooks hooks;
    (step == 0 ? hooks.after_gemm1 : step == 1 ? hooks.after_activation : hooks.after_gemm2) = zero;
    EXPECT_EQ(compare(run(layer, x, &hooks), zeros).max_norm_relative, 0) << step;
  }
  // A row is one slot: doubled before its router weight, it counts twice.
  ExpertsHooks twice;
  twice.after_gemm2 = [](const HookArgs& args) {
    for (std::int64_t i = 0; i < args.output.numel(); ++i) args.output.as<float>()[i] *= 2;
  };
  const Tensor doubled = run(layer, x, &twice), once = run(layer, x);
  for (std::int64_t i = 0; i < once.numel(); ++i) {
    EXPECT_EQ(doubled.as<float>()[i], 2 * once.as<float>()[i]);
  }
}

TEST_P(UnfusedExperts, QuantizedHiddenStatesAreNotGiven) {
  for (const char* scheme : {"fp8_channel_token", "nvfp4", "int4_g32"}) {
    LayerSpec spec;
    spec.experts.scheme = parse_scheme(scheme);
    spec.experts.intermediate = 64;
    const MoeLayer layer(make_layer_weights(spec), layer_options(DType::kBF16, GetParam()));
    const Tensor x = make_hidden_states(DType::kBF16, 3, 64);
    bool given = false;
    ExpertsHooks hooks;
    hooks.after_gemm1 = [&](const HookArgs& args) { given = args.input.defined(); };
    run(layer, x, &hooks);
    EXPECT_EQ(given, scheme != std::string("fp8_channel_token")) << scheme;
  }
}

TEST_P(UnfusedExperts, CalledForNoRows) {
  LayerWeights weights = make_layer_weights({});
  weights.router.custom = [](const TensorView&, const TensorView& ids, const TensorView& w) {
    std::fill_n(ids.as<std::int32_t>(), ids.numel(), -1);
    std::fill_n(w.as<float>(), w.numel(), 0.0f);
  };
  const MoeLayer layer(std::move(weights), layer_options(DType::kF32, GetParam()));
  int calls = 0;
  ExpertsHooks hooks;
  hooks.after_gemm1 = hooks.after_activation = hooks.after_gemm2 = [&](const HookArgs& args) {
    ++calls;
    EXPECT_EQ(args.output.size(0), 0);
  };
  run(layer, make_hidden_states(DType::kF32, 2, 64), &hooks);
  EXPECT_EQ(calls, 3);
}

TEST(HooksTest, OnlyForExpertsThatHaveThem) {
  const ExpertsHooks hooks;
  const Tensor x = make_hidden_states(DType::kBF16, 2, 64);
  for (const std::string variant : {"cpu", "cpu_batched", "cpu_monolithic", "reference"}) {
    const MoeLayer layer(make_layer_weights({}), layer_options(DType::kBF16, variant));
    try {
      run(layer, x, &hooks);
      ADD_FAILURE() << variant;
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), "hooks") << variant;
    }
  }
  LayerOptions options = layer_options(DType::kBF16, "");
  options.hooks = true;
  const MoeLayer layer(make_layer_weights({}), options);
  EXPECT_EQ(layer.selection().pair(), "cpu+no_ep");
  EXPECT_TRUE(layer.config().hooks);
  options.require = "cpu+batched";
  try {
    const MoeLayer refused(make_layer_weights({}), options);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("hooks"), std::string::npos) << error.what();
  }
}

// ------------------------------------------------------------------------------------------------
// LoRA

constexpr std::int64_t kRank = 3, kHidden = 64, kIntermediate = 48, kExperts = 8;

std::vector<float> random_values(std::int64_t count, double deviation, std::uint64_t seed) {
  testing::Random random(seed);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = static_cast<float>(random.normal() * deviation);
  return values;
}

lora::Adapter random_adapter(std::uint64_t seed) {
  return {kRank, random_values(kExperts * kRank * kHidden, 0.1, seed),
          random_values(kExperts * 2 * kIntermediate * kRank, 0.3, seed + 1),
          random_values(kExperts * kRank * kIntermediate, 0.1, seed + 2),
          random_values(kExperts * kHidden * kRank, 0.3, seed + 3)};
}

/// W + B A in f32, for rows [first, first + out) of B.
Tensor merged(const WeightMatrix& matrix, const float* a, const float* b) {
  const std::int64_t out = matrix.values.size(0), in = matrix.values.size(1);
  Tensor result = Tensor::empty({out, in}, DType::kF32);
  for (std::int64_t o = 0; o < out; ++o) {
    for (std::int64_t i = 0; i < in; ++i) {
      const TensorView& w = matrix.values;
      double sum = load_f32(w.data(), w.dtype(), o * w.stride(0) + i * w.stride(1));
      for (std::int64_t r = 0; r < kRank; ++r) sum += double{b[o * kRank + r]} * a[r * in + i];
      result.as<float>()[o * in + i] = static_cast<float>(sum);
    }
  }
  return result;
}

ExpertWeights merged_weights(ExpertWeights weights, const lora::Adapter& adapter) {
  for (std::int64_t e = 0; e < kExperts; ++e) {
    ExpertMatrices& expert = weights.experts[static_cast<std::size_t>(e)];
    const float* a13 = adapter.a13.data() + e * kRank * kHidden;
    const float* b13 = adapter.b13.data() + e * 2 * kIntermediate * kRank;
    const auto replace = [&](WeightMatrix& matrix, const float* a, const float* b) {
      const Tensor values = merged(matrix, a, b);
      weights.owners.push_back(values.owner());
      matrix.values = values;
    };
    replace(expert.gate, a13, b13);
    replace(expert.up, a13, b13 + kIntermediate * kRank);
    replace(expert.down, adapter.a2.data() + e * kRank * kIntermediate,
            adapter.b2.data() + e * kHidden * kRank);
  }
  return weights;
}

TEST_P(UnfusedExperts, LoraThroughHooksEqualsMergedWeights) {
  LayerSpec spec;
  spec.experts.scheme = schemes::unquantized(DType::kF32);
  spec.experts.bias = true;
  const LayerWeights base = make_layer_weights(spec);
  const std::vector<lora::Adapter> adapters{random_adapter(10), random_adapter(20)};
  const Tensor x = make_hidden_states(DType::kF32, 9, kHidden);

  lora::ExpertsLora lora(adapters);
  const std::vector<int> selected{-1, 0, 1, -1, 0, 1, -1, 0, 1};
  lora.select(selected);
  const ExpertsHooks hooks = lora.hooks();
  const MoeLayer layer(base, layer_options(DType::kF32, GetParam()));
  const Tensor actual = run(layer, x, &hooks);

  for (int adapter = -1; adapter < 2; ++adapter) {
    LayerWeights weights = base;
    if (adapter >= 0) {
      weights.experts =
          merged_weights(weights.experts, adapters[static_cast<std::size_t>(adapter)]);
    }
    const Tensor expected = run(MoeLayer(weights, layer_options(DType::kF32, "reference")), x);
    for (std::int64_t token = 0; token < 9; ++token) {
      if (selected[static_cast<std::size_t>(token)] != adapter) continue;
      // f32 sums in another order; a missing delta is of order one.
      EXPECT_LE(compare(actual.select(0, token), expected.select(0, token)).max_norm_relative, 2e-5)
          << "token " << token << ", adapter " << adapter;
    }
  }
}

TEST_P(UnfusedExperts, WhatHooksThrowLeavesTheForward) {
  LayerSpec spec;
  const MoeLayer layer(make_layer_weights(spec), layer_options(DType::kF32, GetParam()));
  const Tensor x = make_hidden_states(DType::kF32, 4, kHidden);
  const auto fail = [](const HookArgs&) { throw std::runtime_error("from a hook"); };
  for (const auto hook :
       {&ExpertsHooks::after_gemm1, &ExpertsHooks::after_activation, &ExpertsHooks::after_gemm2}) {
    ExpertsHooks hooks;
    hooks.*hook = fail;
    EXPECT_THROW(run(layer, x, &hooks), std::runtime_error);
  }
}

}  // namespace fusedmoe::hooks_test
