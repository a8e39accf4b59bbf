// The experts on sizes and loads of their own: what models have, what divides no tile, and
// experts with nothing or everything to do.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cuda_test.h"
#include "experts_problem.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe {
namespace {

using testing::bitwise_equal;
using testing::Case;
using testing::expect_close;
using testing::gpu_schemes;
using testing::gpu_variant;
using testing::make_problem;
using testing::Problem;
using testing::RoutingSkew;
using testing::run_reference;
using testing::run_rows;
using testing::Variant;

struct Size {
  std::int64_t num_tokens, num_experts, topk, hidden, intermediate;
};

/// Each size in every scheme; layouts, biases and activations go round.
std::vector<Case> size_cases() {
  constexpr Size kSizes[] = {
      {5, 4, 2, 256, 90},  {70, 4, 2, 64, 90},    {9, 5, 3, 120, 360},   {33, 3, 2, 360, 360},
      {3, 2, 1, 96, 1368}, {130, 3, 1, 40, 1368}, {12, 6, 4, 192, 192},  {300, 4, 2, 72, 192},
      {2, 2, 1, 2880, 90}, {4, 2, 2, 96, 2880},   {3, 2, 1, 2880, 2880}, {1, 2, 2, 2880, 360},
      {40, 3, 2, 8, 2},    {17, 4, 2, 64, 66},    {260, 2, 2, 136, 34},  {6, 3, 1, 1032, 62},
  };
  constexpr Activation kActivations[] = {Activation::kSilu, Activation::kSwigluOai,
                                         Activation::kGeluTanh, Activation::kRelu2NoMul};
  std::vector<Case> cases;
  for (const QuantScheme& scheme : gpu_schemes()) {
    std::size_t i = 0;
    for (const Size& size : kSizes) {
      Case spec;
      spec.name = std::string(name(scheme)) + "_" + std::to_string(size.num_tokens) + "_" +
                  std::to_string(size.hidden) + "x" + std::to_string(size.intermediate);
      spec.num_tokens = size.num_tokens;
      spec.num_experts = size.num_experts;
      spec.topk = size.topk;
      spec.hidden = size.hidden;
      spec.intermediate = size.intermediate;
      spec.scheme = scheme;
      spec.activation = kActivations[i % 4];
      spec.bias = i % 2 == 0;
      spec.gate_up_layout = static_cast<GateUpLayout>(i % 3);
      spec.seed = 300 + i++;
      cases.push_back(spec);
    }
  }
  return cases;
}

std::vector<Case> load_cases() {
  std::vector<Case> cases;
  for (const QuantScheme& scheme : gpu_schemes()) {
    const auto add = [&](std::string title, const Size& size, RoutingSkew skew) {
      Case spec;
      spec.name = std::string(name(scheme)) + "_" + title;
      spec.num_tokens = size.num_tokens;
      spec.num_experts = size.num_experts;
      spec.topk = size.topk;
      spec.hidden = size.hidden;
      spec.intermediate = size.intermediate;
      spec.scheme = scheme;
      spec.skew = skew;
      spec.bias = true;
      spec.seed = 400 + cases.size();
      cases.push_back(spec);
    };
    add("256_experts_mostly_empty", {3, 256, 2, 128, 64}, RoutingSkew::kBalanced);
    add("256_experts_one_token", {1, 256, 8, 128, 64}, RoutingSkew::kSparse);
    add("256_experts_skewed", {400, 256, 8, 64, 32}, RoutingSkew::kZipf);
    add("256_experts_all_on_two", {600, 256, 2, 64, 32}, RoutingSkew::kOneExpert);
    add("1_expert", {33, 1, 1, 64, 64}, RoutingSkew::kBalanced);
    add("100_experts", {3, 100, 4, 64, 32}, RoutingSkew::kBalanced);
    add("1023_experts", {2, 1023, 8, 64, 32}, RoutingSkew::kBalanced);
    add("2048_experts", {9, 2048, 4, 32, 16}, RoutingSkew::kBalanced);
    add("all_experts_chosen", {100, 8, 8, 64, 64}, RoutingSkew::kBalanced);
    add("64_slots", {5, 96, 64, 64, 32}, RoutingSkew::kBalanced);
    add("map_and_negative_ids", {500, 40, 6, 64, 64}, RoutingSkew::kZipf);
    cases.back().expert_map = cases.back().negative_ids = true;
    add("weight_on_input", {90, 6, 1, 64, 64}, RoutingSkew::kBalanced);
    cases.back().weight_on_input = true;
    add("weight_on_input_and_map", {33, 9, 1, 64, 64}, RoutingSkew::kBalanced);
    cases.back().weight_on_input = cases.back().expert_map = true;
  }
  return cases;
}

/// Every variant that serves the case.
class CudaExpertsShapes : public testing::CudaTestWith<Case> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaExpertsShapes);
INSTANTIATE_TEST_SUITE_P(Sizes, CudaExpertsShapes, ::testing::ValuesIn(size_cases()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Loads, CudaExpertsShapes, ::testing::ValuesIn(load_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CudaExpertsShapes, EveryImplementationMatchesTheReference) {
  const Case& spec = GetParam();
  const Problem problem = make_problem(spec);
  const Tensor expected = run_reference(problem);
  const std::vector<Variant> all = testing::gpu_variants(spec);
  // Standard, batch-invariant, batched, monolithic; with hooks where rows need no padding.
  const std::ptrdiff_t monolithic = spec.weight_on_input ? 0 : 1;
  const auto of_family = std::count_if(all.begin(), all.end(), [](const Variant& variant) {
    return variant.experts->name() == testing::gpu_family().name();
  });
  EXPECT_EQ(of_family, 3 + monolithic + (spec.intermediate % 8 == 0 ? 1 : 0));
  for (const Variant& variant : all) {
    SCOPED_TRACE(variant.name());
    const Tensor actual = run_rows(problem, variant);
    expect_close(actual, expected);
    EXPECT_TRUE(bitwise_equal(run_rows(problem, variant), actual)) << "second run";
  }
}

class CudaExpertsLoads : public testing::CudaTest {};

TEST_F(CudaExpertsLoads, TooManyExpertsAreRefused) {
  Case spec;
  spec.num_experts = 2049;
  EXPECT_TRUE(testing::gpu_variants(spec).empty());
}

/// The batched experts called directly, with counts that no routing has to give.
struct BatchedRun {
  Tensor hidden_states, counts;  // in host memory

  Tensor run(const Experts& experts, const PackedWeights& packed) const {
    const Device device = experts.config().device;
    const Tensor x = to_device(hidden_states, device), num_rows = to_device(counts, device);
    const WorkspaceSizes sizes =
        experts.workspace_sizes(ProblemSize::of(experts.config(), hidden_states.size(1)));
    const auto buffer = [&](std::size_t bytes) {
      Tensor result = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, device);
      fill_bytes(result, 0xff, Stream{device});
      return result;
    };
    const Tensor workspace13 = buffer(sizes.workspace13_bytes);
    const Tensor workspace2 = buffer(sizes.workspace2_bytes);
    const Tensor output = Tensor::empty(sizes.output_shape, sizes.output_dtype, device);
    testing::poison(output);
    ForwardArgs args;
    args.weights = &packed;
    args.fused_output = output;
    args.hidden_states = x;
    args.expert_num_tokens = num_rows;
    args.workspace13 = workspace13.data();
    args.workspace2 = workspace2.data();
    args.stream = Stream{device};
    experts.apply(args);
    synchronize(args.stream);
    return to_device(output, {});
  }
};

TEST_F(CudaExpertsLoads, BatchedRowsFromNoneToAll) {
  constexpr std::int64_t kCapacity = 70, kExperts = 6;
  for (const QuantScheme& scheme : gpu_schemes()) {
    Case spec;
    spec.num_tokens = kExperts * kCapacity;
    spec.num_experts = kExperts;
    spec.hidden = 128;
    spec.intermediate = 96;
    spec.scheme = scheme;
    spec.bias = true;
    const Problem problem = make_problem(spec);
    const auto experts = testing::make_experts(spec, gpu_variant("_batched"));
    const auto packed = experts->pack(problem.weights);
    const Variant on_cpu = testing::find_variant("reference_batched");
    const auto reference = on_cpu.experts->create(
        on_cpu.of(testing::make_config(spec, testing::row_dtype(scheme))), {});
    const auto reference_packed = reference->pack(problem.weights);

    const std::vector<std::vector<std::int32_t>> loads{
        {0, kCapacity, 1, kCapacity - 1, 64, 65},
        {0, 0, 0, 0, 0, 0},
        {0, 0, 0, 0, 0, kCapacity},
        {kCapacity, 0, 0, 0, 0, 0},
        std::vector<std::int32_t>(kExperts, kCapacity)};
    for (const std::vector<std::int32_t>& load : loads) {
      BatchedRun run;
      run.hidden_states =
          Tensor::empty({kExperts, kCapacity, spec.hidden}, testing::row_dtype(scheme));
      run.counts = Tensor::empty({kExperts}, DType::kI32);
      convert(problem.hidden_states.reshape(run.hidden_states.shape()), run.hidden_states);
      for (std::int64_t e = 0; e < kExperts; ++e) {
        run.counts.as<std::int32_t>()[e] = load[static_cast<std::size_t>(e)];
      }
      const Tensor expected = run.run(*reference, *reference_packed);
      // What is behind an expert's rows is not read.
      for (std::int64_t e = 0; e < kExperts; ++e) {
        const std::int32_t rows = load[static_cast<std::size_t>(e)];
        testing::poison(run.hidden_states.select(0, e).slice(0, rows, kCapacity));
      }
      const Tensor actual = run.run(*experts, *packed);
      for (std::int64_t e = 0; e < kExperts; ++e) {
        const std::int32_t rows = load[static_cast<std::size_t>(e)];
        if (rows == 0) continue;
        SCOPED_TRACE("expert " + std::to_string(e) + ", rows " + std::to_string(rows));
        expect_close(actual.select(0, e).slice(0, 0, rows),
                     expected.select(0, e).slice(0, 0, rows));
      }
    }
  }
}

// Weights of slots without an expert, and rows of tokens without any, may hold anything.
TEST_F(CudaExpertsLoads, SlotsWithoutAnExpertAreNotMultiplied) {
  for (const QuantScheme& scheme : gpu_schemes()) {
    Case spec;
    spec.num_tokens = 50;
    spec.topk = 4;
    spec.hidden = 128;
    spec.intermediate = 64;
    spec.scheme = scheme;
    spec.negative_ids = true;
    const Problem problem = make_problem(spec);
    for (const char* suffix : {"", "_batch_invariant", "_batched", "_unfused"}) {
      SCOPED_TRACE(suffix);
      const Variant variant = gpu_variant(suffix);
      const Tensor expected = run_rows(problem, variant);
      Problem wild = problem;
      wild.topk_weights = Tensor::empty(problem.topk_weights.shape(), DType::kF32);
      for (std::int64_t slot = 0; slot < wild.topk_weights.numel(); ++slot) {
        const bool missing = problem.topk_ids.as<const std::int32_t>()[slot] < 0;
        wild.topk_weights.as<float>()[slot] = missing
                                                  ? std::numeric_limits<float>::quiet_NaN()
                                                  : problem.topk_weights.as<const float>()[slot];
      }
      EXPECT_TRUE(bitwise_equal(run_rows(wild, variant), expected));
    }
  }
}

// A token may name an expert twice: one row for each, with the weight of its slot.
TEST_F(CudaExpertsLoads, DuplicateIdsCountTwice) {
  for (const QuantScheme& scheme : gpu_schemes()) {
    for (const std::int64_t num_tokens : {1, 2, 70}) {
      Case spec;
      spec.num_tokens = num_tokens;
      spec.num_experts = 5;
      spec.topk = 4;
      spec.hidden = 136;
      spec.intermediate = 72;
      spec.scheme = scheme;
      spec.bias = true;
      const Problem problem = make_problem(spec);
      for (std::int64_t slot = 0; slot < problem.topk_ids.numel(); ++slot) {
        auto* ids = problem.topk_ids.as<std::int32_t>();
        if (slot % 4 == 3) ids[slot] = ids[slot - 2];
      }
      const Tensor expected = run_reference(problem);
      for (const char* suffix : {"", "_batch_invariant", "_unfused"}) {
        SCOPED_TRACE(suffix + std::string(" ") + std::to_string(num_tokens) + " tokens");
        expect_close(run_rows(problem, gpu_variant(suffix)), expected);
      }
    }
  }
}

// A token of NaN reaches no other token, whatever shares a tile with it.
TEST_F(CudaExpertsLoads, ANaNStaysInItsToken) {
  constexpr std::int64_t kWild = 11;
  for (const QuantScheme& scheme : gpu_schemes()) {
    Case spec;
    spec.num_tokens = 40;
    spec.num_experts = 3;
    spec.hidden = 128;
    spec.intermediate = 64;
    spec.scheme = scheme;
    const Problem problem = make_problem(spec);
    for (const char* suffix : {"", "_batch_invariant", "_batched", "_unfused"}) {
      SCOPED_TRACE(suffix);
      const Variant variant = gpu_variant(suffix);
      const Tensor expected = run_rows(problem, variant);
      Problem wild = problem;
      wild.hidden_states = Tensor::empty(problem.hidden_states.shape(), DType::kF32);
      copy(problem.hidden_states, wild.hidden_states, {});
      testing::poison(wild.hidden_states.select(0, kWild));
      const Tensor actual = run_rows(wild, variant);
      for (std::int64_t token = 0; token < spec.num_tokens; ++token) {
        if (token == kWild) {
          EXPECT_TRUE(std::isnan(load_f32(actual.data(), actual.dtype(), token * spec.hidden)));
        } else {
          EXPECT_TRUE(bitwise_equal(actual.select(0, token), expected.select(0, token))) << token;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe
