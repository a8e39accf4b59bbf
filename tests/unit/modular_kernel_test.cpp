// The modular kernel: pairing, order of calls, shared memory, and results of every composition.
#include "fusedmoe/modular_kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "error_text.h"
#include "fake_experts.h"
#include "fusedmoe/tensor.h"
#include "testing/compare.h"

namespace fusedmoe::modular_kernel_test {

using testing::argument_of;
using testing::bitwise_equal;
using testing::FakeExperts;
using testing::FakeOptions;
using testing::FakeSizes;
using testing::fill_nan;
using testing::make_f32;
using testing::make_ids;
using testing::make_sample;
using testing::to_vector;

constexpr std::size_t kCanaryBytes = 512;

/// One call on memory of exactly the needed size, filled with 0xff (NaN in every float format),
/// with canaries behind.
struct Call {
  Tensor hidden_states, topk_ids, topk_weights, expert_map;
  std::int64_t num_experts = 4, num_local_experts = 4;
  bool weight_on_input = false;
  std::shared_ptr<const PackedWeights> packed;
  Tensor output, workspace;
  std::size_t workspace_bytes = 0;

  FakeSizes sizes() const {
    FakeSizes sizes;
    sizes.num_experts = num_experts;
    sizes.num_local_experts = num_local_experts;
    sizes.topk = topk_ids.size(1);
    sizes.hidden = hidden_states.size(1);
    sizes.dtype = hidden_states.dtype();
    sizes.has_expert_map = expert_map.defined();
    sizes.weight_on_input = weight_on_input;
    return sizes;
  }
  void prepare(const ModularKernel& kernel) {
    packed = FakeExperts::pack_sizes(num_local_experts, hidden_states.size(1));
    output = Tensor::empty(hidden_states.shape(), hidden_states.dtype());
    fill_nan(output);
    workspace_bytes = kernel.workspace_bytes(hidden_states.size(0));
    workspace =
        Tensor::empty({static_cast<std::int64_t>(workspace_bytes + kCanaryBytes)}, DType::kU8);
    std::memset(workspace.data(), 0xff, workspace_bytes);
    std::memset(workspace.as<char>() + workspace_bytes, 0x5a, kCanaryBytes);
  }
  ForwardArgs args() const {
    ForwardArgs args;
    args.weights = packed.get();
    args.output = output;
    args.hidden_states = hidden_states;
    args.topk_ids = topk_ids;
    args.topk_weights = topk_weights;
    args.expert_map = expert_map;
    args.num_experts = num_experts;
    return args;
  }
  Tensor apply(const ModularKernel& kernel) {
    prepare(kernel);
    kernel.apply(args(), {workspace.data(), workspace_bytes});
    EXPECT_TRUE(canaries_intact());
    return output;
  }
  bool canaries_intact() const {
    const auto* begin = workspace.as<const unsigned char>() + workspace_bytes;
    return std::all_of(begin, begin + kCanaryBytes, [](unsigned char c) { return c == 0x5a; });
  }
};

Call make_call(DType dtype = DType::kF32) {
  return {make_sample(dtype, {3, 5}), make_ids({3, 2}, {2, 0, -1, 3, 1, -1}),
          make_f32({3, 2}, {0.5f, 2, 9, 0.25f, 1, 9})};
}

std::vector<float> expected_of(const Call& call) {
  std::vector<float> expected;
  const std::int64_t hidden = call.hidden_states.size(1), topk = call.topk_ids.size(1);
  for (std::int64_t i = 0; i < call.hidden_states.numel(); ++i) {
    float sum = 0;
    for (std::int64_t j = 0; j < topk; ++j) {
      const std::int64_t flat = i / hidden * topk + j;
      std::int32_t expert = call.topk_ids.as<std::int32_t>()[flat];
      if (expert >= 0 && call.expert_map) expert = call.expert_map.as<std::int32_t>()[expert];
      if (expert < 0) continue;
      sum += call.topk_weights.as<float>()[flat] * static_cast<float>(expert + 1) *
             load_f32(call.hidden_states.data(), call.hidden_states.dtype(), i);
    }
    expected.push_back(sum);
  }
  return expected;
}

std::shared_ptr<const PrepareAndFinalize> make_prepare_finalize(ActivationFormat format) {
  const bool is_batched = format == ActivationFormat::kBatchedExperts;
  return (is_batched ? batched() : no_ep()).create({}, {});
}

ModularKernel make_kernel(std::shared_ptr<FakeExperts> experts) {
  const ActivationFormat format = experts->config().activation_format;
  return {make_prepare_finalize(format), std::move(experts)};
}
ModularKernel make_kernel(const FakeOptions& options, const Call& call) {
  return make_kernel(std::make_shared<FakeExperts>(options, call.sizes()));
}

TEST(ModularKernelTest, PairsThatDoNotFitAreErrors) {
  constexpr auto kStandard = ActivationFormat::kStandard;
  constexpr auto kBatched = ActivationFormat::kBatchedExperts;
  const auto fake = [](ActivationFormat format, WeightAndReduce reduce) {
    FakeOptions options;
    options.format = format;
    options.reduce = reduce;
    return std::make_shared<FakeExperts>(options);
  };
  const auto monolithic = [](ActivationFormat format, WeightAndReduce reduce) {
    FakeSizes sizes;
    sizes.monolithic = true;
    return std::make_shared<FakeExperts>(FakeOptions{format, reduce}, sizes);
  };
  const auto make_no_ep = [] { return no_ep().create({}, {}); };
  const auto make_batched = [] { return batched().create({}, {}); };
  const auto pair = [](std::shared_ptr<const PrepareAndFinalize> prepare_finalize,
                       std::shared_ptr<const Experts> experts) {
    return argument_of([&] { ModularKernel(prepare_finalize, experts); });
  };
  EXPECT_EQ(pair(nullptr, fake(kStandard, WeightAndReduce::kNoOp)), "prepare_finalize");
  EXPECT_EQ(pair(make_no_ep(), nullptr), "experts");
  EXPECT_EQ(pair(make_no_ep(), fake(kBatched, WeightAndReduce::kDelegate)), "experts");
  EXPECT_EQ(pair(make_batched(), fake(kStandard, WeightAndReduce::kDelegate)), "experts");
  EXPECT_EQ(pair(make_batched(), fake(kBatched, WeightAndReduce::kNoOp)), "experts");
  EXPECT_EQ(pair(make_no_ep(), monolithic(kStandard, WeightAndReduce::kDelegate)), "experts");
  EXPECT_EQ(pair(make_batched(), monolithic(kBatched, WeightAndReduce::kDelegate)), "experts");

  EXPECT_EQ(pair(make_no_ep(), fake(kStandard, WeightAndReduce::kDelegate)), "no error");
  EXPECT_EQ(pair(make_batched(), fake(kBatched, WeightAndReduce::kDelegate)), "no error");
  EXPECT_EQ(pair(make_no_ep(), monolithic(kStandard, WeightAndReduce::kNoOp)), "no error");
}

struct Composition {
  const char* name;
  FakeOptions options;
};
std::vector<Composition> compositions() {
  std::vector<Composition> list{
      {"no_op", {}}, {"delegate", {}}, {"batched", {}}, {"no_workspace13", {}}};
  list[1].options.reduce = WeightAndReduce::kDelegate;
  list[2].options = {ActivationFormat::kBatchedExperts, WeightAndReduce::kDelegate};
  list[3].options.workspace13_per_token = 0;
  return list;
}

class Compositions : public ::testing::TestWithParam<Composition> {};
INSTANTIATE_TEST_SUITE_P(ModularKernel, Compositions, ::testing::ValuesIn(compositions()),
                         [](const auto& info) { return info.param.name; });

TEST_P(Compositions, ResultOnPoisonedMemoryOfExactSize) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Call call = make_call(dtype);
    // Sums of two products of short numbers: exact in every one of the dtypes' fp32 sums.
    const auto values = to_vector(call.apply(make_kernel(GetParam().options, call)));
    const auto expected = expected_of(call);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float tolerance = dtype == DType::kF32 ? 0 : std::abs(expected[i]) / 64;
      EXPECT_NEAR(values[i], expected[i], tolerance) << name(dtype) << " " << i;
    }
  }
}

