// Malformed calls of the modular kernel: each must give an Error that names the argument, and leave
// the output alone.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fake_experts.h"
#include "fusedmoe/modular_kernel.h"
#include "malformed.h"

namespace fusedmoe::malformed_calls_test {

using testing::expect_error;
using testing::FakeExperts;
using testing::FakeOptions;
using testing::kCuda;
using testing::make_ids;
using testing::make_sample;
using testing::on_cuda;
using testing::reshaped;
using testing::retyped;
using testing::shifted;
using testing::transposed;

constexpr std::int64_t kTokens = 3, kTopk = 2, kHidden = 8, kLocal = 4, kGlobal = 6;
/// A valid call with memory to spare, so that a malformed one could do harm.
struct KernelCall {
  Tensor x = make_sample(DType::kF32, {kTokens + 2, kHidden});
  Tensor out = Tensor::empty({kTokens + 2, kHidden}, DType::kF32);
  Tensor ids = make_ids({kTokens, kTopk}, {5, 0, -1, 3, 1, -1});
  Tensor weights = make_sample(DType::kF32, {kTokens, kTopk});
  Tensor map = make_ids({kGlobal}, {0, -1, 2, 3, -1, 1});
  Tensor logits = make_sample(DType::kF32, {kTokens, kGlobal});
  Tensor bias = make_sample(DType::kF32, {kGlobal});
  RouterConfig router;
  std::shared_ptr<const PackedWeights> packed = FakeExperts::pack_sizes(kLocal, kHidden);
  Tensor memory = Tensor::empty({1 << 16}, DType::kU8);
  ForwardArgs args;
  Workspace workspace{memory.data(), static_cast<std::size_t>(memory.nbytes())};

  TensorView memory_as_f32() const { return {memory.data(), DType::kF32, {kTokens}}; }

