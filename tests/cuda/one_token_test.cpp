// The experts of one token in one launch: shapes, slots and layers that its thread blocks and warps
// divide unevenly. schemes_test.cpp runs it for every scheme.
#include <string>

#include "../unit/layer_problem.h"
#include "cuda/gemm/heuristic.h"
#include "cuda_test.h"
#include "experts_problem.h"
#include "gpu_ranks.h"
#include "scheme_rows.h"

namespace fusedmoe::testing {
namespace {

/// Runs a case with the kernel of one token, which must be valid for it, twice.
void expect_one_token(Case spec, const char* scheme, const char* what) {
  spec.num_tokens = 1;
  spec.scheme = parse_scheme(scheme);
  SCOPED_TRACE(std::string(scheme) + " " + what);
  const Problem problem = make_problem(spec);
  const auto experts = make_experts(spec);
  const auto names = experts->kernel_configs(ProblemSize::of(experts->config(), 1));
  ASSERT_NE(std::find(names.begin(), names.end(), "one token"), names.end());
  RunOptions options;
  options.kernel_config = experts->find_kernel_config("one token");
  const Tensor actual = run_rows(problem, gpu_variant(), options);
  expect_close(actual, run_reference(problem), spec.scheme);
  EXPECT_TRUE(bitwise_equal(run_rows(problem, gpu_variant(), options), actual)) << "second run";
}

constexpr const char* kSchemes[] = {
    "bf16", "mxfp4_w4a16", "int4_g128_zp", "fp8_block", "fp8_channel_token", "w4a8", "nvfp4"};

TEST(CudaOneTokenTest, ShapesThatDivideNothing) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  const std::pair<std::int64_t, std::int64_t> sizes[] = {
      {64, 128}, {360, 256}, {2880, 384}, {1368, 2880}, {7168, 136}};
  for (const char* scheme : kSchemes) {
    for (const auto& [hidden, intermediate] : sizes) {
      Case spec;
      spec.hidden = hidden;
      spec.intermediate = intermediate;
      expect_one_token(spec, scheme, std::to_string(hidden).c_str());
    }
  }
}

TEST(CudaOneTokenTest, AnyNumberOfSlots) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const char* scheme : kSchemes) {
    for (const std::int64_t topk : {1, 3, 8, 32}) {
      Case spec;
      spec.num_experts = 40;
      spec.topk = topk;
      spec.hidden = 512;
      spec.intermediate = 256;
      spec.negative_ids = topk == 8;
      spec.expert_map = topk == 3 || topk == 32;
      expect_one_token(spec, scheme, ("topk " + std::to_string(topk)).c_str());
    }
  }
}

/// No slot has a local expert: the output is zero.
TEST(CudaOneTokenTest, NoSlotAtAll) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  Case spec;
  spec.num_tokens = 1;
  spec.bias = true;
  Problem problem = make_problem(spec);
  for (std::int64_t i = 0; i < spec.topk; ++i) problem.topk_ids.as<std::int32_t>()[i] = -1;
  RunOptions options;
  options.kernel_config = make_experts(spec)->find_kernel_config("one token");
  const Tensor actual = run_rows(problem, gpu_variant(), options);
  for (std::int64_t i = 0; i < actual.numel(); ++i) {
    ASSERT_EQ(load_f32(actual.data(), actual.dtype(), i), 0) << i;
  }
}

TEST(CudaOneTokenTest, ActivationsBiasesAndWeightsOnInput) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const char* scheme : {"bf16", "mxfp4_w4a16", "fp8_block"}) {
    for (const Activation activation :
         {Activation::kSilu, Activation::kSwigluOai, Activation::kGelu, Activation::kRelu2NoMul,
          Activation::kSiluNoMul}) {
      Case spec;
      spec.hidden = 512;
      spec.intermediate = 256;
      spec.activation = activation;
      spec.bias = true;
      expect_one_token(spec, scheme, std::string(name(activation)).c_str());
      spec.topk = 1;
      spec.weight_on_input = true;
      expect_one_token(spec, scheme, "weight on input");
    }
  }
}

/// Of 2048 outputs the layer chooses it by itself.
TEST(CudaOneTokenTest, LayersWithTheirRouterHaveTheOutputOfTheReference) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const char* scheme : {"bf16", "mxfp4_w4a16", "fp8_block"}) {
    SCOPED_TRACE(scheme);
    Case spec = small_case(scheme);
    spec.hidden = 2048;
    const LayerWeights weights = make_layer_weights({spec});
    const Tensor x = random_tensor(DType::kBF16, {1, spec.hidden}, 1, 5);
    LayerOptions host;
    host.require = "reference";
    const Tensor expected = MoeLayer(weights, host).forward(x);
    const MoeLayer layer(weights, options_of(kGpu, false));
    const Tensor actual = forward(layer, x, 0);
    expect_close(actual, expected, spec.scheme);
    EXPECT_TRUE(bitwise_equal(forward(layer, x, 0), actual)) << "second run";
  }
}

TEST(CudaOneTokenTest, ManyReplaysInAGraphAreTheSame) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  Case spec;
  spec.num_tokens = 1;
  spec.hidden = 2880;
  spec.intermediate = 360;
  spec.topk = 4;
  const Problem problem = make_problem(spec);
  const ModularKernel kernel = make_kernel(spec);
  const std::shared_ptr<const PackedWeights> packed = kernel.experts().pack(problem.weights);
  const KernelRun run(problem, kernel, packed);
  RunOptions options;
  options.kernel_config = kernel.experts().find_kernel_config("one token");
  const OwnedStream stream(kGpu);
  run.enqueue(stream, options);
  synchronize(stream);
  const Tensor expected = run.output();
  const Graph graph(stream, [&] { run.enqueue(stream, options); });
  for (int replay = 0; replay < 200; ++replay) graph.launch(stream);
  synchronize(stream);
  EXPECT_TRUE(bitwise_equal(run.output(), expected));
}

}  // namespace
}  // namespace fusedmoe::testing
