// Malformed layers and forwards: each must give an Error that names the argument, and leave the
// output alone.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "fake_experts.h"
#include "fusedmoe/layer.h"
#include "layer_problem.h"
#include "malformed.h"

namespace fusedmoe::malformed_layer_calls_test {

using testing::expect_error;
using testing::kCuda;
using testing::layer_options;
using testing::make_ids;
using testing::make_sample;
using testing::reshaped;
using testing::retyped;
using testing::shifted;
using testing::transposed;

constexpr std::int64_t kTokens = 3;

struct LayerFault {
  const char* name;
  const char* argument;
  std::function<void(LayerWeights&, LayerOptions&)> spoil;
};
void PrintTo(const LayerFault& fault, std::ostream* stream) {
  *stream << fault.name;
}

std::vector<LayerFault> layer_faults() {
  using W = LayerWeights;
  using O = LayerOptions;
  return {
      {"NoExperts", "router.num_experts", [](W& w, O&) { w.router.num_experts = 0; }},
      {"TopkOfZero", "router.topk", [](W& w, O&) { w.router.topk = 0; }},
      {"TopkBeyondTheExperts", "router.topk", [](W& w, O&) { w.router.topk = 9; }},
      {"FewerExpertsThanTheRouterHas", "experts", [](W& w, O&) { w.experts.experts.pop_back(); }},
      {"RouterWeightOfAnotherHiddenSize", "router_weights.weight",
       [](W& w, O&) {
         w.router_weights.weight = Tensor::zeros({8, 63}, DType::kBF16);
       }},
      {"RouterWeightTransposed", "router_weights.weight",
       [](W& w, O&) {
         w.router_weights.weight = Tensor::zeros({64, 8}, DType::kBF16);
       }},
      {"RouterWeightInFP8", "router_weights.weight",
       [](W& w, O&) {
         w.router_weights.weight = Tensor::zeros({8, 64}, DType::kE4M3);
       }},
      {"RouterBiasOfAnotherLength", "router_weights.bias",
       [](W& w, O&) { w.router_weights.bias = Tensor::zeros({7}, DType::kF32); }},
      {"CorrectionBiasInBF16", "router_weights.score_correction_bias",
       [](W& w, O&) { w.router_weights.score_correction_bias = Tensor::zeros({8}, DType::kBF16); }},
      {"SharedExpertsOfAnotherHiddenSize", "shared_experts",
       [](W& w, O&) {
         testing::Case spec;
         spec.num_experts = spec.topk = 1;
         spec.hidden = 32;
         w.shared_experts = SharedExperts{testing::make_problem(spec).weights, {}};
       }},
      {"TwoSharedExperts", "shared_experts",
       [](W& w, O&) {
         testing::Case spec;
         spec.num_experts = 2;
         w.shared_experts = SharedExperts{testing::make_problem(spec).weights, {}};
       }},
      {"SharedGateOfAnotherShape", "shared_experts.gate",
       [](W& w, O&) { w.shared_experts->gate = Tensor::zeros({64}, DType::kBF16); }},
      {"MapOfAnotherLength", "expert_map",
       [](W& w, O&) { w.expert_map = Tensor::zeros({7}, DType::kI32); }},
      {"MapBeyondTheExperts", "expert_map",
       [](W& w, O&) {
         w.expert_map = make_ids({8}, {0, 1, 2, 3, 4, 5, 6, 8});
       }},
      {"MapNamesAnExpertTwice", "expert_map",
       [](W& w, O&) {
         w.expert_map = make_ids({8}, {0, 1, 2, 3, 4, 5, 6, 6});
       }},
      {"RanksWithoutAMap", "config", [](W&, O& o) { o.parallel.ep_size = 2; }},
      {"OutputInAnotherHalf", "options.output_dtype",
       [](W&, O& o) { o.output_dtype = DType::kF16; }},
      {"TooLittleScratch", "options.max_workspace_bytes",
       [](W&, O& o) { o.max_workspace_bytes = 1; }},
      {"FewerThanNoThreads", "num_threads", [](W&, O& o) { o.num_threads = -1; }},
      {"ChunksOfOneScale", "options.max_workspace_bytes",
       [](W& w, O& o) {
         testing::Case spec;
         spec.scheme = parse_scheme("fp8_tensor");
         w.experts = testing::make_problem(spec).weights;
         o.max_workspace_bytes = 1 << 20;
       }},
      {"DTypeOfIntegers", "options.dtype", [](W&, O& o) { o.dtype = DType::kI8; }},
      {"UnknownImplementation", "require", [](W&, O& o) { o.require = "gpu"; }},
      {"ImplementationsThatDoNotFit", "require",
       [](W&, O& o) {
         o.require = "cpu+batched";
         o.hooks = true;
       }},
      {"MissingDevice", "config.device", [](W&, O& o) { o.device = kCuda; }},
      {"CustomRoutingOnCuda", "router.custom",
       [](W& w, O& o) {
         w.router.custom = [](const TensorView&, const TensorView&, const TensorView&) {};
         o.device = kCuda;
       }},
      {"WeightOnInputOfTwoSlots", "router.apply_router_weight_on_input",
       [](W& w, O&) { w.router.apply_router_weight_on_input = true; }},
      {"GroupsThatDoNotDivide", "router.num_expert_group",
       [](W& w, O&) {
         w.router.num_expert_group = 3;
         w.router.topk_group = 1;
       }},
  };
}

testing::LayerSpec shared_spec() {
  testing::LayerSpec spec;
  spec.shared_experts = spec.shared_gate = true;
  return spec;
}

class LayerFaults : public ::testing::TestWithParam<LayerFault> {};
INSTANTIATE_TEST_SUITE_P(Layer, LayerFaults, ::testing::ValuesIn(layer_faults()),
                         [](const auto& info) { return info.param.name; });
TEST_P(LayerFaults, NameTheArgument) {
  LayerWeights weights = testing::make_layer_weights(shared_spec());
  LayerOptions options;
  ASSERT_NO_THROW(MoeLayer(weights, options));
  GetParam().spoil(weights, options);
  try {
    const MoeLayer layer(weights, options);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), GetParam().argument) << error.what();
  }
}

