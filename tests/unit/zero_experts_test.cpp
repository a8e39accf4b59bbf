// Layers whose router may choose experts that return their input (LongCat).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "error_text.h"
#include "fake_experts.h"
#include "fusedmoe/layer.h"
#include "layer_problem.h"
#include "testing/compare.h"

namespace fusedmoe::zero_experts_test {

using testing::bitwise_equal;
using testing::compare;
using testing::layer_options;
using testing::make_hidden_states;
using testing::make_ids;
using testing::Scratch;

constexpr std::int64_t kExperts = 8, kZeroExperts = 4, kHidden = 64, kTokens = 9, kTopk = 3;

LayerWeights zero_weights(bool shared) {
  testing::LayerSpec spec;
  spec.experts.topk = kTopk;
  spec.shared_experts = spec.shared_gate = shared;
  spec.zero_experts = kZeroExperts;
  LayerWeights weights = make_layer_weights(spec);
  weights.router.renormalize = false;
  weights.router.routed_scaling_factor = 6;
  weights.router_weights.score_correction_bias =
      testing::random_tensor(DType::kF32, {kExperts + kZeroExperts}, 0.01, 12);
  return weights;
}

struct Result {
  Tensor output, ids, weights, load;
};

Result run(const MoeLayer& layer, const TensorView& x, const TensorView& output) {
  Result result{Tensor(output, nullptr), Tensor::empty({kTokens, kTopk}, DType::kI32),
                Tensor::empty({kTokens, kTopk}, DType::kF32),
                Tensor::empty({kExperts + kZeroExperts}, DType::kI32)};
  layer.forward(
      x, output, Scratch(layer, kTokens).workspace,
      {.topk_ids = result.ids, .topk_weights = result.weights, .expert_load = result.load});
  return result;
}

void forward_routed(const MoeLayer& layer, const TensorView& x, const Routing& routing,
                    const TensorView& output) {
  layer.forward_routed(x, routing, output, Scratch(layer, x.size(0)).workspace);
}

class ZeroExperts : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Layer, ZeroExperts,
                         ::testing::Values("cpu", "cpu_batched", "cpu_unfused", "reference",
                                           "reference_batched"),
                         [](const auto& info) { return info.param; });

// What the others give, plus the token times its weights for zero experts.
TEST_P(ZeroExperts, AddTheTokenTimesTheirWeights) {
  const LayerWeights weights = zero_weights(false);
  LayerOptions options = layer_options(DType::kBF16, GetParam());
  const MoeLayer layer(weights, options);
  const Tensor x = make_hidden_states(DType::kBF16, kTokens, kHidden);
  const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
  const Result result = run(layer, x, output);

  LayerWeights others = weights;
  others.router.num_zero_experts = 0;
  others.router_weights = {};
  const Tensor ids = Tensor::empty({kTokens, kTopk}, DType::kI32);
  std::vector<float> sums(kTokens);
  std::vector<std::int32_t> load(kExperts + kZeroExperts);
  for (std::int64_t slot = 0; slot < ids.numel(); ++slot) {
    const std::int32_t id = result.ids.as<std::int32_t>()[slot];
    ++load.at(static_cast<std::size_t>(id));
    ids.as<std::int32_t>()[slot] = id < kExperts ? id : -1;
    if (id >= kExperts) sums[slot / kTopk] += result.weights.as<float>()[slot];
  }
  EXPECT_TRUE(bitwise_equal(result.load, make_ids({kExperts + kZeroExperts}, load)));
  ASSERT_GT(std::count_if(sums.begin(), sums.end(), [](float sum) { return sum > 0; }), 2);
  const Tensor expected = Tensor::empty(x.shape(), DType::kBF16);
  forward_routed(MoeLayer(others, options), x, {ids, result.weights}, expected);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const float weighted = sums[i / kHidden] * load_f32(x.data(), DType::kBF16, i);
    const float rounded = bf16_to_f32(f32_to_bf16(weighted));
    store_f32(expected.data(), DType::kBF16, i,
              load_f32(expected.data(), DType::kBF16, i) + rounded);
  }
  EXPECT_TRUE(bitwise_equal(output, expected));

  const Tensor routed = Tensor::empty(x.shape(), DType::kBF16);
  forward_routed(layer, x, {result.ids, result.weights}, routed);
  EXPECT_TRUE(bitwise_equal(routed, output)) << "with the same ids, given";
}

