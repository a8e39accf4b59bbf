// The experts of one token in one launch: shapes, slots and layers that its thread blocks and warps
// divide unevenly. schemes_test.cpp runs it for every scheme.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "../unit/layer_problem.h"
#include "cuda/device/properties.h"
#include "cuda/one_token/one_token.h"
#include "cuda_test.h"
#include "experts_problem.h"
#include "gpu_ranks.h"
#include "scheme_rows.h"

namespace fusedmoe::testing {
namespace {

/// Of the chosen one first.
std::vector<std::string> configs_of(const Experts& experts) {
  return experts.kernel_configs(ProblemSize::of(experts.config(), 1));
}
bool has_one_token(const Experts& experts) {
  const std::vector<std::string> names = configs_of(experts);
  return std::find(names.begin(), names.end(), "one token") != names.end();
}
/// Asks for the kernel of one token. Where it is not valid another one would run without a word, so
/// then the test fails.
RunOptions one_token_options(const Experts& experts) {
  EXPECT_TRUE(has_one_token(experts));
  RunOptions options;
  options.kernel_config = experts.find_kernel_config("one token");
  return options;
}

/// A case of one token in a scheme.
Case one_token_case(const char* scheme, std::int64_t hidden, std::int64_t intermediate) {
  Case spec;
  spec.num_tokens = 1;
  spec.hidden = hidden;
  spec.intermediate = intermediate;
  spec.scheme = parse_scheme(scheme);
  return spec;
}

/// Runs a case with the kernel of one token: between guard bytes, once more over other garbage, and
/// with its inputs watched.
void expect_one_token(Case spec, const char* scheme, const std::string& what) {
  spec.num_tokens = 1;
  spec.scheme = parse_scheme(scheme);
  SCOPED_TRACE(scheme + (" " + what));
  const Problem problem = make_problem(spec);
  const ModularKernel kernel = make_kernel(spec);
  const RunOptions options = one_token_options(kernel.experts());
  const KernelRun run(problem, kernel, kernel.experts().pack(problem.weights));
  const Tensor actual = run.run(options);
  expect_close(actual, run_reference(problem), spec.scheme);
  run.poison(0x7f);
  EXPECT_TRUE(bitwise_equal(run.run(options), actual)) << "second run";
  EXPECT_TRUE(bitwise_equal(run_rows(problem, gpu_variant(), options), actual)) << "step by step";
}

/// Those that the experts under test run.
std::vector<const char*> run_here(std::vector<const char*> schemes) {
  std::erase_if(schemes, [](const char* text) {
    const QuantScheme scheme = parse_scheme(text);
    return !has_kernels(scheme, row_dtype(scheme));
  });
  return schemes;
}
std::vector<const char*> schemes_here() {
  return run_here({"bf16", "f16", "mxfp4_w4a16", "int4_g128_zp", "fp8_block", "fp8_channel_token",
                   "w4a8", "nvfp4"});
}

TEST(CudaOneTokenTest, ShapesThatDivideNothing) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  const std::pair<std::int64_t, std::int64_t> sizes[] = {
      {64, 128}, {360, 256}, {2880, 384}, {1368, 2880}, {7168, 136}};
  for (const char* scheme : schemes_here()) {
    for (const auto& [hidden, intermediate] : sizes) {
      expect_one_token(one_token_case(scheme, hidden, intermediate), scheme,
                       std::to_string(hidden));
    }
  }
}

/// Hidden sizes are multiples of 8. Two FP4 codes of an intermediate size share a byte, and with
/// promoted sums slices of 8 rows have scales.
TEST(CudaOneTokenTest, TheSmallestAndOddSizes) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  const std::pair<std::int64_t, std::int64_t> sizes[] = {{8, 2},   {8, 8},    {8, 90},
                                                         {136, 8}, {136, 90}, {136, 45}};
  for (const char* scheme : schemes_here()) {
    for (const auto& [hidden, intermediate] : sizes) {
      const Case spec = one_token_case(scheme, hidden, intermediate);
      const std::string what = std::to_string(hidden) + " x " + std::to_string(intermediate);
      const std::int64_t unit = needs_whole_slices(spec.scheme)             ? 8
                                : spec.scheme.weights.value == DType::kE2M1 ? 2
                                                                            : 1;
      const bool is_served = !gpu_variants(spec).empty();
      EXPECT_EQ(is_served, intermediate % unit == 0) << scheme << " " << what;
      if (is_served) expect_one_token(spec, scheme, what);
    }
  }
}

