// MoeLayer in place, and with pinned plans.
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "error_text.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "layer_problem.h"
#include "malformed.h"
#include "testing/compare.h"

namespace fusedmoe::layer_options_test {

using testing::argument_of;
using testing::bitwise_equal;
using testing::layer_options;
using testing::LayerSpec;
using testing::make_hidden_states;
using testing::make_layer_weights;
using testing::Scratch;

std::vector<std::string> variants() {
  MoeConfig config = testing::make_config({}, DType::kBF16);
  config.routing_method = RoutingMethod::kRouter;
  std::vector<std::string> names;
  for (const testing::Variant& variant : testing::variants_for(config)) {
    names.push_back(variant.name());
  }
  return names;
}

class InPlace : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Layer, InPlace, ::testing::ValuesIn(variants()),
                         [](const auto& info) { return info.param; });

TEST_P(InPlace, GivesTheSameBits) {
  LayerSpec shared;
  shared.shared_experts = shared.shared_gate = true;
  LayerSpec weight_on_input;
  weight_on_input.experts.topk = 1;
  weight_on_input.experts.weight_on_input = true;
  LayerSpec quantized = shared;
  quantized.experts.scheme = parse_scheme("fp8_channel_token");
  for (const LayerSpec& spec : {LayerSpec{}, shared, weight_on_input, quantized}) {
    if (spec.experts.weight_on_input && GetParam().ends_with("_monolithic")) continue;
    LayerOptions options = layer_options(DType::kBF16, GetParam());
    const MoeLayer apart(make_layer_weights(spec), options);
    options.inplace = true;
    const MoeLayer layer(make_layer_weights(spec), options);
    const Tensor x = make_hidden_states(DType::kBF16, 9, 64);
    const Tensor expected = apart.forward(x);
    EXPECT_TRUE(bitwise_equal(layer.forward(x), expected)) << "another output is still allowed";
    const Scratch scratch(layer, 9);
    layer.forward(x, x, scratch.workspace);
    EXPECT_TRUE(bitwise_equal(x, expected));
  }
}

TEST_P(InPlace, OnlyWhenAskedForAndOnlyTheSameView) {
  LayerOptions options = layer_options(DType::kBF16, GetParam());
  const Tensor x = make_hidden_states(DType::kBF16, 6, 64);
  const MoeLayer apart(make_layer_weights({}), options);
  const Scratch scratch(apart, 6);
  EXPECT_EQ(argument_of([&] { apart.forward(x, x, scratch.workspace); }), "output");
  options.inplace = true;
  const MoeLayer layer(make_layer_weights({}), options);
  const Tensor before = make_hidden_states(DType::kBF16, 6, 64);
  EXPECT_EQ(
      argument_of([&] { layer.forward(x.slice(0, 0, 4), x.slice(0, 1, 5), scratch.workspace); }),
      "output");
  EXPECT_EQ(argument_of([&] {
              layer.forward(x, x, scratch.workspace,
                            {.topk_ids = TensorView(x.data(), DType::kI32, {6, 2})});
            }),
            "options.topk_ids");
  EXPECT_TRUE(bitwise_equal(x, before));
}

TEST(InPlaceTest, RoutedForwardToo) {
  LayerSpec spec;
  spec.shared_experts = true;
  LayerOptions options = layer_options(DType::kF32, "cpu");
  options.inplace = true;
  const MoeLayer layer(make_layer_weights(spec), options);
  const Tensor x = make_hidden_states(DType::kF32, 2, 64);
  const Tensor expected = Tensor::empty(x.shape(), DType::kF32);
  const Tensor ids = Tensor::zeros({2, 2}, DType::kI32),
               weights = Tensor::zeros({2, 2}, DType::kF32);
  ids.as<std::int32_t>()[1] = ids.as<std::int32_t>()[2] = 5;
  weights.as<float>()[0] = weights.as<float>()[3] = 0.75f;
  const Scratch scratch(layer, 2);
  layer.forward_routed(x, {ids, weights}, expected, scratch.workspace);
  layer.forward_routed(x, {ids, weights}, x, scratch.workspace);
  EXPECT_TRUE(bitwise_equal(x, expected));
}

// ------------------------------------------------------------------------------------------------
// Plans

LayerSpec shared_spec() {
  LayerSpec spec;
  spec.shared_experts = true;
  return spec;
}

TEST(PlanTest, PinnedPlanIsWhatRuns) {
  for (const std::string& variant : variants()) {
    for (const LayerSpec& spec : {LayerSpec{}, shared_spec()}) {
      LayerOptions options = layer_options(DType::kF16, variant);
      const MoeLayer layer(make_layer_weights(spec), options);
      options.require = "";
      options.plan = layer.plan_json();
      const MoeLayer pinned(make_layer_weights(spec), options);
      EXPECT_EQ(pinned.plan_line(), layer.plan_line());
      EXPECT_EQ(pinned.plan_json(), layer.plan_json());
      EXPECT_EQ(pinned.selection().pair(), layer.selection().pair());
    }
  }
}

TEST(PlanTest, HoldsWhatIsChosen) {
  const MoeLayer layer(make_layer_weights(shared_spec()),
                       layer_options(DType::kBF16, "cpu_batched"));
  const auto plan = nlohmann::json::parse(layer.plan_json());
  const nlohmann::json expected{{"experts", "cpu"},
                                {"prepare_finalize", "batched"},
                                {"scheme", "bf16"},
                                {"dtype", "bf16"},
                                {"device", "cpu"},
                                {"isa", cpu_isa()},
                                {"shared_experts", "cpu+no_ep"},
                                {"shared_scheme", "bf16"},
                                {"layout_version", layer.selection().experts->layout_version()}};
  EXPECT_EQ(plan, expected);
  EXPECT_EQ(Plan::parse(layer.plan_json()).json(), layer.plan_json());
}