TEST_P(Compositions, ExpertMapLeavesOutRemoteExperts) {
  Call call = make_call();
  call.num_experts = 6;
  call.num_local_experts = 2;
  call.expert_map = make_ids({6}, {1, -1, -1, 0, -1, -1});
  EXPECT_EQ(to_vector(call.apply(make_kernel(GetParam().options, call))), expected_of(call));
}

TEST_P(Compositions, OneByteLessIsAnErrorBeforeAnyWork) {
  Call call = make_call();
  const ModularKernel kernel = make_kernel(GetParam().options, call);
  call.prepare(kernel);
  EXPECT_EQ(argument_of([&] {
              kernel.apply(call.args(), {call.workspace.data(), call.workspace_bytes - 1});
            }),
            "workspace");
  for (float x : to_vector(call.output)) EXPECT_TRUE(std::isnan(x));
}

TEST_P(Compositions, WorkspaceGrowsWithTokens) {
  for (const bool weight_on_input : {false, true}) {
    FakeSizes sizes{.topk = 1, .dtype = DType::kBF16, .weight_on_input = weight_on_input};
    const ModularKernel kernel =
        make_kernel(std::make_shared<FakeExperts>(GetParam().options, sizes));
    std::size_t last = 0;
    for (std::int64_t tokens = 0; tokens <= 300; ++tokens) {
      const std::size_t bytes = kernel.workspace_bytes(tokens);
      EXPECT_GE(bytes, last) << tokens;
      EXPECT_EQ(bytes % 256, 0u);
      last = bytes;
    }
  }
}

TEST_P(Compositions, WeightOnInputIsAppliedOnce) {
  Call call = make_call();
  call.topk_ids = make_ids({3, 1}, {2, -1, 1});
  call.topk_weights = make_f32({3, 1}, {0.5f, 4, 0.25f});
  call.weight_on_input = true;
  EXPECT_EQ(to_vector(call.apply(make_kernel(GetParam().options, call))), expected_of(call));
}

TEST_P(Compositions, SameInputSameBits) {
  Call first = make_call(DType::kBF16), second = make_call(DType::kBF16);
  const ModularKernel kernel = make_kernel(GetParam().options, first);
  EXPECT_TRUE(bitwise_equal(first.apply(kernel), second.apply(kernel)));
}

TEST_P(Compositions, NoTokensGoThroughEveryStep) {
  auto experts = std::make_shared<FakeExperts>(GetParam().options);
  int calls = 0;
  experts->on_apply = [&](const ForwardArgs& args) {
    ++calls;
    EXPECT_EQ(args.fused_output.numel(), 0);
  };
  const ModularKernel kernel = make_kernel(experts);
  const auto packed = FakeExperts::pack_sizes(4, 5);
  ForwardArgs args;
  args.weights = packed.get();
  args.output = TensorView(static_cast<void*>(nullptr), DType::kF32, {0, 5});
  args.hidden_states = args.output;
  args.topk_ids = TensorView(static_cast<void*>(nullptr), DType::kI32, {0, 2});
  args.topk_weights = TensorView(static_cast<void*>(nullptr), DType::kF32, {0, 2});
  const std::size_t bytes = kernel.workspace_bytes(0);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  kernel.apply(args, {workspace.data(), bytes});
  EXPECT_EQ(calls, 1);
  args.topk_weights = TensorView(static_cast<void*>(nullptr), DType::kF32, {0, 3});
  EXPECT_EQ(argument_of([&] { kernel.apply(args, {}); }), "topk_weights")
      << "arguments are checked all the same";
}

/// What the experts were given by a kernel of these experts.
ForwardArgs seen_by_experts(FakeOptions options, Call& call) {
  auto experts = std::make_shared<FakeExperts>(options, call.sizes());
  ForwardArgs seen;
  experts->on_apply = [&](const ForwardArgs& args) { seen = args; };
  call.apply(make_kernel(experts));
  return seen;
}

TEST(ModularKernelTest, ExpertsWriteToTheCallersOutputWhereItFits) {
  Call call = make_call();
  ForwardArgs seen = seen_by_experts({}, call);
  EXPECT_EQ(seen.fused_output.data(), call.output.data());

  FakeOptions unreduced;
  unreduced.reduce = WeightAndReduce::kDelegate;
  seen = seen_by_experts(unreduced, call);
  EXPECT_NE(seen.fused_output.data(), call.output.data());

  // With one slot per token the rows to reduce have the output's shape: reduced in place.
  call.topk_ids = make_ids({3, 1}, {2, -1, 1});
  call.topk_weights = make_f32({3, 1}, {0.5f, 4, 0.25f});
  seen = seen_by_experts(unreduced, call);
  EXPECT_EQ(seen.fused_output.data(), call.output.data());
  EXPECT_EQ(to_vector(call.output), expected_of(call));
}

