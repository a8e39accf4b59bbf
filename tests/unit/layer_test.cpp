// MoeLayer on random layers: the sum of its parts, bits, workspaces, and what it says of itself.
#include "fusedmoe/layer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "layer_problem.h"
#include "testing/compare.h"

namespace {
std::atomic<std::int64_t> allocations{0};
}  // namespace

// Counted, so that a forward can be seen to allocate nothing.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(std::max<std::size_t>(size, 1))) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(std::max<std::size_t>(size, 1));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace fusedmoe::layer_test {

using testing::bitwise_equal;
using testing::compare;
using testing::layer_options;
using testing::LayerSpec;
using testing::make_hidden_states;
using testing::make_layer_weights;
using testing::poison;

LayerSpec gated_spec() {
  LayerSpec spec;
  spec.shared_experts = spec.shared_gate = true;
  return spec;
}

/// Forward with everything checked around it: poisoned output and workspace of the exact size, a
/// canary behind it.
struct Result {
  Tensor output, router_logits, topk_ids, topk_weights;
};
Result run(const MoeLayer& layer, const TensorView& x) {
  constexpr std::size_t kCanaryBytes = 256;
  const std::int64_t num_tokens = x.size(0);
  const RouterConfig& router = layer.router();
  Result result{Tensor::empty(x.shape(), x.dtype()),
                Tensor::empty({num_tokens, router.num_experts}, DType::kF32),
                Tensor::empty({num_tokens, router.topk}, DType::kI32),
                Tensor::empty({num_tokens, router.topk}, DType::kF32)};
  for (const Tensor* tensor :
       {&result.output, &result.router_logits, &result.topk_ids, &result.topk_weights}) {
    poison(*tensor);
  }
  const std::size_t bytes = layer.workspace_bytes(num_tokens);
  const Tensor workspace =
      Tensor::empty({static_cast<std::int64_t>(bytes + kCanaryBytes)}, DType::kU8);
  std::memset(workspace.data(), 0xff, bytes + kCanaryBytes);
  layer.forward(x, result.output, {workspace.data(), bytes},
                {.router_logits = result.router_logits,
                 .topk_ids = result.topk_ids,
                 .topk_weights = result.topk_weights});
  const auto* canary = workspace.as<const unsigned char>() + bytes;
  EXPECT_TRUE(
      std::all_of(canary, canary + kCanaryBytes, [](unsigned char c) { return c == 0xff; }));
  return result;
}

Tensor rows(const TensorView& x, std::int64_t begin, std::int64_t end) {
  return Tensor(x.slice(0, begin, end), nullptr);
}

class AllExperts : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Layer, AllExperts,
                         ::testing::Values("cpu", "cpu_batched", "cpu_monolithic", "reference",
                                           "reference_batched", "reference_monolithic"),
                         [](const auto& info) { return info.param; });

TEST_P(AllExperts, SameInputSameBitsWhateverTheBatchAndThreads) {
  const MoeLayer layer(make_layer_weights(gated_spec()), layer_options(DType::kBF16, GetParam()));
  const Tensor x = make_hidden_states(DType::kBF16, 64, 64);
  const Result all = run(layer, x);
  EXPECT_TRUE(bitwise_equal(all.output, run(layer, x).output));
  const Result seven = run(layer, rows(x, 20, 27));
  EXPECT_TRUE(bitwise_equal(seven.output, rows(all.output, 20, 27)));
  EXPECT_TRUE(bitwise_equal(seven.router_logits, rows(all.router_logits, 20, 27)));
  for (const std::int64_t token : {0, 25, 63}) {
    const Result one = run(layer, rows(x, token, token + 1));
    EXPECT_TRUE(bitwise_equal(one.output, rows(all.output, token, token + 1))) << token;
  }
  LayerOptions options = layer_options(DType::kBF16, GetParam());
  options.num_threads = 1;
  const MoeLayer alone(make_layer_weights(gated_spec()), options);
  EXPECT_TRUE(bitwise_equal(all.output, run(alone, x).output));
}

