// Layers whose routed experts work in a smaller width, between two projections (Nemotron-H).
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "error_text.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "layer_problem.h"
#include "testing/compare.h"

namespace fusedmoe::latent_projections_test {

using testing::bitwise_equal;
using testing::compare;
using testing::layer_options;
using testing::make_hidden_states;
using testing::Scratch;

constexpr std::int64_t kHidden = 64, kLatent = 24, kTokens = 9, kTopk = 2;

LayerWeights latent_weights(bool shared) {
  testing::LayerSpec spec;
  spec.latent = kLatent;
  spec.shared_experts = spec.shared_gate = shared;
  spec.zero_experts = shared ? 3 : 0;
  spec.experts.activation = Activation::kRelu2NoMul;
  return make_layer_weights(spec);
}

Tensor projected(const TensorView& x, const Tensor& weight) {
  Tensor result = Tensor::empty({x.size(0), weight.size(0)}, DType::kF32);
  for (std::int64_t token = 0; token < x.size(0); ++token) {
    for (std::int64_t row = 0; row < weight.size(0); ++row) {
      double sum = 0;
      for (std::int64_t i = 0; i < weight.size(1); ++i) {
        sum += double{load_f32(x.data(), x.dtype(), token * x.size(1) + i)} *
               load_f32(weight.data(), weight.dtype(), row * weight.size(1) + i);
      }
      result.as<float>()[token * weight.size(0) + row] = static_cast<float>(sum);
    }
  }
  return result;
}

class LatentProjectionsTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Layer, LatentProjectionsTest,
                         ::testing::Values("cpu", "cpu_batched", "cpu_unfused", "reference",
                                           "reference_batched"),
                         [](const auto& info) { return info.param; });

TEST_P(LatentProjectionsTest, SurroundTheRoutedExperts) {
  const LayerWeights weights = latent_weights(false);
  const LayerOptions options = layer_options(DType::kF32, GetParam());
  const MoeLayer layer(weights, options);
  EXPECT_EQ(layer.hidden(), kHidden);
  EXPECT_EQ(layer.config().hidden, kLatent);
  const Tensor x = make_hidden_states(DType::kF32, kTokens, kHidden);
  const Tensor ids = Tensor::empty({kTokens, kTopk}, DType::kI32);
  const Tensor topk_weights = Tensor::empty({kTokens, kTopk}, DType::kF32);
  const Tensor output = Tensor::empty(x.shape(), DType::kF32);
  layer.forward(x, output, Scratch(layer, kTokens).workspace,
                {.topk_ids = ids, .topk_weights = topk_weights});

  LayerWeights inner = weights;
  inner.latent.reset();
  inner.router_weights = {};
  const MoeLayer experts(inner, options);
  const Tensor sum = Tensor::empty({kTokens, kLatent}, DType::kF32);
  experts.forward_routed(projected(x, weights.latent->down), {ids, topk_weights}, sum,
                         Scratch(experts, kTokens).workspace);
  // fp32 sums of 64 products against double ones, twice.
  EXPECT_LE(compare(output, projected(sum, weights.latent->up)).max_norm_relative, 2e-6);

  const Tensor twice = Tensor::empty(output.shape(), DType::kF32);
  copy(output, twice, {});
  layer.forward(x, twice, Scratch(layer, kTokens).workspace, {.accumulate = true});
  for (std::int64_t i = 0; i < output.numel(); ++i) output.as<float>()[i] *= 2;
  EXPECT_TRUE(bitwise_equal(twice, output));
  layer.forward(x.slice(0, 0, 0), twice.slice(0, 0, 0), Scratch(layer, kTokens).workspace);
}

TEST_P(LatentProjectionsTest, WorkBesideOthersInPlaceAndInChunks) {
  LayerOptions options = layer_options(DType::kBF16, GetParam());
  const Tensor x = make_hidden_states(DType::kBF16, kTokens, kHidden);
  const Tensor expected = MoeLayer(latent_weights(true), options).forward(x);
  options.inplace = true;
  const MoeLayer inplace(latent_weights(true), options);
  const Tensor both = make_hidden_states(DType::kBF16, kTokens, kHidden);
  inplace.forward(both, both, Scratch(inplace, kTokens).workspace);
  EXPECT_TRUE(bitwise_equal(both, expected));
  options.max_workspace_bytes = inplace.workspace_bytes(kTokens / 2);
  EXPECT_TRUE(bitwise_equal(MoeLayer(latent_weights(true), options).forward(x), expected));

  const Tensor f32 = make_hidden_states(DType::kF32, kTokens, kHidden);
  const MoeLayer wide(latent_weights(true), layer_options(DType::kF32, GetParam()));
  const MoeLayer reference(latent_weights(true), layer_options(DType::kF32, "reference"));
  EXPECT_LE(compare(wide.forward(f32), reference.forward(f32)).max_norm_relative, 1e-5);
}

TEST(LatentProjections, WhatDoesNotFitIsRefused) {
  const auto argument = [](auto change) {
    LayerWeights weights = latent_weights(true);
    LayerOptions options;
    change(weights, options);
    return testing::argument_of([&] { MoeLayer(weights, options); });
  };
  const auto zeros = [](Shape shape) { return Tensor::zeros(shape, DType::kBF16); };
  using W = LayerWeights;
  using O = LayerOptions;
  EXPECT_EQ(argument([](W&, O&) {}), "no error");
  EXPECT_EQ(argument([](W&, O& o) { o.monolithic = true; }), "options.monolithic");
  EXPECT_EQ(argument([&](W& w, O&) { w.latent->down = {}; }), "latent.down");
  EXPECT_EQ(argument([&](W& w, O&) { w.latent->down = zeros({kHidden, kLatent}); }), "latent.down");
  EXPECT_EQ(argument([&](W& w, O&) { w.latent->down = zeros({kLatent}); }), "latent.down");
  EXPECT_EQ(argument([&](W& w, O&) { w.latent->up = zeros({kLatent, kHidden}); }), "latent.up");
  EXPECT_EQ(argument([&](W& w, O&) { w.latent->up = {}; }), "latent.up");
  EXPECT_EQ(argument([&](W& w, O&) {
              w.latent->down = zeros({kLatent, 32});
              w.latent->up = zeros({32, kLatent});
            }),
            "router_weights.weight");
}

}  // namespace fusedmoe::latent_projections_test
