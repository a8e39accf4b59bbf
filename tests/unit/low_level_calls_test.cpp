// The steps of a forward by themselves are as well guarded as the whole: Experts::apply,
// start_prepare and start_finalize refuse what does not fit before they write.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "fake_experts.h"
#include "fusedmoe/modular_kernel.h"
#include "malformed.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::low_level_calls_test {

using testing::bitwise_equal;
using testing::Case;
using testing::expect_error;
using testing::make_ids;
using testing::on_cuda;
using testing::Problem;
using testing::reshaped;
using testing::retyped;
using testing::shifted;

const Case kSpec{.num_tokens = 3, .num_experts = 4, .topk = 2, .hidden = 8, .intermediate = 8};

/// Arguments of every step of one variant, valid until one is spoilt.
struct Steps {
  Problem problem = testing::make_problem(kSpec);
  ModularKernel kernel;
  std::shared_ptr<const PackedWeights> packed;
  Tensor out = Tensor::empty(problem.hidden_states.shape(), DType::kF32);
  Tensor workspace, common, workspace2;
  ForwardArgs args;

  explicit Steps(const char* variant)
      : kernel(testing::find_variant(variant).create(testing::make_config(kSpec, DType::kF32))),
        packed(kernel.experts().pack(problem.weights)) {
    const ProblemSize size = ProblemSize::of(kernel.experts().config(), kSpec.num_tokens);
    const WorkspaceSizes sizes = kernel.experts().workspace_sizes(size);
    const auto buffer = [](std::size_t bytes) {
      return Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
    };
    workspace = buffer(kernel.prepare_finalize().sizes(size, {}).workspace_bytes);
    common = buffer(sizes.common_bytes());
    workspace2 = buffer(sizes.workspace2_bytes);
    args.weights = packed.get();
    args.hidden_states = problem.hidden_states;
    args.output = out;
    args.topk_ids = problem.topk_ids;
    args.topk_weights = problem.topk_weights;
    args.prepare_workspace = workspace.data();
    args.workspace13 = common.data();
    args.workspace2 = workspace2.data();
    args.fused_output = TensorView(common.data(), sizes.output_dtype, sizes.output_shape);
    args.weight_and_reduce = kernel.experts().descriptor().weight_and_reduce(
        kernel.experts().config().activation_format);
  }

  void prepare() { kernel.prepare_finalize().start_prepare(args); }
  void apply() { kernel.experts().apply(args); }
  void finalize() { kernel.prepare_finalize().start_finalize(args); }
};

struct StepFault {
  const char* name;
  const char* argument;
  void (Steps::*step)();
  std::function<void(Steps&)> spoil;
};
void PrintTo(const StepFault& fault, std::ostream* stream) {
  *stream << fault.name;
}

