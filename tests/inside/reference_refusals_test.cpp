// What the reference experts refuse: configurations, by reason, and arguments, by name.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cpu/experts.h"
#include "error_text.h"
#include "fusedmoe/tensor.h"
#include "reference/experts.h"
#include "testing/cases.h"

namespace fusedmoe::reference_refusals_test {

using testing::Problem;

TEST(ReferenceRefusalsTest, RefusalsCarryTheirReason) {
  const auto reason = [](auto change) {
    MoeConfig config = testing::make_config({.num_experts = 6, .topk = 1}, DType::kBF16);
    change(config);
    const Support support = reference::descriptor().supports(config);
    EXPECT_FALSE(support.text.empty());
    return support.reason;
  };
  using C = MoeConfig;
  EXPECT_EQ(reason([](C&) {}), Reason::kSupported);
  EXPECT_EQ(reason([](C& c) { c.batch_invariant = true; }), Reason::kSupported);
  EXPECT_EQ(reason([](C& c) { c.parallel = {2, 2, 2, 1}; }), Reason::kSupported);
  EXPECT_EQ(reason([](C& c) { c.device = {DeviceKind::kCuda, 0}; }), Reason::kDevice);
  EXPECT_EQ(reason([](C& c) { c.dtype = DType::kE4M3; }), Reason::kDType);
  EXPECT_EQ(reason([](C& c) { c.scheme.weights.value = DType::kI8; }), Reason::kQuantScheme);
  EXPECT_EQ(reason([](C& c) { c.activation = Activation::kSitu; }), Reason::kActivation);
  EXPECT_EQ(reason([](C& c) { c.hidden = 0; }), Reason::kShape);
  EXPECT_EQ(reason([](C& c) {
              c.scheme = schemes::mxfp4_w4a16();
              c.intermediate = 33;
            }),
            Reason::kShape);
  EXPECT_EQ(reason([](C& c) { c.activation_format = ActivationFormat::kBatchedExperts; }),
            Reason::kSupported);
  EXPECT_EQ(reason([](C& c) {
              c.activation_format = ActivationFormat::kBatchedExperts;
              c.hooks = true;
            }),
            Reason::kHooks);
  EXPECT_EQ(reason([](C& c) {
              c.monolithic = true;
              c.routing_method = RoutingMethod::kNone;
            }),
            Reason::kRoutingMethod);
  EXPECT_EQ(reason([](C& c) {
              c.apply_router_weight_on_input = true;
              c.topk = 2;
            }),
            Reason::kRouterWeightOnInput);
  EXPECT_EQ(reason([](C& c) { c.num_local_experts = 3; }), Reason::kExpertMap);
}

TEST(ReferenceRefusalsTest, BadArgumentsAreNamed) {
  const Problem problem = testing::make_problem({.num_tokens = 3, .hidden = 8, .intermediate = 4});
  const auto experts =
      reference::descriptor().create(testing::make_config(problem.spec, DType::kF32), {});
  const auto packed = experts->pack(problem.weights);
  const WorkspaceSizes sizes = experts->workspace_sizes(ProblemSize::of(experts->config(), 3));
  std::vector<char> workspace13(sizes.common_bytes()), workspace2(sizes.workspace2_bytes);
  const Tensor out = Tensor::zeros({3, 8}, DType::kF32);
  const auto fault = [&](auto change) {
    ForwardArgs args;
    args.weights = packed.get();
    args.fused_output = out;
    args.hidden_states = problem.hidden_states;
    args.topk_ids = problem.topk_ids;
    args.topk_weights = problem.topk_weights;
    args.workspace13 = workspace13.data();
    args.workspace2 = workspace2.data();
    change(args);
    try {
      experts->apply(args);
    } catch (const Error& error) {
      return error.argument();
    }
    return std::string();
  };
  using A = ForwardArgs;
  EXPECT_EQ(fault([](A&) {}), "");
  EXPECT_EQ(fault([](A& a) { a.weights = nullptr; }), "weights");
  EXPECT_EQ(fault([](A& a) { a.hidden_states = {}; }), "hidden_states");
  EXPECT_EQ(fault([](A& a) { a.hidden_states = a.hidden_states.slice(1, 0, 8, 2); }),
            "hidden_states");
  EXPECT_EQ(fault([](A& a) { a.hidden_scales = a.topk_weights; }), "hidden_scales");
  EXPECT_EQ(fault([](A& a) { a.topk_ids = a.topk_weights; }), "topk_ids");
  EXPECT_EQ(fault([](A& a) { a.topk_weights = {}; }), "topk_weights");
  EXPECT_EQ(fault([](A& a) { a.expert_map = a.topk_weights; }), "expert_map");
  EXPECT_EQ(fault([](A& a) { a.fused_output = a.fused_output.slice(0, 0, 2); }), "fused_output");
  EXPECT_EQ(fault([](A& a) { a.workspace13 = nullptr; }), "workspace13");
  EXPECT_EQ(fault([](A& a) { a.workspace2 = nullptr; }), "workspace2");
}

// Rows that a caller quantized otherwise than prepare would: on CUDA nothing reads their scale.
TEST(ReferenceRefusalsTest, StaticScaleOfRowsIsThatOfTheWeights) {
  testing::Case spec;
  spec.scheme = parse_scheme("fp8_tensor_static");
  const Problem problem = testing::make_problem(spec);
  const std::int64_t tokens = problem.hidden_states.size(0);
  const Tensor codes = Tensor::zeros(problem.hidden_states.shape(), DType::kE4M3);
  for (const ExpertsDescriptor* descriptor : {&cpu::descriptor(), &reference::descriptor()}) {
    const auto experts = descriptor->create(testing::make_config(spec, DType::kF32), {});
    const auto packed = experts->pack(problem.weights);
    const float scale = packed->info().a1_scale.value();
    const WorkspaceSizes sizes =
        experts->workspace_sizes(ProblemSize::of(experts->config(), tokens));
    std::vector<char> workspace13(sizes.common_bytes()), workspace2(sizes.workspace2_bytes);
    const Tensor out = Tensor::zeros(problem.hidden_states.shape(), DType::kF32);
    const auto fault = [&](float given) {
      const Tensor scales = Tensor::empty({1, 1}, DType::kF32);
      *scales.as<float>() = given;
      ForwardArgs args;
      args.weights = packed.get();
      args.fused_output = out;
      args.hidden_states = codes;
      args.hidden_scales = scales;
      args.topk_ids = problem.topk_ids;
      args.topk_weights = problem.topk_weights;
      args.workspace13 = workspace13.data();
      args.workspace2 = workspace2.data();
      return testing::error_text([&] { experts->apply(args); });
    };
    EXPECT_EQ(fault(scale), "no error") << descriptor->name();
    EXPECT_NE(fault(2 * scale).find("hidden_scales"), std::string::npos) << descriptor->name();
  }
}

}  // namespace fusedmoe::reference_refusals_test
