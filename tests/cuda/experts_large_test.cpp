// Offsets beyond 2^31 elements: 300,000 tokens with 8 experts each. Rows of a sample of tokens are
// compared with the reference, which computes only these.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cuda_test.h"
#include "experts_problem.h"
#include "fusedmoe/quant.h"

namespace fusedmoe {
namespace {

using testing::Case;
using testing::KernelRun;
using testing::kGpu;
using testing::make_problem;
using testing::Problem;
using testing::Random;

constexpr std::int64_t kTokens = 300000, kDistinct = 1009;

struct LargeCase {
  std::string name, suffix;
  Case spec;
};
void PrintTo(const LargeCase& each, std::ostream* stream) {
  *stream << each.name;
}

std::vector<LargeCase> large_cases() {
  std::vector<LargeCase> cases;
  for (const QuantScheme& scheme : testing::gpu_schemes()) {
    const auto add = [&](std::string title, std::string suffix, std::int64_t experts,
                         std::int64_t hidden, std::int64_t intermediate) {
      LargeCase each;
      each.name = std::string(name(scheme)) + "_" + title;
      each.suffix = std::move(suffix);
      each.spec.num_tokens = kTokens;
      each.spec.num_experts = experts;
      each.spec.topk = 8;
      each.spec.hidden = hidden;
      each.spec.intermediate = intermediate;
      each.spec.scheme = scheme;
      each.spec.bias = true;
      cases.push_back(each);
    };
    // 2.4 million rows of 1024: of GEMM 2; of GEMM 1; of the batched format, where they are the
    // input and the output too.
    add("gemm2_rows", "", 24, 1024, 64);
    add("gemm1_rows", "", 24, 64, 1024);
    add("unfused", "_unfused", 24, 64, 1024);
    add("batched", "_batched", 8, 1024, 64);
  }
  return cases;
}

/// Tokens repeat kDistinct rows, but each has experts and weights of its own.
Problem make_large_problem(const Case& spec) {
  Case small = spec;
  small.num_tokens = kDistinct;
  Problem problem = make_problem(small);
  const Tensor base = problem.hidden_states;
  problem.spec = spec;
  problem.hidden_states = Tensor::empty({spec.num_tokens, spec.hidden}, DType::kF32);
  problem.topk_ids = Tensor::empty({spec.num_tokens, spec.topk}, DType::kI32);
  problem.topk_weights = Tensor::empty({spec.num_tokens, spec.topk}, DType::kF32);
  Random random(9);
  for (std::int64_t token = 0; token < spec.num_tokens; ++token) {
    std::memcpy(problem.hidden_states.as<float>() + token * spec.hidden,
                base.as<const float>() + token % kDistinct * spec.hidden,
                static_cast<std::size_t>(spec.hidden) * sizeof(float));
    // Distinct: neither step has a factor in common with the number of experts, 8 or 24.
    const std::int64_t start = random.below(spec.num_experts), step = token % 2 == 0 ? 5 : 7;
    for (std::int64_t j = 0; j < spec.topk; ++j) {
      problem.topk_ids.as<std::int32_t>()[token * spec.topk + j] =
          static_cast<std::int32_t>((start + j * step) % spec.num_experts);
      problem.topk_weights.as<float>()[token * spec.topk + j] =
          static_cast<float>(0.05 + 0.15 * random.uniform());
    }
  }
  return problem;
}

/// Some of the tokens, as a problem.
Problem pick(const Problem& problem, const std::vector<std::int64_t>& tokens) {
  Problem picked = problem;
  picked.spec.num_tokens = std::ssize(tokens);
  for (Tensor Problem::*member :
       {&Problem::hidden_states, &Problem::topk_ids, &Problem::topk_weights}) {
    const Tensor& from = problem.*member;
    Tensor to = Tensor::empty({std::ssize(tokens), from.size(1)}, from.dtype());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const TensorView row = from.select(0, tokens[i]);
      std::memcpy(to.select(0, static_cast<std::int64_t>(i)).data(), row.data(),
                  static_cast<std::size_t>(row.nbytes()));
    }
    picked.*member = to;
  }
  return picked;
}

class CudaExpertsLarge : public testing::CudaTestWith<LargeCase> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaExpertsLarge);
INSTANTIATE_TEST_SUITE_P(Cases, CudaExpertsLarge, ::testing::ValuesIn(large_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CudaExpertsLarge, SampledTokensMatchTheReference) {
  const Case& spec = GetParam().spec;
  const Problem problem = make_large_problem(spec);
  const ModularKernel kernel = testing::make_kernel(spec, testing::gpu_variant(GetParam().suffix));
  const KernelRun run(problem, kernel, kernel.experts().pack(problem.weights));
  const Tensor output = run.run();

  // Every element is written: the output was NaN before.
  const auto* bits = output.as<const std::uint16_t>();
  const int infinity = output.dtype() == DType::kF16 ? 0x7c00 : 0x7f80;
  const auto is_nan = [&](std::uint16_t value) { return (value & 0x7fff) > infinity; };
  EXPECT_EQ(std::count_if(bits, bits + output.numel(), is_nan), 0);

  // Tokens from everywhere; each has rows in 8 experts, and the rows of the last experts are behind
  // 2^31 elements.
  std::vector<std::int64_t> tokens{0, 1, kTokens / 2, kTokens - 2, kTokens - 1};
  for (std::int64_t token = 4999; token < kTokens; token += 5003) tokens.push_back(token);
  const Problem sample = pick(problem, tokens);
  const Tensor expected = testing::run_reference(sample);
  Tensor actual = Tensor::empty(expected.shape(), expected.dtype());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    copy(output.select(0, tokens[i]), actual.select(0, static_cast<std::int64_t>(i)), {});
  }
  testing::expect_close(actual, expected);
}

}  // namespace
}  // namespace fusedmoe