  KernelCall() {
    router.num_experts = kGlobal;
    router.topk = kTopk;
    args.weights = packed.get();
    args.output = out.slice(0, 0, kTokens);
    args.hidden_states = x.slice(0, 0, kTokens);
    args.topk_ids = ids;
    args.topk_weights = weights;
    args.router_logits = logits;
    args.router = &router;
    args.score_correction_bias = bias;
    args.expert_map = map;
    args.num_experts = kGlobal;
  }
};

struct KernelFault {
  const char* name;
  const char* argument;
  std::function<void(KernelCall&)> spoil;
};
void PrintTo(const KernelFault& fault, std::ostream* stream) {
  *stream << fault.name;
}

/// Faults in what every kernel looks at.
std::vector<KernelFault> common_faults() {
  return {
      {"NoWeights", "weights", [](auto& c) { c.args.weights = nullptr; }},
      {"WeightsOfOthers", "weights",
       [](auto& c) {
         PackedWeights::Info info = c.packed->info();
         info.implementation = "other";
         c.packed = std::make_shared<testing::FakePacked>(info);
         c.args.weights = c.packed.get();
       }},
      {"NoHiddenStates", "hidden_states", [](auto& c) { c.args.hidden_states = {}; }},
      {"HiddenStatesOfIntegers", "hidden_states",
       [](auto& c) { c.args.hidden_states = retyped(c.args.hidden_states, DType::kI32); }},
      {"HiddenStatesOfRank1", "hidden_states",
       [](auto& c) { c.args.hidden_states = reshaped(c.x, {kHidden}); }},
      {"HiddenStatesTooNarrow", "hidden_states",
       [](auto& c) {
         c.args.hidden_states = reshaped(c.x, {kTokens, kHidden - 1});
       }},
      {"HiddenStatesStrided", "hidden_states",
       [](auto& c) { c.args.hidden_states = transposed(c.args.hidden_states); }},
      {"HiddenStatesStridedAlongARow", "hidden_states",
       [](auto& c) {
         c.args.hidden_states =
             reshaped(c.memory_as_f32(), {kTokens, 2 * kHidden}).slice(1, 0, 2 * kHidden, 2);
       }},
      {"HiddenStatesMisaligned", "hidden_states",
       [](auto& c) { c.args.hidden_states = shifted(c.args.hidden_states, 2); }},
      {"HiddenStatesOnAnotherDevice", "hidden_states",
       [](auto& c) { c.args.hidden_states = on_cuda(c.args.hidden_states); }},
      {"NoOutput", "output", [](auto& c) { c.args.output = {}; }},
      {"OutputOfAnotherDType", "output",
       [](auto& c) { c.args.output = retyped(c.args.output, DType::kBF16); }},
      {"OutputWithFewerRows", "output",
       [](auto& c) {
         c.args.output = reshaped(c.out, {kTokens - 1, kHidden});
       }},
      {"OutputStrided", "output", [](auto& c) { c.args.output = transposed(c.args.output); }},
      {"OutputMisaligned", "output", [](auto& c) { c.args.output = shifted(c.args.output, 1); }},
      {"OutputOnAnotherDevice", "output", [](auto& c) { c.args.output = on_cuda(c.args.output); }},
      {"OutputIsTheInput", "output", [](auto& c) { c.args.hidden_states = c.args.output; }},
      {"OutputOverlapsTheInputByOneRow", "output",
       [](auto& c) { c.args.hidden_states = c.out.slice(0, kTokens - 1, 2 * kTokens - 1); }},
      {"OutputOverlapsTheMap", "output",
       [](auto& c) { c.args.expert_map = TensorView(c.out.data(), DType::kI32, {kGlobal}); }},
      {"MapOfAnotherLength", "expert_map",
       [](auto& c) { c.args.expert_map = c.map.slice(0, 0, kGlobal - 1); }},
      {"MapOfAnotherDType", "expert_map",
       [](auto& c) { c.args.expert_map = retyped(c.map, DType::kF32); }},
      {"MapBeyondTheLocalExperts", "expert_map",
       [](auto& c) { c.map.template as<std::int32_t>()[1] = kLocal; }},
      {"MapBelowMinusOne", "expert_map",
       [](auto& c) { c.map.template as<std::int32_t>()[1] = -2; }},
      {"MapNamesALocalExpertTwice", "expert_map",
       [](auto& c) { c.map.template as<std::int32_t>()[1] = 2; }},
      {"NoMapWhereSomeAreLocal", "expert_map", [](auto& c) { c.args.expert_map = {}; }},
      {"MapOnAnotherDevice", "expert_map", [](auto& c) { c.args.expert_map = on_cuda(c.map); }},
      {"FewerGlobalThanLocalExperts", "num_experts",
       [](auto& c) { c.args.num_experts = kLocal - 1; }},
      {"NegativeNumberOfExperts", "num_experts", [](auto& c) { c.args.num_experts = -1; }},
      {"NoWorkspace", "workspace", [](auto& c) { c.workspace = {}; }},
      {"WorkspaceTooSmall", "workspace", [](auto& c) { c.workspace.bytes = 255; }},
      {"WorkspaceMisaligned", "workspace",
       [](auto& c) { c.workspace.data = c.memory.template as<char>() + 32; }},
      {"WorkspaceOverlapsTheOutput", "workspace",
       [](auto& c) {
         c.args.output = TensorView(c.memory.data(), DType::kF32, {kTokens, kHidden});
       }},
      {"WorkspaceOverlapsTheInput", "workspace",
       [](auto& c) {
         c.args.hidden_states = TensorView(c.memory.data(), DType::kF32, {kTokens, kHidden});
       }},
      {"StreamOfAnotherDevice", "stream", [](auto& c) { c.args.stream.device = kCuda; }},
  };
}

std::vector<KernelFault> modular_faults() {
  std::vector<KernelFault> faults = common_faults();
  const std::vector<KernelFault> more{
      {"NoIds", "topk_ids", [](auto& c) { c.args.topk_ids = {}; }},
      {"IdsOf64Bits", "topk_ids",
       [](auto& c) {
         c.args.topk_ids = TensorView(c.memory.data(), DType::kI64, {kTokens, kTopk});
       }},
      {"IdsOfFewerTokens", "topk_ids",
       [](auto& c) {
         c.args.topk_ids = reshaped(c.ids, {kTokens - 1, kTopk});
       }},
      {"IdsOfRank1", "topk_ids", [](auto& c) { c.args.topk_ids = reshaped(c.ids, {kTokens}); }},
      {"IdsWithoutColumns", "topk_ids",
       [](auto& c) {
         c.args.topk_ids = reshaped(c.ids, {kTokens, 0});
       }},
      {"MoreIdsThanExperts", "topk_ids",
       [](auto& c) {
         c.args.topk_ids = TensorView(c.memory.data(), DType::kI32, {kTokens, kGlobal + 1});
       }},
      {"IdTooLarge", "topk_ids", [](auto& c) { c.ids.template as<std::int32_t>()[5] = kGlobal; }},
      {"IdBelowMinusOne", "topk_ids", [](auto& c) { c.ids.template as<std::int32_t>()[0] = -2; }},
      {"IdOfGarbage", "topk_ids",
       [](auto& c) {
         c.ids.template as<std::int32_t>()[3] = std::numeric_limits<std::int32_t>::min();
       }},
      {"IdsMisaligned", "topk_ids", [](auto& c) { c.args.topk_ids = shifted(c.ids, 2); }},
      {"IdsStrided", "topk_ids", [](auto& c) { c.args.topk_ids = transposed(c.ids); }},
      {"IdsOnAnotherDevice", "topk_ids", [](auto& c) { c.args.topk_ids = on_cuda(c.ids); }},
      {"OutputOverlapsTheIds", "output",
       [](auto& c) {
         c.args.topk_ids = TensorView(c.out.data(), DType::kI32, {kTokens, kTopk});
       }},
      {"WorkspaceOverlapsTheIds", "workspace",
       [](auto& c) {
         c.args.topk_ids = TensorView(c.memory.data(), DType::kI32, {kTokens, kTopk});
       }},
      {"NoRouterWeights", "topk_weights", [](auto& c) { c.args.topk_weights = {}; }},
      {"RouterWeightsInBF16", "topk_weights",
       [](auto& c) { c.args.topk_weights = retyped(c.weights, DType::kBF16); }},
      {"RouterWeightsOfAnotherShape", "topk_weights",
       [](auto& c) {
         c.args.topk_weights = reshaped(c.weights, {kTokens, 1});
       }},
  };
  faults.insert(faults.end(), more.begin(), more.end());
  return faults;
}

std::vector<KernelFault> monolithic_faults() {
  std::vector<KernelFault> faults = common_faults();
  const std::vector<KernelFault> more{
      {"NoRouter", "router", [](auto& c) { c.args.router = nullptr; }},
      {"RouterOfOtherExperts", "router.num_experts", [](auto& c) { c.router.num_experts = 7; }},
      {"RouterTakesMoreThanThereAre", "router.topk", [](auto& c) { c.router.topk = 7; }},
      {"NoLogits", "router_logits", [](auto& c) { c.args.router_logits = {}; }},
      {"LogitsOfIntegers", "router_logits",
       [](auto& c) { c.args.router_logits = retyped(c.logits, DType::kI32); }},
      {"LogitsOfLocalExpertsOnly", "router_logits",
       [](auto& c) {
         c.args.router_logits = reshaped(c.logits, {kTokens, kLocal});
       }},
      {"CorrectionBiasTooShort", "score_correction_bias",
       [](auto& c) { c.args.score_correction_bias = c.bias.slice(0, 0, kLocal); }},
      {"OutputOverlapsTheLogits", "output",
       [](auto& c) {
         c.args.router_logits = TensorView(c.out.data(), DType::kF32, {kTokens, kGlobal});
       }},
      {"WeightOnInput", "router.apply_router_weight_on_input",
       [](auto& c) {
         c.router.topk = 1;
         c.router.apply_router_weight_on_input = true;
       }},
  };
  faults.insert(faults.end(), more.begin(), more.end());
  return faults;
}

ModularKernel kernel_of(const std::string& kind) {
  testing::FakeSizes sizes{kGlobal, kLocal, kTopk, kHidden};
  sizes.has_expert_map = true;
  sizes.monolithic = kind == "monolithic";
  if (kind != "batched") {
    return {no_ep().create({}, {}), std::make_shared<FakeExperts>(FakeOptions{}, sizes)};
  }
  const FakeOptions options{ActivationFormat::kBatchedExperts, WeightAndReduce::kDelegate};
  return {batched().create({}, {}), std::make_shared<FakeExperts>(options, sizes)};
}

void expect_fault(const std::string& kind, const KernelFault& fault) {
  const ModularKernel kernel = kernel_of(kind);
  KernelCall call;
  ASSERT_NO_THROW(kernel.apply(call.args, call.workspace)) << "the call is valid until spoilt";
  fault.spoil(call);
  expect_error(fault.argument, call.out, [&] { kernel.apply(call.args, call.workspace); });
}

class ModularFaults : public ::testing::TestWithParam<KernelFault> {};
INSTANTIATE_TEST_SUITE_P(Kernel, ModularFaults, ::testing::ValuesIn(modular_faults()),
                         [](const auto& info) { return info.param.name; });
TEST_P(ModularFaults, NameTheArgumentAndLeaveTheOutput) {
  for (const std::string kind : {"standard", "batched"}) {
    SCOPED_TRACE(kind);
    expect_fault(kind, GetParam());
  }
}

class MonolithicFaults : public ::testing::TestWithParam<KernelFault> {};
INSTANTIATE_TEST_SUITE_P(Kernel, MonolithicFaults, ::testing::ValuesIn(monolithic_faults()),
                         [](const auto& info) { return info.param.name; });
TEST_P(MonolithicFaults, NameTheArgumentAndLeaveTheOutput) {
  expect_fault("monolithic", GetParam());
}

}  // namespace fusedmoe::malformed_calls_test