TEST_P(AllExperts, AgreesWithReferenceInFloat) {
  const LayerSpec spec = gated_spec();
  const MoeLayer reference(make_layer_weights(spec), layer_options(DType::kF32, "reference"));
  const MoeLayer layer(make_layer_weights(spec), layer_options(DType::kF32, GetParam()));
  const Tensor x = make_hidden_states(DType::kF32, 9, 64);
  const Result expected = run(reference, x), actual = run(layer, x);
  EXPECT_TRUE(bitwise_equal(expected.topk_ids, actual.topk_ids));
  // "cpu" multiplies f32 hidden states with fp32 sums in another order; a mistake is of order one.
  EXPECT_LE(compare(actual.output, expected.output).max_norm_relative, 1e-5);
}

TEST_P(AllExperts, ForwardAllocatesNothing) {
  const MoeLayer layer(make_layer_weights(gated_spec()), layer_options(DType::kBF16, GetParam()));
  const Tensor x = make_hidden_states(DType::kBF16, 7, 64);
  const Tensor output = Tensor::empty(x.shape(), x.dtype());
  const std::size_t bytes = layer.workspace_bytes(7);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  layer.forward(x, output, {workspace.data(), bytes});  // starts the threads
  const std::int64_t before = allocations;
  layer.forward(x, output, {workspace.data(), bytes});
  EXPECT_EQ(allocations - before, 0);
}

TEST_P(AllExperts, WorkspaceIsExactAndMonotone) {
  const MoeLayer layer(make_layer_weights(gated_spec()), layer_options(DType::kBF16, GetParam()));
  std::size_t last = 0;
  for (std::int64_t tokens = 0; tokens <= 70; ++tokens) {
    const std::size_t bytes = layer.workspace_bytes(tokens);
    EXPECT_GE(bytes, last);
    last = bytes;
  }
  const Tensor x = make_hidden_states(DType::kBF16, 3, 64);
  const Tensor output = Tensor::empty(x.shape(), x.dtype());
  const std::size_t bytes = layer.workspace_bytes(3);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  EXPECT_NO_THROW(layer.forward(x, output, {workspace.data(), bytes}));
  EXPECT_THROW(layer.forward(x, output, {workspace.data(), bytes - 1}), Error);
}

TEST_P(AllExperts, NoTokens) {
  const MoeLayer layer(make_layer_weights(gated_spec()), layer_options(DType::kBF16, GetParam()));
  const Tensor x = Tensor::empty({0, 64}, DType::kBF16);
  const std::size_t bytes = layer.workspace_bytes(0);
  const Tensor memory = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  const Workspace workspace{bytes > 0 ? memory.data() : nullptr, bytes};
  EXPECT_NO_THROW(layer.forward(x, x, workspace));
  EXPECT_EQ(layer.forward(x).shape(), (Shape{0, 64}));
  if (layer.config().monolithic) return;
  const Tensor ids = Tensor::empty({0, 2}, DType::kI32),
               weights = Tensor::empty({0, 2}, DType::kF32);
  EXPECT_NO_THROW(layer.forward_routed(x, {ids, weights}, x, workspace));
}

TEST_P(AllExperts, CallersOfSeveralThreadsShareALayer) {
  const MoeLayer layer(make_layer_weights(gated_spec()), layer_options(DType::kBF16, GetParam()));
  const Tensor x = make_hidden_states(DType::kBF16, 12, 64);
  const Tensor expected = layer.forward(x);
  std::vector<Tensor> outputs(4);
  std::vector<std::thread> threads;
  threads.reserve(outputs.size());
  for (Tensor& output : outputs) threads.emplace_back([&] { output = layer.forward(x); });
  for (std::thread& thread : threads) thread.join();
  for (const Tensor& output : outputs) EXPECT_TRUE(bitwise_equal(output, expected));
}

TEST(LayerTest, DetailsAreTheRoutersResults) {
  LayerWeights weights = make_layer_weights({});
  const RouterWeights router_weights = weights.router_weights;
  const RouterConfig router = weights.router;
  const MoeLayer layer(std::move(weights), layer_options(DType::kBF16, "cpu"));
  const Tensor x = make_hidden_states(DType::kBF16, 5, 64);
  const Result result = run(layer, x);

  const Tensor logits = Tensor::empty({5, 8}, DType::kF32);
  router_logits(router_weights, x, logits);
  const Tensor ids = Tensor::empty({5, 2}, DType::kI32);
  const Tensor weights_out = Tensor::empty({5, 2}, DType::kF32);
  route(router, logits, {}, {ids, weights_out});
  EXPECT_TRUE(bitwise_equal(result.router_logits, logits));
  EXPECT_TRUE(bitwise_equal(result.topk_ids, ids));
  EXPECT_TRUE(bitwise_equal(result.topk_weights, weights_out));
}

TEST(LayerTest, RoutedForwardWithTheSameRoutingGivesTheSameBits) {
  const MoeLayer layer(make_layer_weights(gated_spec()), layer_options(DType::kBF16, "cpu"));
  const Tensor x = make_hidden_states(DType::kBF16, 7, 64);
  const Result result = run(layer, x);
  const Tensor output = Tensor::empty(x.shape(), x.dtype());
  const std::size_t bytes = layer.workspace_bytes(7);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  layer.forward_routed(x, {result.topk_ids, result.topk_weights}, output,
                       {workspace.data(), bytes});
  EXPECT_TRUE(bitwise_equal(output, result.output));

  // All slots empty: what remains is the shared experts' output, so not zero.
  std::fill_n(result.topk_ids.as<std::int32_t>(), 14, -1);
  layer.forward_routed(x, {result.topk_ids, result.topk_weights}, output,
                       {workspace.data(), bytes});
  const MoeLayer unshared(make_layer_weights({}), layer_options(DType::kBF16, "cpu"));
  const Tensor zeros = Tensor::empty(x.shape(), x.dtype());
  unshared.forward_routed(x, {result.topk_ids, result.topk_weights}, zeros,
                          {workspace.data(), bytes});
  EXPECT_TRUE(bitwise_equal(zeros, Tensor::zeros(x.shape(), x.dtype())));
  EXPECT_FALSE(bitwise_equal(output, zeros));
}

/// Output of one expert alone for every row of x, as a layer whose router has no choice.
Tensor single_expert(const ExpertWeights& expert, const TensorView& x) {
  LayerWeights weights;
  weights.router.num_experts = weights.router.topk = 1;
  weights.router.scoring = ScoringFunc::kTopkSoftmax;
  weights.router_weights.weight = Tensor::zeros({1, expert.hidden}, DType::kBF16);
  weights.experts = expert;
  return MoeLayer(std::move(weights), layer_options(x.dtype(), "reference")).forward(x);
}

TEST(LayerTest, SharedExpertsAreAddedWithTheirGate) {
  const Tensor x = make_hidden_states(DType::kF32, 6, 64);
  LayerSpec spec;
  const auto forward = [&] {
    return MoeLayer(make_layer_weights(spec), layer_options(DType::kF32, "reference")).forward(x);
  };
  const Tensor routed = forward();
  spec.shared_experts = true;
  const Tensor ungated = forward();
  spec.shared_gate = true;
  const Tensor gated = forward();
  const SharedExperts shared = *make_layer_weights(spec).shared_experts;
  const Tensor alone = single_expert(shared.weights, x);

  Tensor ungated_sum = Tensor::empty(x.shape(), DType::kF32);
  Tensor gated_sum = Tensor::empty(x.shape(), DType::kF32);
  for (std::int64_t t = 0; t < 6; ++t) {
    double logit = 0;
    for (std::int64_t i = 0; i < 64; ++i) {
      logit += double{x.as<float>()[t * 64 + i]} * load_f32(shared.gate.data(), DType::kBF16, i);
    }
    for (std::int64_t i = t * 64; i < (t + 1) * 64; ++i) {
      const float routed_value = routed.as<float>()[i];
      ungated_sum.as<float>()[i] = routed_value + alone.as<float>()[i];
      gated_sum.as<float>()[i] =
          static_cast<float>(routed_value + alone.as<float>()[i] / (1 + std::exp(-logit)));
    }
  }
  EXPECT_TRUE(bitwise_equal(ungated, ungated_sum));
  // The gate is rounded to f32 before it weights, the sum after: a few units of 2^-24.
  EXPECT_LE(compare(gated, gated_sum).max_norm_relative, 3e-7);
}