std::vector<StepFault> faults() {
  const auto prepare = &Steps::prepare, apply = &Steps::apply, finalize = &Steps::finalize;
  using S = Steps;
  return {
      {"PrepareWithoutWeights", "weights", prepare, [](S& s) { s.args.weights = nullptr; }},
      {"PrepareOfAnotherDevice", "hidden_states", prepare,
       [](S& s) { s.args.hidden_states = on_cuda(s.args.hidden_states); }},
      {"PrepareOfIntegers", "hidden_states", prepare,
       [](S& s) { s.args.hidden_states = retyped(s.args.hidden_states, DType::kI32); }},
      {"PrepareOfAnotherWidth", "hidden_states", prepare,
       [](S& s) {
         s.args.hidden_states = reshaped(s.args.hidden_states, {3, 7});
       }},
      {"PrepareMisaligned", "hidden_states", prepare,
       [](S& s) {
         s.args.hidden_states = shifted(reshaped(s.args.hidden_states, {2, 8}), 2);
       }},
      {"ApplyWithoutWeights", "weights", apply, [](S& s) { s.args.weights = nullptr; }},
      {"ApplyOfAnotherDevice", "hidden_states", apply,
       [](S& s) { s.args.hidden_states = on_cuda(s.args.hidden_states); }},
      {"ApplyOnAStreamOfAnotherDevice", "stream", apply,
       [](S& s) { s.args.stream.device = testing::kCuda; }},
      {"ApplyOfAnotherDType", "hidden_states", apply,
       [](S& s) { s.args.hidden_states = retyped(s.args.hidden_states, DType::kBF16); }},
      {"ApplyMisaligned", "hidden_states", apply,
       [](S& s) { s.args.hidden_states = shifted(s.args.hidden_states, 1); }},
      {"ApplyToAnotherDevice", "fused_output", apply,
       [](S& s) { s.args.fused_output = on_cuda(s.args.fused_output); }},
      {"ApplyToAnotherDType", "fused_output", apply,
       [](S& s) { s.args.fused_output = retyped(s.args.fused_output, DType::kBF16); }},
      {"ApplyToNothing", "fused_output", apply, [](S& s) { s.args.fused_output = {}; }},
      {"FinalizeWithoutWeights", "weights", finalize, [](S& s) { s.args.weights = nullptr; }},
      {"FinalizeToAnotherDevice", "output", finalize,
       [](S& s) { s.args.output = on_cuda(s.args.output); }},
      {"FinalizeToAnotherWidth", "output", finalize,
       [](S& s) {
         s.args.output = reshaped(s.args.output, {3, 7});
       }},
      {"FinalizeToIntegers", "output", finalize,
       [](S& s) { s.args.output = retyped(s.args.output, DType::kI32); }},
      {"FinalizeOfNothing", "fused_output", finalize, [](S& s) { s.args.fused_output = {}; }},
      {"FinalizeOfAnotherDevice", "fused_output", finalize,
       [](S& s) { s.args.fused_output = on_cuda(s.args.fused_output); }},
  };
}