TEST(LayerConstructorTest, MalformedExpertMatrixIsNamed) {
  LayerWeights weights = testing::make_layer_weights({});
  weights.experts.experts[3].down.values = weights.experts.experts[3].gate.values;
  try {
    const MoeLayer layer(weights, {});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(error.argument().find('3'), std::string::npos) << error.what();
    EXPECT_NE(error.argument().find("down"), std::string::npos) << error.what();
  }
}

struct ForwardCall {
  Tensor x = testing::make_hidden_states(DType::kBF16, kTokens, 64);
  Tensor out = Tensor::empty({kTokens, 64}, DType::kBF16);
  Tensor memory = Tensor::empty({1 << 20}, DType::kU8);
  Tensor ids = make_ids({kTokens, 2}, {0, 1, 2, 3, -1, 5});
  Tensor weights = make_sample(DType::kF32, {kTokens, 2});
  TensorView hidden_states = x, output = out;
  Workspace workspace{memory.data(), static_cast<std::size_t>(memory.nbytes())};
  ForwardOptions options;
  Routing routing{ids, weights};
};

struct ForwardFault {
  const char* name;
  const char* argument;
  std::function<void(ForwardCall&)> spoil;
};
void PrintTo(const ForwardFault& fault, std::ostream* stream) {
  *stream << fault.name;
}

std::vector<ForwardFault> forward_faults() {
  using C = ForwardCall;
  return {
      {"NoHiddenStates", "hidden_states", [](C& c) { c.hidden_states = {}; }},
      {"HiddenStatesOfAnotherDType", "hidden_states",
       [](C& c) { c.hidden_states = retyped(c.x, DType::kF16); }},
      {"HiddenStatesOfAnotherWidth", "hidden_states",
       [](C& c) {
         c.hidden_states = reshaped(c.x, {kTokens, 63});
       }},
      {"HiddenStatesMisaligned", "hidden_states",
       [](C& c) {
         c.hidden_states = shifted(reshaped(c.x, {2, 64}), 1);
       }},
      {"HiddenStatesStrided", "hidden_states", [](C& c) { c.hidden_states = transposed(c.x); }},
      {"TokensBeyond32Bits", "hidden_states",
       [](C& c) {
         c.hidden_states = reshaped(c.x, {std::int64_t{1} << 31, 64});
       }},
      {"RowsBeyond32Bits", "hidden_states",
       [](C& c) {
         c.hidden_states = reshaped(c.x, {std::int64_t{1} << 30, 64});
       }},
      {"NoOutput", "output", [](C& c) { c.output = {}; }},
      {"OutputInF32", "output",
       [](C& c) {
         c.output = TensorView(c.memory.data(), DType::kF32, {kTokens, 64});
       }},
      {"OutputTooShort", "output", [](C& c) { c.output = c.out.slice(0, 0, 2); }},
      {"OutputIsTheInput", "output", [](C& c) { c.hidden_states = c.output; }},
      {"NoWorkspace", "workspace", [](C& c) { c.workspace = {}; }},
      {"WorkspaceTooSmall", "workspace", [](C& c) { c.workspace.bytes = 4096; }},
      {"WorkspaceMisaligned", "workspace",
       [](C& c) { c.workspace.data = c.memory.as<char>() + 8; }},
      {"WorkspaceOverlapsTheInput", "workspace",
       [](C& c) {
         c.hidden_states = TensorView(c.memory.data(), DType::kBF16, {kTokens, 64});
       }},
  };
}

