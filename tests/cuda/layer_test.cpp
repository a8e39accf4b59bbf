// MoeLayer on the GPU: against the reference layer, eager and replayed from a graph.
#include "fusedmoe/layer.h"

#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "../unit/error_text.h"
#include "../unit/layer_problem.h"
#include "cuda_test.h"
#include "fusedmoe/balance.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {
namespace {

using testing::argument_of;
using testing::bitwise_equal;
using testing::compare;
using testing::kGpu;
using testing::LayerSpec;
using testing::make_hidden_states;
using testing::make_layer_weights;
using testing::poison;
using testing::to_gpu;
using testing::to_host;

struct Family {
  std::string name;
  LayerSpec spec;
  ScoringFunc scoring = ScoringFunc::kSoftmax;
  bool groups_and_bias = false;
  DType dtype = DType::kBF16;
};
void PrintTo(const Family& family, std::ostream* stream) {
  *stream << family.name;
}

std::vector<Family> families() {
  Family mixtral{.name = "mixtral"};
  Family qwen2{.name = "qwen2"};
  qwen2.spec.shared_experts = qwen2.spec.shared_gate = true;
  Family deepseek{.name = "deepseek", .scoring = ScoringFunc::kSigmoid, .groups_and_bias = true};
  deepseek.spec.shared_experts = true;
  Family llama4{.name = "llama4", .scoring = ScoringFunc::kTopkSigmoid};
  llama4.spec.experts.topk = 1;
  llama4.spec.experts.weight_on_input = true;
  llama4.spec.shared_experts = true;
  Family gpt_oss{.name = "gpt_oss", .scoring = ScoringFunc::kTopkSoftmax};
  gpt_oss.spec.experts.scheme = schemes::mxfp4_w4a16();
  gpt_oss.spec.experts.activation = Activation::kSwigluOai;
  gpt_oss.spec.experts.bias = true;
  Family f16 = qwen2;
  f16.name = "qwen2_f16";
  f16.dtype = DType::kF16;
  f16.spec.experts.scheme = schemes::unquantized(DType::kF16);
  Family longcat{.name = "longcat"};
  longcat.spec.zero_experts = 8;
  Family longcat_shared = qwen2;
  longcat_shared.name = "longcat_shared";
  longcat_shared.spec.zero_experts = 8;
  Family nemotron = deepseek;
  nemotron.name = "nemotron";
  nemotron.spec.latent = 64;
  nemotron.spec.experts.activation = Activation::kRelu2NoMul;
  Family latent_zero = longcat_shared;
  latent_zero.name = "latent_zero";
  latent_zero.spec.latent = 320;  // wider than the layer
  Family phimoe{.name = "phimoe", .scoring = ScoringFunc::kSparsemixer};
  std::vector<Family> all{mixtral, qwen2,          deepseek, llama4,      gpt_oss, f16,
                          longcat, longcat_shared, nemotron, latent_zero, phimoe};
  for (Family& family : all) {
    family.spec.experts.num_experts = 16;
    const bool two = family.scoring == ScoringFunc::kSparsemixer;
    if (family.spec.experts.topk > 1) family.spec.experts.topk = two ? 2 : 4;
    family.spec.experts.hidden = 256;
    family.spec.experts.intermediate = 192;
  }
  return all;
}

LayerWeights make_weights(const Family& family) {
  LayerWeights weights = make_layer_weights(family.spec);
  weights.router.scoring = family.scoring;
  weights.router.renormalize =
      family.scoring != ScoringFunc::kTopkSigmoid && family.scoring != ScoringFunc::kSparsemixer;
  weights.router.sparsemixer_jitter = 0.2F;
  if (family.groups_and_bias) {
    weights.router.num_expert_group = 4;
    weights.router.topk_group = 2;
    weights.router.routed_scaling_factor = 2.5f;
    weights.router_weights.score_correction_bias =
        testing::random_tensor(DType::kF32, {weights.router.num_experts}, 0.1, 105);
  }
  return weights;
}

LayerOptions gpu_options(std::string require = "", DType dtype = DType::kBF16) {
  LayerOptions options;
  options.dtype = dtype;
  options.require = std::move(require);
  options.device = kGpu;
  return options;
}

/// Output, workspace and details of one layer and number of tokens, on the GPU.
struct Buffers {
  Tensor output, workspace, logits, ids, weights;