/// The largest layer that still fits the kernel's shared memory.
TEST(CudaOneTokenTest, TheLargestRowsThatSharedMemoryHolds) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const char* scheme : run_here({"bf16", "fp8_block", "w4a8", "nvfp4"})) {
    const auto case_of = [&](std::int64_t intermediate) {
      Case spec = one_token_case(scheme, 64, intermediate);
      spec.num_experts = spec.topk = 32;
      return spec;
    };
    const auto fits = [&](std::int64_t eighth) {
      return has_one_token(*make_experts(case_of(8 * eighth)));
    };
    std::int64_t most = 1, too_many = 2048;
    ASSERT_TRUE(fits(most)) << scheme;
    ASSERT_FALSE(fits(too_many)) << scheme;
    while (too_many - most > 1) {
      const std::int64_t middle = (most + too_many) / 2;
      (fits(middle) ? most : too_many) = middle;
    }
    expect_one_token(case_of(8 * most), scheme, std::to_string(8 * most));
  }
}

/// A sum in f32 is what the output in 16 bits is rounded from. What the output holds is added
/// before that rounding.
TEST(CudaOneTokenTest, OutputInF32AndAddedToWhatIsThere) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const char* scheme : run_here({"bf16", "f16", "mxfp4_w4a16", "fp8_block"})) {
    SCOPED_TRACE(scheme);
    Case spec = one_token_case(scheme, 360, 256);
    spec.bias = true;
    const Problem problem = make_problem(spec);
    const ModularKernel kernel = make_kernel(spec);
    const std::shared_ptr<const PackedWeights> packed = kernel.experts().pack(problem.weights);
    const RunOptions options = one_token_options(kernel.experts());
    const DType dtype = row_dtype(spec.scheme);
    const Tensor sums = KernelRun(problem, kernel, packed, {DType::kF32}).run(options);
    expect_close(sums, run_reference(problem), spec.scheme);
    const Tensor rounded = Tensor::empty(sums.shape(), dtype);
    convert(sums, rounded);
    EXPECT_TRUE(bitwise_equal(KernelRun(problem, kernel, packed).run(options), rounded));
    for (const DType output : {DType::kF32, dtype}) {
      const Tensor start = random_tensor(output, sums.shape(), 1, 6);
      const Tensor expected = Tensor::empty(sums.shape(), output);
      for (std::int64_t i = 0; i < sums.numel(); ++i) {
        const float before = load_f32(start.data(), output, i);
        store_f32(expected.data(), output, i, sums.as<const float>()[i] + before);
      }
      const KernelRun run(problem, kernel, packed, {output, true});
      copy(start, run.output_view(), Stream{kGpu});
      EXPECT_TRUE(bitwise_equal(run.run(options), expected)) << name(output);
    }
  }
}

/// One NaN among the hidden states is in every sum. The next token does not see it.
TEST(CudaOneTokenTest, ANaNInTheInputIsInAllOfTheOutput) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const char* scheme : run_here({"bf16", "f16", "mxfp4_w4a16", "int4_g128_zp", "fp8_block",
                                      "fp8_channel_token", "w4a8"})) {
    SCOPED_TRACE(scheme);
    const Problem problem = make_problem(one_token_case(scheme, 360, 136));
    const ModularKernel kernel = make_kernel(problem.spec);
    const RunOptions options = one_token_options(kernel.experts());
    const KernelRun run(problem, kernel, kernel.experts().pack(problem.weights));
    const Tensor expected = run.run(options);
    Problem wild = problem;
    wild.hidden_states = Tensor::empty(problem.hidden_states.shape(), DType::kF32);
    copy(problem.hidden_states, wild.hidden_states, {});
    wild.hidden_states.as<float>()[131] = std::numeric_limits<float>::quiet_NaN();
    run.set(wild);
    const Tensor actual = run.run(options);
    for (std::int64_t i = 0; i < actual.numel(); ++i) {
      ASSERT_TRUE(std::isnan(load_f32(actual.data(), actual.dtype(), i))) << i;
    }
    run.set(problem);
    EXPECT_TRUE(bitwise_equal(run.run(options), expected)) << "without the NaN again";
  }
}