std::vector<StepFault> batched_faults() {
  std::vector<StepFault> all = faults();
  using S = Steps;
  const std::vector<StepFault> more{
      {"PrepareWithoutIds", "topk_ids", &S::prepare, [](S& s) { s.args.topk_ids = {}; }},
      {"PrepareOfIdsElsewhere", "topk_ids", &S::prepare,
       [](S& s) { s.args.topk_ids = on_cuda(s.args.topk_ids); }},
      {"ApplyWithoutCounts", "expert_num_tokens", &S::apply,
       [](S& s) { s.args.expert_num_tokens = {}; }},
      {"ApplyOfCountsElsewhere", "expert_num_tokens", &S::apply,
       [](S& s) { s.args.expert_num_tokens = on_cuda(s.args.expert_num_tokens); }},
      {"FinalizeOfWeightsOfAnotherShape", "topk_weights", &S::finalize,
       [](S& s) {
         s.args.topk_weights = reshaped(s.args.topk_weights, {3, 1});
       }},
  };
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

void expect_fault(const char* variant, const StepFault& fault) {
  SCOPED_TRACE(variant);
  const auto run_until = [&](Steps& steps) {
    for (const auto step : {&Steps::prepare, &Steps::apply, &Steps::finalize}) {
      if (step == fault.step) return;
      (steps.*step)();
    }
  };
  Steps valid(variant);
  run_until(valid);
  ASSERT_NO_THROW((valid.*fault.step)()) << "valid until spoilt";
  Steps steps(variant);
  run_until(steps);
  fault.spoil(steps);
  expect_error(fault.argument, steps.out, [&] { (steps.*fault.step)(); });
}

class StepFaults : public ::testing::TestWithParam<StepFault> {};
INSTANTIATE_TEST_SUITE_P(LowLevel, StepFaults, ::testing::ValuesIn(faults()),
                         [](const auto& info) { return info.param.name; });
TEST_P(StepFaults, NameTheArgumentAndLeaveTheOutput) {
  for (const char* variant : {"cpu", "reference"}) expect_fault(variant, GetParam());
}

class BatchedStepFaults : public ::testing::TestWithParam<StepFault> {};
INSTANTIATE_TEST_SUITE_P(LowLevel, BatchedStepFaults, ::testing::ValuesIn(batched_faults()),
                         [](const auto& info) { return info.param.name; });
TEST_P(BatchedStepFaults, NameTheArgumentAndLeaveTheOutput) {
  for (const char* variant : {"cpu_batched", "reference_batched"}) {
    expect_fault(variant, GetParam());
  }
}

/// Exactly as many bytes as asked for, from malloc: a sanitizer sees the first one beyond; without
/// one, a guard behind does.
TEST(BatchedPrepareTest, MapBeyondTheLocalExpertsWritesNothingOutside) {
  constexpr std::int64_t kTokens = 3, kLocal = 2, kHidden = 5;
  constexpr std::size_t kGuard = 4096;
  const auto prepare = batched().create({}, {});
  const auto packed = testing::FakeExperts::pack_sizes(kLocal, kHidden);
  const Tensor x = testing::make_sample(DType::kF32, {kTokens, kHidden});
  const Tensor ids = make_ids({kTokens, 2}, {0, 1, 2, 3, 1, 2});
  for (const std::int32_t wrong : {2, 3, 1000, 0x7fffffff, -2, -1000}) {
    const Tensor map = make_ids({4}, {0, wrong, 1, wrong});
    ProblemSize problem;
    problem.num_tokens = kTokens;
    problem.topk = 2;
    problem.num_local_experts = kLocal;
    problem.hidden = kHidden;
    problem.dtype = DType::kF32;
    const std::size_t bytes = prepare->sizes(problem, {}).workspace_bytes;
    const Tensor memory =
        Tensor::empty({static_cast<std::int64_t>(bytes + 2 * kGuard)}, DType::kU8);
    std::memset(memory.data(), 0x5a, bytes + 2 * kGuard);
    ForwardArgs args;
    args.weights = packed.get();
    args.hidden_states = x;
    args.topk_ids = ids;
    args.expert_map = map;
    args.prepare_workspace = memory.as<char>() + kGuard;
    prepare->start_prepare(args);
    const auto* guard = memory.as<const unsigned char>();
    for (std::size_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(guard[i], 0x5a) << wrong;
      ASSERT_EQ(guard[kGuard + bytes + i], 0x5a) << wrong;
    }
    EXPECT_TRUE(bitwise_equal(args.expert_num_tokens, make_ids({2}, {1, 2})))
        << "such slots belong to no expert: " << wrong;
  }
}

TEST(PackedForAnotherTest, ConfigurationIsRefused) {
  const std::function<void(Case&)> changes[] = {
      [](Case& c) { c.hidden = 16; },
      [](Case& c) { c.intermediate = 16; },
      [](Case& c) { c.num_experts = 5; },
      [](Case& c) { c.scheme = schemes::unquantized(DType::kF32); },
      [](Case& c) { c.activation = Activation::kGelu; },
      [](Case& c) { c.activation_params.limit = 3.0f; },
      [](Case& c) { c.bias = true; },
  };
  for (const char* variant : {"cpu", "cpu_batched", "cpu_unfused", "reference"}) {
    for (const auto& change : changes) {
      Case other = kSpec;
      change(other);
      Steps steps(variant);
      const Problem wrong = testing::make_problem(other);
      const auto packed = testing::find_variant(variant)
                              .create(testing::make_config(other, DType::kF32))
                              .experts()
                              .pack(wrong.weights);
      EXPECT_FALSE(steps.kernel.experts().accepts(*packed));
      steps.args.weights = packed.get();
      expect_error("weights", steps.out, [&] { steps.apply(); });
      const Tensor memory = Tensor::empty({1 << 20}, DType::kU8);
      expect_error("weights", steps.out, [&] {
        steps.kernel.apply(steps.args, {memory.data(), 1 << 20});
      });
      EXPECT_THROW(steps.kernel.experts().pack(wrong.weights), Error);
    }
  }
}

TEST(PackTest, StreamOfAnotherDeviceIsRefused) {
  for (const char* variant : {"cpu", "reference"}) {
    const Steps steps(variant);
    PackOptions options;
    options.stream = Stream{testing::kCuda};
    try {
      steps.kernel.experts().pack(steps.problem.weights, options);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), "options.stream");
    }
  }
}