  Buffers(const MoeLayer& layer, std::int64_t num_tokens) {
    const MoeConfig& config = layer.config();
    output = Tensor::empty({num_tokens, layer.hidden()}, config.dtype, kGpu);
    workspace = Tensor::empty({static_cast<std::int64_t>(layer.workspace_bytes(num_tokens))},
                              DType::kU8, kGpu);
    logits = Tensor::empty({num_tokens, layer.router().num_choices()}, DType::kF32, kGpu);
    ids = Tensor::empty({num_tokens, config.topk}, DType::kI32, kGpu);
    weights = Tensor::empty({num_tokens, config.topk}, DType::kF32, kGpu);
    poison_all();
  }
  void poison_all() const {
    fill_bytes(workspace, 0xff, Stream{kGpu});
    for (const Tensor* tensor : {&output, &logits, &ids, &weights}) poison(*tensor);
  }
  Workspace scratch() const {
    return {workspace.data(), static_cast<std::size_t>(workspace.numel())};
  }
  /// All results are wanted.
  ForwardOptions wanted(std::optional<Stream> stream = std::nullopt) const {
    return {.router_logits = logits, .topk_ids = ids, .topk_weights = weights, .stream = stream};
  }
};

Tensor run(const MoeLayer& layer, const Tensor& x) {
  const Buffers buffers(layer, x.size(0));
  layer.forward(x, buffers.output, buffers.scratch(), buffers.wanted());
  return to_host(buffers.output);
}

class CudaLayer : public testing::CudaTestWith<Family> {};
INSTANTIATE_TEST_SUITE_P(Families, CudaLayer, ::testing::ValuesIn(families()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CudaLayer, AgreesWithTheReference) {
  const LayerWeights weights = make_weights(GetParam());
  const MoeLayer layer(weights, gpu_options("", GetParam().dtype));
  EXPECT_EQ(layer.config().device, kGpu);
  EXPECT_NE(layer.plan_line().find("cuda:0"), std::string::npos) << layer.plan_line();
  const MoeLayer reference(weights, testing::layer_options(GetParam().dtype, "reference"));
  for (const std::int64_t num_tokens : {1, 2, 7, 64, 300}) {
    SCOPED_TRACE(num_tokens);
    const Tensor x = make_hidden_states(GetParam().dtype, num_tokens, layer.hidden());
    const Buffers buffers(layer, num_tokens);
    const Tensor gpu_x = to_gpu(x);
    layer.forward(gpu_x, buffers.output, buffers.scratch(), buffers.wanted());

    const Tensor ids = Tensor::empty(buffers.ids.shape(), DType::kI32);
    const Tensor logits = Tensor::empty(buffers.logits.shape(), DType::kF32);
    const Tensor expected = Tensor::empty(x.shape(), x.dtype());
    const Tensor memory = Tensor::empty(
        {static_cast<std::int64_t>(reference.workspace_bytes(num_tokens))}, DType::kU8);
    reference.forward(x, expected, {memory.data(), static_cast<std::size_t>(memory.numel())},
                      {.router_logits = logits, .topk_ids = ids});
    // fp32 sums of 256 products against double.
    EXPECT_LE(compare(to_host(buffers.logits), logits).max_element, 1e-5);
    EXPECT_TRUE(bitwise_equal(to_host(buffers.ids), ids));
    // bf16: the activated rows and the output are rounded to 8 bits, here as there, but from sums
    // in another order; 1e-2 of the largest value is what the project allows.
    const testing::Difference difference = compare(to_host(buffers.output), expected);
    EXPECT_FALSE(difference.nonfinite_mismatch);
    EXPECT_LE(difference.max_norm_relative, 1e-2) << difference.to_string();
    EXPECT_TRUE(bitwise_equal(to_host(layer.forward(gpu_x)), to_host(buffers.output)))
        << "the convenience function";
    EXPECT_TRUE(bitwise_equal(to_host(gpu_x), x)) << "the input was changed";
  }
}

TEST_P(CudaLayer, AGraphReplaysTheSameBits) {
  const MoeLayer layer(make_weights(GetParam()), gpu_options("", GetParam().dtype));
  for (const std::int64_t num_tokens : {1, 33}) {
    const Tensor x = to_gpu(make_hidden_states(GetParam().dtype, num_tokens, layer.hidden()));
    const Tensor expected = run(layer, x);
    const Buffers buffers(layer, num_tokens);
    const OwnedStream stream(kGpu);
    const Graph graph(stream, [&] {
      layer.forward(x, buffers.output, buffers.scratch(), buffers.wanted(stream));
    });
    for (int i = 0; i < 3; ++i) {
      buffers.poison_all();
      synchronize(Stream{kGpu});
      graph.launch(stream);
      synchronize(stream);
      EXPECT_TRUE(bitwise_equal(to_host(buffers.output), expected)) << "launch " << i;
    }
    // The graph reads its input when it is launched.
    const Tensor other = testing::random_tensor(x.dtype(), x.shape(), 1, 106);
    copy(other, x, stream);
    graph.launch(stream);
    synchronize(stream);
    EXPECT_TRUE(bitwise_equal(to_host(buffers.output), run(layer, to_gpu(other))));
  }
}

TEST_P(CudaLayer, TheSameBitsAgain) {
  const MoeLayer layer(make_weights(GetParam()), gpu_options("", GetParam().dtype));
  const Tensor x = to_gpu(make_hidden_states(GetParam().dtype, 200, layer.hidden()));
  const Tensor first = run(layer, x);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(bitwise_equal(run(layer, x), first));
}

TEST_P(CudaLayer, MonolithicExpertsDoTheSame) {
  const Family& family = GetParam();
  const LayerWeights weights = make_weights(family);
  const MoeLayer modular(weights, gpu_options("", GetParam().dtype));
  LayerOptions options = gpu_options("", GetParam().dtype);
  options.monolithic = true;
  const LayerSpec& spec = family.spec;
  if (spec.experts.weight_on_input || spec.zero_experts > 0 || spec.latent > 0) {
    EXPECT_THROW(MoeLayer(weights, options), Error);
    return;
  }
  const MoeLayer monolithic(weights, options);
  const Tensor x = to_gpu(make_hidden_states(GetParam().dtype, 19, modular.hidden()));
  EXPECT_TRUE(bitwise_equal(run(monolithic, x), run(modular, x)));
}

TEST_P(CudaLayer, BatchedExpertsAgree) {
  const LayerWeights weights = make_weights(GetParam());
  const MoeLayer standard(weights, gpu_options("", GetParam().dtype));
  const MoeLayer batched(weights, gpu_options("sm90+batched", GetParam().dtype));
  for (const std::int64_t num_tokens : {0, 1, 40}) {
    const Tensor x = to_gpu(make_hidden_states(GetParam().dtype, num_tokens, standard.hidden()));
    // One more rounding to bf16: of each expert's row.
    EXPECT_LE(compare(run(batched, x), run(standard, x)).max_norm_relative, 1e-2) << num_tokens;
  }
}

class CudaLayerTest : public testing::CudaTest {
 protected:
  static MoeLayer make_layer(LayerOptions options = gpu_options()) {
    return MoeLayer(make_weights(families().front()), std::move(options));
  }
  static constexpr std::int64_t kHidden = 256, kTopk = 4, kExperts = 16;
};

TEST_F(CudaLayerTest, NoTokens) {
  const MoeLayer layer = make_layer();
  EXPECT_EQ(layer.workspace_bytes(0), 0u);
  const Tensor x = Tensor::empty({0, kHidden}, DType::kBF16, kGpu);
  EXPECT_EQ(layer.forward(x).size(0), 0);
  EXPECT_NO_THROW(layer.forward(x, Tensor::empty({0, kHidden}, DType::kBF16, kGpu), {}));
}

TEST_F(CudaLayerTest, RoutedIdsOutOfRangeSelectNothing) {
  const MoeLayer layer = make_layer();
  const Tensor x = to_gpu(make_hidden_states(DType::kBF16, 2, kHidden));
  const auto routed = [&](const std::vector<std::int32_t>& ids) {
    const Tensor topk_ids = Tensor::empty({2, kTopk}, DType::kI32);
    std::memcpy(topk_ids.data(), ids.data(), ids.size() * sizeof(std::int32_t));
    const Tensor weights = Tensor::empty({2, kTopk}, DType::kF32);
    for (std::int64_t i = 0; i < weights.numel(); ++i) weights.as<float>()[i] = 0.25f;
    const Tensor gpu_ids = to_gpu(topk_ids), gpu_weights = to_gpu(weights);
    const Tensor load = Tensor::empty({kExperts}, DType::kI32, kGpu);
    const Buffers buffers(layer, 2);
    layer.forward_routed(x, {gpu_ids, gpu_weights}, buffers.output, buffers.scratch(),
                         {.expert_load = load});
    std::vector<std::int32_t> counts(kExperts);
    for (const std::int32_t id : ids) {
      if (id >= 0 && id < kExperts) ++counts[static_cast<std::size_t>(id)];
    }
    EXPECT_EQ(std::memcmp(to_host(load).data(), counts.data(), kExperts * sizeof(std::int32_t)), 0);
    return to_host(buffers.output);
  };
  constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
  EXPECT_TRUE(bitwise_equal(routed({3, -7, kExperts, 5, kMax, -kMax - 1, 100, -2}),
                            routed({3, -1, -1, 5, -1, -1, -1, -1})));
  const Tensor nothing = routed(std::vector<std::int32_t>(8, -1));
  EXPECT_TRUE(bitwise_equal(nothing, Tensor::zeros({2, kHidden}, DType::kBF16)));
}

TEST_F(CudaLayerTest, InPlace) {
  for (const Family& family : families()) {
    SCOPED_TRACE(family.name);
    LayerOptions options = gpu_options("", family.dtype);
    options.inplace = true;
    const MoeLayer layer(make_weights(family), options);
    const Tensor x = to_gpu(make_hidden_states(family.dtype, 21, kHidden));
    const Tensor expected = run(layer, x);
    const Buffers buffers(layer, 21);
    layer.forward(x, x, buffers.scratch());
    EXPECT_TRUE(bitwise_equal(to_host(x), expected));
  }
}

TEST_F(CudaLayerTest, StreamsDoNotDisturbEachOther) {
  const MoeLayer layer = make_layer();
  const Tensor x = to_gpu(make_hidden_states(DType::kBF16, 64, kHidden));
  const Tensor expected = run(layer, x);
  const OwnedStream first(kGpu), second(kGpu);
  const Buffers a(layer, 64), b(layer, 64);
  synchronize(Stream{kGpu});
  for (int i = 0; i < 20; ++i) {
    layer.forward(x, a.output, a.scratch(), {.stream = first});
    layer.forward(x, b.output, b.scratch(), {.stream = second});
  }
  synchronize(first);
  synchronize(second);
  EXPECT_TRUE(bitwise_equal(to_host(a.output), expected));
  EXPECT_TRUE(bitwise_equal(to_host(b.output), expected));
}

/// The forward is still to come when its histogram is asked for.
TEST_F(CudaLayerTest, AWindowOfLoadsWaitsForTheForwardOnAnyStream) {
  const MoeLayer layer = make_layer();
  const Tensor x = to_gpu(make_hidden_states(DType::kBF16, 64, kHidden));
  const Tensor load = Tensor::zeros({kExperts}, DType::kI32, kGpu);
  const Tensor much = Tensor::zeros({std::int64_t{1} << 30}, DType::kU8, kGpu);
  const Tensor other = Tensor::empty(much.shape(), DType::kU8, kGpu);
  const Buffers buffers(layer, 64);
  const OwnedStream stream(kGpu);
  synchronize(Stream{kGpu});
  for (int i = 0; i < 8; ++i) copy(much, other, stream);
  layer.forward(x, buffers.output, buffers.scratch(), {.expert_load = load, .stream = stream});
  LoadWindow window(1, kExperts, 1);
  window.add(0, load);
  synchronize(stream);
  const std::vector<double> loads = window.loads();
  EXPECT_EQ(std::accumulate(loads.begin(), loads.end(), 0.0), 64.0 * kTopk);
}

TEST_F(CudaLayerTest, WhatDoesNotFitIsAnError) {
  const MoeLayer layer = make_layer();
  const Tensor host_x = make_hidden_states(DType::kBF16, 3, kHidden), x = to_gpu(host_x);
  const Buffers buffers(layer, 3);
  EXPECT_EQ(argument_of([&] { layer.forward(host_x, buffers.output, buffers.scratch()); }),
            "hidden_states");
  EXPECT_EQ(argument_of([&] { layer.forward(x, host_x, buffers.scratch()); }), "output");
  EXPECT_EQ(argument_of(
                [&] { layer.forward(x, buffers.output, buffers.scratch(), {.stream = Stream{}}); }),
            "stream");
  EXPECT_EQ(argument_of([&] {
              layer.forward(x, buffers.output, {buffers.workspace.data(), 16});
            }),
            "workspace");
  LayerWeights custom = make_weights(families().front());
  custom.router.custom = [](const TensorView&, const TensorView&, const TensorView&) {};
  EXPECT_EQ(argument_of([&] { MoeLayer(custom, gpu_options()); }), "router.custom");
  EXPECT_EQ(argument_of([&] { make_layer(gpu_options("cpu")); }), "require");
  Tensor output = to_host(buffers.output);
  const Tensor untouched = Tensor::empty(output.shape(), DType::kBF16);
  poison(untouched);
  EXPECT_TRUE(bitwise_equal(output, untouched));
}

}  // namespace
}  // namespace fusedmoe