TEST(ModularKernelTest, OnlyOutputThatIsNotTheCallersTakesWorkspace) {
  FakeOptions options;
  options.workspace13_per_token = options.workspace2_per_token = 0;
  const FakeSizes sizes{.hidden = 256};
  const auto bytes = [&] {
    return make_kernel(std::make_shared<FakeExperts>(options, sizes)).workspace_bytes(100);
  };
  EXPECT_EQ(bytes(), 0u);
  options.reduce = WeightAndReduce::kDelegate;
  EXPECT_EQ(bytes(), std::size_t{4} * 100 * 2 * 256);
}

TEST(ModularKernelTest, OutputOfADTypeThatTheExpertsDoNotWriteIsAnError) {
  Call call = make_call(DType::kBF16);
  const ModularKernel kernel = make_kernel({}, call);
  call.prepare(kernel);
  call.output = Tensor::empty({3, 5}, DType::kF32);
  EXPECT_EQ(argument_of([&] {
              kernel.apply(call.args(), {call.workspace.data(), call.workspace_bytes});
            }),
            "output");
}

TEST(ModularKernelTest, OutputOfAnotherShapeSharesMemoryWithWorkspace13) {
  Call call = make_call();
  FakeOptions options{ActivationFormat::kBatchedExperts, WeightAndReduce::kDelegate};
  const ForwardArgs seen = seen_by_experts(options, call);
  EXPECT_EQ(seen.fused_output.data(), seen.workspace13);
}

TEST(ModularKernelTest, WorkspacePartsAreDisjointAndAligned) {
  for (const Composition& composition : compositions()) {
    SCOPED_TRACE(composition.name);
    Call call = make_call(DType::kBF16);
    const ForwardArgs seen = seen_by_experts(composition.options, call);
    const auto* begin = call.workspace.as<const char>();
    const auto offset = [&](const void* part) { return static_cast<const char*>(part) - begin; };
    EXPECT_EQ(offset(seen.workspace13) % 256, 0);
    EXPECT_EQ(offset(seen.workspace2) % 256, 0);
    const FakeExperts experts(composition.options, call.sizes());
    const WorkspaceSizes sizes = experts.workspace_sizes(ProblemSize::of(experts.config(), 3));
    EXPECT_GE(offset(seen.workspace2),
              offset(seen.workspace13) + static_cast<std::ptrdiff_t>(sizes.workspace13_bytes));
    EXPECT_LE(offset(seen.workspace2) + static_cast<std::ptrdiff_t>(sizes.workspace2_bytes),
              static_cast<std::ptrdiff_t>(call.workspace_bytes));
  }
}

TEST(ModularKernelTest, ExpertsGetTheCallersRoutingAndFlag) {
  Call call = make_call();
  ForwardArgs seen = seen_by_experts({}, call);
  EXPECT_EQ(seen.topk_ids.data(), call.topk_ids.data());
  EXPECT_EQ(seen.topk_weights.data(), call.topk_weights.data());
  EXPECT_EQ(seen.hidden_states.data(), call.hidden_states.data());
  EXPECT_FALSE(seen.expert_num_tokens.defined());
  EXPECT_FALSE(seen.preparation.apply_router_weight_on_input);

  seen = seen_by_experts({ActivationFormat::kBatchedExperts, WeightAndReduce::kDelegate}, call);
  EXPECT_EQ(seen.hidden_states.shape(), (Shape{4, 3, 5}));
  EXPECT_EQ(seen.expert_num_tokens.shape(), Shape{4});

  call.topk_ids = make_ids({3, 1}, {2, -1, 1});
  call.topk_weights = make_f32({3, 1}, {0.5f, 4, 0.25f});
  call.weight_on_input = true;
  EXPECT_TRUE(seen_by_experts({}, call).preparation.apply_router_weight_on_input);
}