TEST(PlanTest, AnythingElseIsAnErrorThatNamesIt) {
  const LayerSpec spec = shared_spec();
  const MoeLayer layer(make_layer_weights(spec), layer_options(DType::kBF16, ""));
  const auto pin = [&](const char* key, const nlohmann::json& value) {
    auto plan = nlohmann::json::parse(layer.plan_json());
    if (value.is_null()) {
      plan.erase(key);
    } else {
      plan[key] = value;
    }
    LayerOptions options = layer_options(DType::kBF16, "");
    options.plan = plan.dump();
    return argument_of([&] { MoeLayer(make_layer_weights(spec), options); });
  };
  EXPECT_EQ(pin("isa", cpu_isa()), "no error");
  EXPECT_EQ(pin("isa", "sse2"), "plan.isa");
  EXPECT_EQ(pin("scheme", "mxfp4"), "plan.scheme");
  EXPECT_EQ(pin("dtype", "f32"), "plan.dtype");
  EXPECT_EQ(pin("device", "cuda:0"), "plan.device");
  EXPECT_EQ(pin("layout_version", 999), "plan.layout_version");
  EXPECT_EQ(pin("layout_version", "1"), "plan.layout_version");
  EXPECT_EQ(pin("experts", "gpu"), "require");
  EXPECT_EQ(pin("prepare_finalize", "batched"), "no error") << "a pair that also serves the layer";
  EXPECT_EQ(pin("prepare_finalize", "deepep"), "require");
  EXPECT_EQ(pin("experts", nullptr), "plan.experts");
  EXPECT_EQ(pin("experts", 7), "plan.experts");
  EXPECT_EQ(pin("shared_experts", nullptr), "plan.shared_experts");
  EXPECT_EQ(pin("shared_experts", "gpu+no_ep"), "require");
  EXPECT_EQ(pin("shared_scheme", "f32"), "plan.shared_scheme");
  EXPECT_EQ(pin("threads", 4), "plan");

  LayerOptions options = layer_options(DType::kBF16, "");
  for (const char* text : {"{", "[]", "7", "\"cpu\""}) {
    options.plan = text;
    EXPECT_EQ(argument_of([&] { MoeLayer(make_layer_weights(spec), options); }), "plan") << text;
  }
  options.plan = layer.plan_json();
  EXPECT_EQ(argument_of([&] { MoeLayer(make_layer_weights({}), options); }), "plan.shared_experts");
  options.require = "cpu";
  EXPECT_EQ(argument_of([&] { MoeLayer(make_layer_weights(spec), options); }), "options.require");
}

TEST(PlanTest, EmptySelectionHasNone) {
  MoeConfig config;
  config.device = {DeviceKind::kCuda, 0};
  EXPECT_EQ(argument_of([&] { explain(config).plan(); }), "selection");
}

TEST(LayerTest, NoTokensGoThroughTheRouter) {
  LayerSpec spec{.shared_experts = true, .shared_gate = true};
  for (const bool monolithic : {false, true}) {
    LayerWeights weights = make_layer_weights(spec);
    std::vector<Shape> shapes;
    weights.router.custom = [&](const TensorView& logits, const TensorView& ids,
                                const TensorView& topk_weights) {
      shapes.insert(shapes.end(), {logits.shape(), ids.shape(), topk_weights.shape()});
    };
    LayerOptions options = layer_options(DType::kBF16, "");
    options.monolithic = monolithic;
    const MoeLayer layer(std::move(weights), options);
    EXPECT_EQ(layer.workspace_bytes(0), 0u);
    layer.forward(Tensor::empty({0, 64}, DType::kBF16));
    EXPECT_EQ(shapes, (std::vector<Shape>{{0, 8}, {0, 2}, {0, 2}}));
  }
}

TEST(LayerTest, DuplicateIdsOfTheBatchedFormatAreSeenBeforeAnyChunkRuns) {
  LayerOptions options = layer_options(DType::kBF16, "cpu_batched");
  options.max_workspace_bytes = MoeLayer(make_layer_weights({}), options).workspace_bytes(2);
  const MoeLayer layer(make_layer_weights({}), options);
  const Tensor x = make_hidden_states(DType::kBF16, 5, 64);
  const Tensor ids = Tensor::empty({5, 2}, DType::kI32);
  for (std::int32_t slot = 0; slot < 10; ++slot) ids.as<std::int32_t>()[slot] = slot % 2;
  const Tensor weights = Tensor::zeros({5, 2}, DType::kF32);
  const Tensor output = Tensor::empty(x.shape(), x.dtype());
  const Tensor workspace =
      Tensor::empty({static_cast<std::int64_t>(options.max_workspace_bytes)}, DType::kU8);
  const auto run_routed = [&] {
    layer.forward_routed(x, {ids, weights}, output,
                         {workspace.data(), options.max_workspace_bytes});
  };
  EXPECT_NO_THROW(run_routed());
  ids.as<std::int32_t>()[9] = 0;
  testing::expect_error("topk_ids", output, run_routed);
}

/// Counts the calls on their way to the default executor.
class CountingExecutor : public Executor {
 public:
  int calls = 0;
  int concurrency() const override { return 2; }
  void run(int num_tasks, Task task) override {
    ++calls;
    default_executor().run(num_tasks, task);
  }
};

TEST(LayerTest, PackingRunsOnTheExecutorOfTheLayer) {
  CountingExecutor executor;
  LayerOptions options = layer_options(DType::kBF16, "cpu");
  options.executor = &executor;
  const MoeLayer layer(make_layer_weights({}), options);
  EXPECT_GT(executor.calls, 0);
}

}  // namespace fusedmoe::layer_options_test