/// Monolithic experts take logits of any activation dtype.
TEST(MonolithicKernelTest, LogitsOfEveryDTypeGiveTheBitsOfModularExperts) {
  for (const std::string name : {"cpu", "reference"}) {
    Case spec = kSpec;
    const Problem problem = testing::make_problem(spec);
    RouterConfig router;
    router.num_experts = spec.num_experts;
    router.topk = spec.topk;
    router.renormalize = true;
    MoeConfig config = testing::make_config(spec, DType::kF32);
    config.routing_method = routing_method(router);
    const ModularKernel modular = testing::find_variant(name).create(config);
    const ModularKernel monolithic = testing::find_variant(name + "_monolithic").create(config);
    const auto packed = modular.experts().pack(problem.weights);
    EXPECT_TRUE(monolithic.experts().accepts(*packed));
    const Tensor memory = Tensor::empty({1 << 24}, DType::kU8);
    const Workspace workspace{memory.data(), 1 << 24};
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const Tensor logits = testing::make_sample(dtype, {3, 4});
      const Tensor ids = Tensor::empty({3, 2}, DType::kI32);
      const Tensor mono_ids = Tensor::empty({3, 2}, DType::kI32);
      const Tensor weights = Tensor::empty({3, 2}, DType::kF32);
      const Tensor mono_weights = Tensor::empty({3, 2}, DType::kF32);
      const Tensor expected = Tensor::empty({3, 8}, DType::kF32);
      const Tensor actual = Tensor::empty({3, 8}, DType::kF32);
      route(router, logits, {}, {ids, weights});
      ForwardArgs args;
      args.weights = packed.get();
      args.hidden_states = problem.hidden_states;
      args.output = expected;
      args.topk_ids = ids;
      args.topk_weights = weights;
      modular.apply(args, workspace);
      args.output = actual;
      args.topk_ids = mono_ids;
      args.topk_weights = mono_weights;
      args.router = &router;
      args.router_logits = logits;
      monolithic.apply(args, workspace);
      EXPECT_TRUE(bitwise_equal(actual, expected)) << ::fusedmoe::name(dtype);
      EXPECT_TRUE(bitwise_equal(mono_ids, ids));
      EXPECT_TRUE(bitwise_equal(mono_weights, weights));
    }
  }
}

TEST(MonolithicKernelTest, ExpertsGetLogitsAndRouter) {
  testing::FakeSizes sizes;
  sizes.monolithic = true;
  auto experts = std::make_shared<testing::FakeExperts>(testing::FakeOptions{}, sizes);
  ForwardArgs seen;
  experts->on_apply = [&](const ForwardArgs& given) { seen = given; };
  const ModularKernel kernel(no_ep().create({}, {}), experts);
  const auto packed = testing::FakeExperts::pack_sizes(4, 5);
  const Tensor x = testing::make_sample(DType::kF32, {3, 5}),
               logits = testing::make_sample(DType::kF32, {3, 4});
  const Tensor output = Tensor::zeros({3, 5}, DType::kF32);
  const Tensor ids = Tensor::zeros({3, 2}, DType::kI32);
  const Tensor topk_weights = Tensor::zeros({3, 2}, DType::kF32);
  RouterConfig router;
  router.num_experts = 4;
  router.topk = 2;
  ForwardArgs args;
  args.weights = packed.get();
  args.hidden_states = x;
  args.output = output;
  args.topk_ids = ids;
  args.topk_weights = topk_weights;
  args.router_logits = logits;
  args.router = &router;
  const Tensor workspace =
      Tensor::empty({static_cast<std::int64_t>(kernel.workspace_bytes(3))}, DType::kU8);
  kernel.apply(args, {workspace.data(), static_cast<std::size_t>(workspace.nbytes())});
  EXPECT_EQ(seen.router_logits.data(), logits.data());
  EXPECT_EQ(seen.router, &router);
  EXPECT_TRUE(bitwise_equal(output, x));
}

}  // namespace fusedmoe::low_level_calls_test