/// Writes down what the kernel asks of it, in order.
class Recording : public PrepareAndFinalize {
 public:
  explicit Recording(std::vector<std::string>& events)
      : PrepareAndFinalize(no_ep()), events_(events) {}
  TransportSizes sizes(const ProblemSize& caller, const Preparation&) const override {
    return {caller, caller, 8};
  }

 private:
  void do_start_prepare(ForwardArgs& args, const TransportSizes&) const override {
    events_.push_back("start prepare");
    if (args.hidden_states.size(0) == 0) return;
    // Dispatched routing must replace the caller's from here on.
    auto* ids = static_cast<std::int32_t*>(args.prepare_workspace);
    ids[0] = 1;
    auto* weights = reinterpret_cast<float*>(ids + 1);
    weights[0] = 3;
    args.topk_ids = TensorView(ids, DType::kI32, {1, 1});
    args.topk_weights = TensorView(weights, DType::kF32, {1, 1});
  }
  void do_finish_prepare(ForwardArgs&) const override { events_.push_back("finish prepare"); }
  void do_start_finalize(const ForwardArgs& args) const override {
    events_.push_back("start finalize");
    if (args.output.size(0) > 0) {
      EXPECT_EQ(args.topk_ids.data(), args.prepare_workspace);
    }
    EXPECT_EQ(args.fused_output.data(), args.output.data());
    EXPECT_EQ(args.weight_and_reduce, WeightAndReduce::kNoOp);
  }
  void do_finish_finalize(const ForwardArgs&) const override {
    events_.push_back("finish finalize");
  }

  std::vector<std::string>& events_;
};

TEST(ModularKernelTest, PrepareThenExpertsThenFinalizeOnDispatchedRouting) {
  std::vector<std::string> events;
  Call call{make_f32({1, 2}, {1, 10}), make_ids({1, 1}, {0}), make_f32({1, 1}, {1})};
  auto experts = std::make_shared<FakeExperts>(FakeOptions{}, call.sizes());
  experts->on_apply = [&](const ForwardArgs&) { events.push_back("experts"); };
  call.apply(ModularKernel(std::make_shared<Recording>(events), experts));
  EXPECT_EQ(events, (std::vector<std::string>{"start prepare", "finish prepare", "experts",
                                              "start finalize", "finish finalize"}));
  EXPECT_EQ(to_vector(call.output), (std::vector<float>{6, 60}));
}

// A rank without tokens takes part in every step, or the others wait for it.
TEST(ModularKernelTest, EveryStepIsCalledForNoTokens) {
  std::vector<std::string> events;
  Call call{Tensor::empty({0, 2}, DType::kF32), Tensor::empty({0, 1}, DType::kI32),
            Tensor::empty({0, 1}, DType::kF32)};
  auto experts = std::make_shared<FakeExperts>(FakeOptions{}, call.sizes());
  experts->on_apply = [&](const ForwardArgs&) { events.push_back("experts"); };
  call.apply(ModularKernel(std::make_shared<Recording>(events), experts));
  EXPECT_EQ(events, (std::vector<std::string>{"start prepare", "finish prepare", "experts",
                                              "start finalize", "finish finalize"}));
}

TEST(ModularKernelTest, NaNWeightsPropagateToTheirTokens) {
  Call call = make_call();
  call.topk_weights.as<float>()[1] = std::numeric_limits<float>::quiet_NaN();
  const auto values = to_vector(call.apply(make_kernel({}, call)));
  for (std::size_t i = 0; i < 15; ++i) EXPECT_EQ(std::isnan(values[i]), i < 5) << i;
}

TEST(ModularKernelTest, DuplicateIdsBelongToTheStandardFormat) {
  Call call = make_call();
  call.topk_ids = make_ids({3, 2}, {2, 2, -1, -1, 1, 1});
  EXPECT_EQ(to_vector(call.apply(make_kernel({}, call))), expected_of(call));
  const ModularKernel batched_kernel =
      make_kernel({ActivationFormat::kBatchedExperts, WeightAndReduce::kDelegate}, call);
  EXPECT_EQ(argument_of([&] { call.apply(batched_kernel); }), "topk_ids");
  for (float x : to_vector(call.output)) EXPECT_TRUE(std::isnan(x));
}

}  // namespace fusedmoe::modular_kernel_test