TEST(LayerTest, RouterWeightOnInputScalesTheInputOnly) {
  LayerSpec spec;
  spec.experts.topk = 1;
  spec.experts.weight_on_input = true;
  LayerWeights weights = make_layer_weights(spec);
  weights.router.scoring = ScoringFunc::kTopkSigmoid;
  weights.router.renormalize = false;
  const std::vector<ExpertMatrices> experts = weights.experts.experts;
  const ExpertWeights all = weights.experts;
  const MoeLayer layer(std::move(weights), layer_options(DType::kF32, "reference"));
  EXPECT_EQ(layer.config().routing_method, RoutingMethod::kRouter);
  const Tensor x = make_hidden_states(DType::kF32, 4, 64);
  const Result result = run(layer, x);
  for (std::int64_t t = 0; t < 4; ++t) {
    const std::int32_t id = result.topk_ids.as<std::int32_t>()[t];
    Tensor scaled = Tensor::empty({1, 64}, DType::kF32);
    for (std::int64_t i = 0; i < 64; ++i) {
      scaled.as<float>()[i] = x.as<float>()[t * 64 + i] * result.topk_weights.as<float>()[t];
    }
    ExpertWeights one = all;
    one.experts = {experts[static_cast<std::size_t>(id)]};
    EXPECT_TRUE(bitwise_equal(rows(result.output, t, t + 1), single_expert(one, scaled)));
  }
}

TEST(LayerTest, CustomRoutingMayLeaveSlotsOut) {
  LayerWeights weights = make_layer_weights({});
  std::int32_t second = -1;
  weights.router.custom = [&](const TensorView&, const TensorView& ids, const TensorView& w) {
    for (std::int64_t t = 0; t < ids.size(0); ++t) {
      ids.as<std::int32_t>()[2 * t] = 3;
      ids.as<std::int32_t>()[2 * t + 1] = second;
      w.as<float>()[2 * t] = 1;
      w.as<float>()[2 * t + 1] = NAN;
    }
  };
  const ExpertWeights all = weights.experts;
  const MoeLayer layer(std::move(weights), layer_options(DType::kF32, "reference"));
  EXPECT_EQ(layer.config().routing_method, RoutingMethod::kCustom);
  const Tensor x = make_hidden_states(DType::kF32, 3, 64);
  ExpertWeights one = all;
  one.experts = {all.experts[3]};
  EXPECT_TRUE(bitwise_equal(layer.forward(x), single_expert(one, x)));

  second = 8;
  const Tensor output = Tensor::zeros(x.shape(), DType::kF32);
  const std::size_t bytes = layer.workspace_bytes(3);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  EXPECT_THROW(layer.forward(x, output, {workspace.data(), bytes}), Error);
  EXPECT_TRUE(bitwise_equal(output, Tensor::zeros(x.shape(), DType::kF32)));
}

TEST(LayerTest, MonolithicExpertsGiveTheBitsOfTheModularOnes) {
  const Tensor x = make_hidden_states(DType::kBF16, 7, 64);
  LayerWeights weights = make_layer_weights(gated_spec());
  for (const std::string backend : {"cpu", "reference"}) {
    // Any router: here with groups, a bias and a factor, the second time.
    const MoeLayer modular(weights, layer_options(DType::kBF16, backend));
    const MoeLayer monolithic(weights, layer_options(DType::kBF16, backend + "_monolithic"));
    weights.router.num_expert_group = 4;
    weights.router.topk_group = 2;
    weights.router.routed_scaling_factor = 2.5f;
    weights.router_weights.score_correction_bias = Tensor::zeros({8}, DType::kF32);
    const Result expected = run(modular, x), actual = run(monolithic, x);
    EXPECT_TRUE(bitwise_equal(expected.output, actual.output));
    EXPECT_TRUE(bitwise_equal(expected.topk_ids, actual.topk_ids));
    EXPECT_TRUE(bitwise_equal(expected.topk_weights, actual.topk_weights));
    // Given ids go to the modular experts beside them.
    const testing::Scratch scratch(monolithic, x.size(0));
    testing::poison(actual.output);
    monolithic.forward_routed(x, {actual.topk_ids, actual.topk_weights}, actual.output,
                              scratch.workspace);
    EXPECT_TRUE(bitwise_equal(expected.output, actual.output));
  }
}

TEST(LayerTest, RouterParametersAreCopied) {
  LayerWeights weights = make_layer_weights({});
  const Tensor weight = weights.router_weights.weight;
  const MoeLayer layer(std::move(weights), layer_options(DType::kBF16, "reference"));
  const Tensor x = make_hidden_states(DType::kBF16, 3, 64);
  const Tensor before = layer.forward(x);
  poison(weight);
  EXPECT_TRUE(bitwise_equal(layer.forward(x), before));
}