TEST(CudaOneTokenTest, AnyNumberOfSlots) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const char* scheme : schemes_here()) {
    for (const std::int64_t topk : {1, 3, 8, 32}) {
      Case spec;
      spec.num_experts = 40;
      spec.topk = topk;
      spec.hidden = 512;
      spec.intermediate = 256;
      spec.negative_ids = topk == 8;
      spec.expert_map = topk == 3 || topk == 32;
      expect_one_token(spec, scheme, "topk " + std::to_string(topk));
    }
  }
}

/// No slot has a local expert: the output is zero, whatever the slots' weights are.
TEST(CudaOneTokenTest, NoSlotAtAll) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  FUSEDMOE_SKIP_WITHOUT_KERNELS("bf16", DType::kBF16);
  Case spec;
  spec.num_tokens = 1;
  spec.bias = true;
  const Problem problem = make_problem(spec);
  for (std::int64_t i = 0; i < spec.topk; ++i) {
    problem.topk_ids.as<std::int32_t>()[i] = -1;
    problem.topk_weights.as<float>()[i] = std::numeric_limits<float>::quiet_NaN();
  }
  const ModularKernel kernel = make_kernel(spec);
  const KernelRun run(problem, kernel, kernel.experts().pack(problem.weights));
  const Tensor actual = run.run(one_token_options(kernel.experts()));
  ASSERT_EQ(actual.numel(), spec.hidden);
  for (std::int64_t i = 0; i < actual.numel(); ++i) {
    ASSERT_EQ(load_f32(actual.data(), actual.dtype(), i), 0) << i;
  }
}

TEST(CudaOneTokenTest, ActivationsBiasesAndWeightsOnInput) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const char* scheme : run_here({"bf16", "mxfp4_w4a16", "fp8_block"})) {
    for (const Activation activation :
         {Activation::kSilu, Activation::kSwigluOai, Activation::kGelu, Activation::kRelu2NoMul,
          Activation::kSiluNoMul}) {
      Case spec;
      spec.hidden = 512;
      spec.intermediate = 256;
      spec.activation = activation;
      spec.bias = true;
      expect_one_token(spec, scheme, std::string(name(activation)));
      spec.topk = 1;
      spec.weight_on_input = true;
      expect_one_token(spec, scheme, "weight on input");
    }
  }
}

/// With a slice of outputs for each multiprocessor the layer chooses it by itself.
TEST(CudaOneTokenTest, LayersWithTheirRouterHaveTheOutputOfTheReference) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  const std::pair<const char*, DType> kinds[] = {
      {"bf16", DType::kBF16}, {"mxfp4_w4a16", DType::kBF16}, {"fp8_block", DType::kBF16},
      {"f16", DType::kF16},   {"mxfp4_w4a16", DType::kF16},  {"fp8_block", DType::kF16}};
  for (const auto& [scheme, dtype] : kinds) {
    if (!has_kernels(parse_scheme(scheme), dtype)) continue;
    SCOPED_TRACE(std::string(scheme) + " with rows in " + std::string(name(dtype)));
    Case spec = small_case(scheme);
    spec.hidden = cuda::kSliceRows * cuda::multiprocessor_count(kGpu);
    const LayerWeights weights = make_layer_weights({spec});
    const Tensor x = random_tensor(dtype, {1, spec.hidden}, 1, 5);
    LayerOptions host, device = options_of(kGpu, false);
    host.require = "reference";
    host.dtype = device.dtype = dtype;
    const Tensor expected = MoeLayer(weights, host).forward(x);
    const MoeLayer layer(weights, device);
    const auto experts = gpu_variant().experts->create(layer.config(), Context{});
    EXPECT_EQ(configs_of(*experts).front(), "one token");
    const Tensor actual = forward(layer, x, 0);
    expect_close(actual, expected, spec.scheme);
    EXPECT_TRUE(bitwise_equal(forward(layer, x, 0), actual)) << "second run";
  }
}

TEST(CudaOneTokenTest, ManyReplaysInAGraphAreTheSame) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  FUSEDMOE_SKIP_WITHOUT_KERNELS("bf16", DType::kBF16);
  Case spec;
  spec.num_tokens = 1;
  spec.hidden = 2880;
  spec.intermediate = 360;
  spec.topk = 4;
  const Problem problem = make_problem(spec);
  const ModularKernel kernel = make_kernel(spec);
  const std::shared_ptr<const PackedWeights> packed = kernel.experts().pack(problem.weights);
  const KernelRun run(problem, kernel, packed);
  const RunOptions options = one_token_options(kernel.experts());
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
