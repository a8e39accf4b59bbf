// A forward in three parts on one rank.
#include <gtest/gtest.h>

#include "error_text.h"
#include "layer_problem.h"
#include "testing/compare.h"

namespace fusedmoe::layer_step_test {

using testing::bitwise_equal;
using testing::LayerSpec;
using testing::make_layer_weights;
using testing::Scratch;

TEST(LayerStepTest, ThreePartsGiveTheBitsOfAForward) {
  for (const bool shared : {false, true}) {
    for (const bool monolithic : {false, true}) {
      for (const std::int64_t zero_experts : {0, 3}) {
        if (monolithic && zero_experts > 0) continue;
        LayerSpec spec;
        spec.shared_experts = spec.shared_gate = shared;
        spec.zero_experts = zero_experts;
        LayerOptions options;
        options.dtype = DType::kF32;
        options.monolithic = monolithic;
        options.inplace = true;
        const MoeLayer layer(make_layer_weights(spec), options);
        const Tensor x = testing::random_tensor(DType::kF32, {5, layer.hidden()}, 1, 3);
        const Tensor expected = layer.forward(x);
        const Scratch scratch(layer, 5);
        const Tensor load = Tensor::empty({layer.router().num_choices()}, DType::kI32);
        ForwardOptions forward;
        forward.expert_load = load;
        MoeLayer::Step step = layer.begin(x, x, scratch.workspace, forward);
        step.compute();
        step.finish();
        EXPECT_TRUE(bitwise_equal(x, expected)) << shared << monolithic << zero_experts;
      }
    }
  }
}

TEST(LayerStepTest, PartsComeInOrder) {
  LayerOptions options;
  options.dtype = DType::kF32;
  // Shared experts, which must not run again: their scratch holds the routed experts' sums by then.
  testing::LayerSpec spec;
  spec.shared_experts = true;
  const MoeLayer layer(make_layer_weights(spec), options);
  const Tensor x = testing::random_tensor(DType::kF32, {5, layer.hidden()}, 1, 3);
  const Tensor output = Tensor::empty(x.shape(), x.dtype());
  const Scratch scratch(layer, 5);
  MoeLayer::Step step = layer.begin(x, output, scratch.workspace);
  EXPECT_EQ(testing::error_text([&] { step.finish(); }), "finish() comes once, behind compute()");
  step.compute();
  EXPECT_EQ(testing::error_text([&] { step.compute(); }), "compute() comes once, behind begin()");
  step.finish();
  EXPECT_EQ(testing::error_text([&] { step.finish(); }), "finish() comes once, behind compute()");
  EXPECT_TRUE(bitwise_equal(output, layer.forward(x)));
  const MoeLayer::Step moved(std::move(step));
  // NOLINTNEXTLINE(bugprone-use-after-move)
  EXPECT_EQ(testing::error_text([&] { step.compute(); }), "the step was moved from");
}

TEST(LayerStepTest, ChunksAreForForwardAlone) {
  LayerOptions options;
  options.dtype = DType::kF32;
  options.max_workspace_bytes = MoeLayer(make_layer_weights({}), options).workspace_bytes(2);
  const MoeLayer layer(make_layer_weights({}), options);
  const Tensor x = testing::random_tensor(DType::kF32, {5, layer.hidden()}, 1, 3);
  const Tensor output = Tensor::empty(x.shape(), x.dtype());
  const Scratch scratch(layer, 5);
  const std::string error = testing::error_text([&] { layer.begin(x, output, scratch.workspace); });
  EXPECT_EQ(error.find("hidden_states: was 5 tokens; must be at most "), 0U) << error;
}

}  // namespace fusedmoe::layer_step_test