TEST(LayerTest, ConfigIsComplete) {
  LayerSpec spec;
  spec.experts.bias = true;
  spec.experts.activation = Activation::kSwigluOai;
  spec.experts.activation_params.alpha = 1.5f;
  LayerWeights weights = make_layer_weights(spec);
  weights.router.scoring = ScoringFunc::kSigmoid;
  weights.router_weights.score_correction_bias = Tensor::zeros({8}, DType::kF32);
  weights.router.num_expert_group = 4;
  weights.router.topk_group = 2;
  LayerOptions options = layer_options(DType::kF16, "cpu_batched");
  options.batch_invariant = true;
  const MoeLayer layer(std::move(weights), options);
  const MoeConfig& config = layer.config();
  EXPECT_EQ(config.num_experts, 8);
  EXPECT_EQ(config.num_local_experts, 8);
  EXPECT_EQ(config.topk, 2);
  EXPECT_EQ(config.hidden, 64);
  EXPECT_EQ(config.intermediate, 48);
  EXPECT_EQ(config.dtype, DType::kF16);
  EXPECT_EQ(config.scheme, schemes::unquantized(DType::kBF16));
  EXPECT_EQ(config.activation, Activation::kSwigluOai);
  EXPECT_EQ(config.activation_params.alpha, 1.5f);
  EXPECT_TRUE(config.has_bias);
  EXPECT_FALSE(config.has_expert_map);
  EXPECT_FALSE(config.apply_router_weight_on_input);
  EXPECT_EQ(config.routing_method, RoutingMethod::kRouter);
  EXPECT_EQ(config.activation_format, ActivationFormat::kBatchedExperts);
  EXPECT_TRUE(config.batch_invariant);
  EXPECT_EQ(layer.selection().pair(), "cpu+batched");
  EXPECT_EQ(layer.packed_weights().info().num_experts, 8);
}

TEST(LayerTest, PlanLineNamesWhatRuns) {
  LayerSpec spec;
  spec.experts.scheme = schemes::mxfp4_w4a16();
  spec.experts.intermediate = 64;
  set_num_threads(2);
  const MoeLayer layer(make_layer_weights(spec), layer_options(DType::kBF16, ""));
  EXPECT_EQ(layer.plan_line(),
            "cpu+no_ep mxfp4_w4a16 bf16 isa=" + std::string(cpu_isa()) + " threads=2");
  spec.shared_experts = true;
  const MoeLayer batched(make_layer_weights(spec), layer_options(DType::kF32, "reference_batched"));
  EXPECT_EQ(batched.plan_line(),
            "reference+batched mxfp4_w4a16 f32 shared=reference+no_ep isa=generic "
            "threads=2");
  set_num_threads(0);
}

TEST(LayerTest, ProgressCountsEveryExpertOnce) {
  LayerOptions options = layer_options(DType::kBF16, "cpu");
  std::vector<std::pair<std::int64_t, std::int64_t>> calls;
  options.progress = [&](std::int64_t done, std::int64_t total) {
    calls.emplace_back(done, total);
  };
  const MoeLayer layer(make_layer_weights(gated_spec()), options);
  ASSERT_EQ(calls.size(), 9u);
  for (std::size_t i = 0; i < 9; ++i) {
    EXPECT_EQ(calls[i], (std::pair<std::int64_t, std::int64_t>(i + 1, 9)));
  }
}

TEST(LayerTest, Moves) {
  MoeLayer first(make_layer_weights({}), layer_options(DType::kBF16, "reference"));
  const Tensor x = make_hidden_states(DType::kBF16, 2, 64);
  const Tensor before = first.forward(x);
  MoeLayer second = std::move(first);
  EXPECT_TRUE(bitwise_equal(second.forward(x), before));

  const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
  EXPECT_THROW(first.forward(x), Error);  // NOLINT(bugprone-use-after-move): what is left is tested
  EXPECT_THROW(first.forward(x, output, {}), Error);
  EXPECT_THROW(first.forward_routed(x, {}, output, {}), Error);
  EXPECT_THROW(first.workspace_bytes(1), Error);
  EXPECT_THROW(first.config(), Error);
  EXPECT_THROW(first.selection(), Error);
  EXPECT_THROW(first.router(), Error);
  EXPECT_THROW(first.packed_weights(), Error);
  EXPECT_THROW(first.plan_line(), Error);
  EXPECT_THROW(first.plan_json(), Error);
  first = std::move(second);
  EXPECT_TRUE(bitwise_equal(first.forward(x), before)) << "it may hold another layer";
}

}  // namespace fusedmoe::layer_test