TEST_P(ZeroExperts, WorkBesideSharedExpertsAndInPlace) {
  LayerOptions options = layer_options(DType::kBF16, GetParam());
  options.inplace = true;
  const MoeLayer layer(zero_weights(true), options);
  const Tensor x = make_hidden_states(DType::kBF16, kTokens, kHidden);
  const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
  run(layer, x, output);
  const Tensor both = make_hidden_states(DType::kBF16, kTokens, kHidden);
  run(layer, both, both);
  EXPECT_EQ(layer.forward(x.slice(0, 0, 0)).size(0), 0);
  EXPECT_TRUE(bitwise_equal(both, output));

  options = layer_options(DType::kF32, GetParam());
  const MoeLayer wide(zero_weights(true), options);
  const MoeLayer reference(zero_weights(true), layer_options(DType::kF32, "reference"));
  const Tensor f32 = make_hidden_states(DType::kF32, kTokens, kHidden);
  EXPECT_LE(compare(wide.forward(f32), reference.forward(f32)).max_norm_relative, 1e-5);
}

TEST_P(ZeroExperts, OneRankOfTwoAddsThem) {
  const LayerWeights weights = zero_weights(false);
  LayerOptions options = layer_options(DType::kF32, GetParam());
  const Tensor x = make_hidden_states(DType::kF32, kTokens, kHidden);
  const Tensor whole = MoeLayer(weights, options).forward(x);
  const Tensor sum = Tensor::zeros(x.shape(), DType::kF32);
  options.parallel.ep_size = 2;
  for (const int rank : {0, 1}) {
    options.parallel.ep_rank = rank;
    const MoeLayer layer(local_weights(weights, options.parallel), options);
    const std::size_t bytes = layer.workspace_bytes(kTokens);
    const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
    layer.forward(x, sum, {workspace.data(), bytes}, {.accumulate = true});
  }
  EXPECT_LE(compare(sum, whole).max_norm_relative, 1e-6);
}

TEST(ZeroExpertsTest, TokensWithoutThemDoNotMatter) {
  const MoeLayer layer(zero_weights(false), layer_options(DType::kF32, "cpu"));
  const Tensor x = Tensor::empty({2, kHidden}, DType::kF32);
  std::fill_n(x.as<float>(), x.numel(), NAN);
  const Tensor ids = make_ids({2, kTopk}, {-1, -1, -1, -1, kExperts, -1});
  const Tensor weights = Tensor::zeros({2, kTopk}, DType::kF32);
  weights.as<float>()[4] = 1;
  const Tensor output = Tensor::empty(x.shape(), DType::kF32);
  forward_routed(layer, x, {ids, weights}, output);
  EXPECT_EQ(output.as<float>()[0], 0);
  EXPECT_TRUE(std::isnan(output.as<float>()[kHidden]));
}

TEST(ZeroExpertsTest, WhatDoesNotFitIsRefused) {
  const auto argument = [](auto change) {
    LayerWeights weights = zero_weights(false);
    LayerOptions options;
    change(weights, options);
    return testing::argument_of([&] { MoeLayer(weights, options); });
  };
  using W = LayerWeights;
  using O = LayerOptions;
  EXPECT_EQ(argument([](W&, O& o) { o.monolithic = true; }), "options.monolithic");
  EXPECT_EQ(argument([](W& w, O&) { w.router.num_zero_experts = -1; }), "router.num_zero_experts");
  EXPECT_EQ(argument([](W& w, O&) { w.router.num_zero_experts = 3; }), "router_weights.weight");
  EXPECT_EQ(argument([](W& w, O&) { w.router.num_experts = 9; }), "experts");

  const MoeLayer layer(zero_weights(false), {});
  const Tensor x = make_hidden_states(DType::kBF16, 1, kHidden);
  const Tensor ids = make_ids({1, kTopk}, {0, 11, 12});
  const Tensor weights = Tensor::zeros({1, kTopk}, DType::kF32);
  const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
  const std::string error = testing::error_text([&] {
    forward_routed(layer, x, {ids, weights}, output);
  });
  EXPECT_NE(error.find("12 at [0, 2]; must be -1 or in [0, 12)"), std::string::npos) << error;
}

}  // namespace fusedmoe::zero_experts_test