std::vector<ForwardFault> options_faults() {
  using C = ForwardCall;
  return {
      {"LogitsOfAnotherShape", "options.router_logits",
       [](C& c) {
         c.options.router_logits = TensorView(c.weights.data(), DType::kF32, {kTokens, 2});
       }},
      {"IdsOf64Bits", "options.topk_ids",
       [](C& c) {
         c.options.topk_ids = TensorView(c.memory.data(), DType::kI64, {kTokens, 2});
       }},
      {"WeightsOfAnotherShape", "options.topk_weights",
       [](C& c) { c.options.topk_weights = c.weights.slice(0, 0, 1); }},
      {"IdsOverTheOutput", "options.topk_ids",
       [](C& c) {
         c.options.topk_ids = TensorView(c.out.data(), DType::kI32, {kTokens, 2});
       }},
      {"LoadOfFewerExperts", "options.expert_load",
       [](C& c) { c.options.expert_load = TensorView(c.ids.data(), DType::kI32, {6}); }},
      {"HooksOfAnotherLayer", "hooks",
       [](C& c) {
         static const ExpertsHooks hooks;
         c.options.hooks = &hooks;
       }},
      {"StreamOfAnotherDevice", "stream", [](C& c) { c.options.stream = Stream{kCuda}; }},
      {"IdsOverTheWeights", "options.topk_ids",
       [](C& c) {
         c.options.topk_ids = c.ids;
         c.options.topk_weights = TensorView(c.ids.data(), DType::kF32, {kTokens, 2});
       }},
      {"LogitsInTheWorkspace", "options.router_logits",
       [](C& c) {
         c.options.router_logits = TensorView(c.memory.data(), DType::kF32, {kTokens, 8});
       }},
  };
}

std::vector<ForwardFault> routing_faults() {
  using C = ForwardCall;
  return {
      {"NoIds", "topk_ids", [](C& c) { c.routing.topk_ids = {}; }},
      {"IdsOfThreeSlots", "topk_ids",
       [](C& c) {
         c.routing.topk_ids = TensorView(c.x.data(), DType::kI32, {kTokens, 3});
       }},
      {"IdOutOfRange", "topk_ids", [](C& c) { c.ids.as<std::int32_t>()[2] = 8; }},
      {"NoWeights", "topk_weights", [](C& c) { c.routing.topk_weights = {}; }},
      {"WeightsInF16", "topk_weights",
       [](C& c) { c.routing.topk_weights = retyped(c.weights, DType::kF16); }},
      {"IdsInTheWorkspace", "workspace",
       [](C& c) {
         c.routing.topk_ids = TensorView(c.memory.data(), DType::kI32, {kTokens, 2});
       }},
      {"WeightsOverTheOutput", "output",
       [](C& c) {
         c.routing.topk_weights = TensorView(c.out.data(), DType::kF32, {kTokens, 2});
       }},
  };
}

const MoeLayer& shared_layer() {
  static const MoeLayer layer(testing::make_layer_weights(shared_spec()),
                              layer_options(DType::kBF16, "reference"));
  return layer;
}

class ForwardFaults : public ::testing::TestWithParam<ForwardFault> {};
INSTANTIATE_TEST_SUITE_P(Arguments, ForwardFaults, ::testing::ValuesIn(forward_faults()),
                         [](const auto& info) { return info.param.name; });
TEST_P(ForwardFaults, NameTheArgumentAndLeaveTheOutput) {
  ForwardCall call;
  GetParam().spoil(call);
  expect_error(GetParam().argument, call.out, [&] {
    shared_layer().forward(call.hidden_states, call.output, call.workspace, call.options);
  });
  expect_error(GetParam().argument, call.out, [&] {
    shared_layer().forward_routed(call.hidden_states, call.routing, call.output, call.workspace);
  });
}

class OptionsFaults : public ::testing::TestWithParam<ForwardFault> {};
INSTANTIATE_TEST_SUITE_P(Options, OptionsFaults, ::testing::ValuesIn(options_faults()),
                         [](const auto& info) { return info.param.name; });
TEST_P(OptionsFaults, NameTheArgumentAndLeaveTheOutput) {
  ForwardCall call;
  GetParam().spoil(call);
  expect_error(GetParam().argument, call.out, [&] {
    shared_layer().forward(call.hidden_states, call.output, call.workspace, call.options);
  });
}

class RoutingFaults : public ::testing::TestWithParam<ForwardFault> {};
INSTANTIATE_TEST_SUITE_P(Routing, RoutingFaults, ::testing::ValuesIn(routing_faults()),
                         [](const auto& info) { return info.param.name; });
TEST_P(RoutingFaults, NameTheArgumentAndLeaveTheOutput) {
  ForwardCall call;
  GetParam().spoil(call);
  expect_error(GetParam().argument, call.out, [&] {
    shared_layer().forward_routed(call.hidden_states, call.routing, call.output, call.workspace);
  });
}

TEST(LayerForwardTest, NegativeNumberOfTokens) {
  EXPECT_THROW(shared_layer().workspace_bytes(-1), Error);
}

}  // namespace fusedmoe::malformed_layer_calls_test
