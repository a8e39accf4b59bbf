// The fast CPU experts against the reference, on every awkward case and dtype; their determinism
// and batch invariance. Runs once for each instruction set of the machine (tests/CMakeLists.txt).
#include "cpu/experts.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <utility>

#include "cpu/kernels.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "malformed.h"
#include "runner.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::cpu_experts_test {

using testing::bitwise_equal;
using testing::Case;
using testing::compare;
using testing::on_cuda;
using testing::Problem;
using testing::Runner;

/// Bounds of spec "tolerances", section 5, against a reference that rounds at the same points:
/// 2e-2 and 4e-3 for bf16; f16 has 8 times its precision; f32 sums up to 2880 products of order
/// 1/sqrt(2880), each rounded at 6e-8.
struct Tolerance {
  double max, rms;
};
Tolerance tolerance(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return {2e-2, 4e-3};
    case DType::kF16:
      return {2.5e-3, 5e-4};
    default:
      return {2e-5, 2e-6};
  }
}

Tensor run(const Problem& problem, const char* variant, DType dtype) {
  return testing::run_variant(problem, testing::find_variant(variant), dtype);
}

/// Packs and throws as "cpu" does.
void pack(const Problem& problem) {
  const MoeConfig config = testing::make_config(problem.spec, DType::kBF16);
  cpu::descriptor().create(config, {})->pack(problem.weights);
}

/// The schemes that the fast experts have, of each case; of the largest ones their own, as to make
/// and pack the weights takes seconds. "wide_f32" and "long_f32" have as long sums.
std::vector<Case> cases_in_every_scheme() {
  std::vector<Case> result;
  for (const Case& spec : testing::awkward_cases()) {
    for (const QuantScheme& scheme : {schemes::unquantized(DType::kF32),
                                      schemes::unquantized(DType::kBF16), schemes::mxfp4_w4a16()}) {
      if (spec.hidden * spec.intermediate > (1 << 20) && scheme != spec.scheme) continue;
      const bool mxfp4 = scheme == schemes::mxfp4_w4a16();
      if (mxfp4 && (spec.hidden % 32 != 0 || spec.intermediate % 32 != 0 || spec.transposed)) {
        continue;
      }
      Case changed = spec;
      changed.scheme = scheme;
      changed.name.append("_").append(name(scheme));
      result.push_back(changed);
    }
  }
  return result;
}

class CpuExpertsTest : public ::testing::TestWithParam<Case> {};

TEST_P(CpuExpertsTest, MatchesReference) {
  const Problem problem = testing::make_problem(GetParam());
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Tensor expected = run(problem, "reference", dtype);
    for (const char* variant : {"cpu", "cpu_batched"}) {
      const Runner runner(problem, variant, dtype);
      const Tensor actual = runner.run(problem);
      const testing::Difference difference = compare(actual, expected);
      SCOPED_TRACE(std::string(variant) + " " + std::string(name(dtype)) + ": " +
                   difference.to_string());
      EXPECT_FALSE(difference.nonfinite_mismatch);
      // The batched format rounds each row before the weighted sum: one rounding more.
      const double factor = variant == std::string_view("cpu_batched") ? 2 : 1;
      EXPECT_LE(difference.max_element, factor * tolerance(dtype).max);
      EXPECT_LE(difference.rms_element, factor * tolerance(dtype).rms);
      EXPECT_TRUE(bitwise_equal(runner.run(problem), actual)) << "second run";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CpuExpertsTest, ::testing::ValuesIn(cases_in_every_scheme()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return info.param.name;
                         });

/// The first rows of a problem, as a problem.
Problem head(const Problem& problem, std::int64_t num_tokens) {
  Problem result = problem;
  result.spec.num_tokens = num_tokens;
  for (Tensor* tensor : {&result.hidden_states, &result.topk_ids, &result.topk_weights}) {
    *tensor = Tensor(tensor->slice(0, 0, num_tokens), tensor->owner());
  }
  return result;
}

TEST(CpuExpertsInvarianceTest, RowDoesNotDependOnItsBatch) {
  for (const QuantScheme& scheme : {schemes::unquantized(DType::kF32),
                                    schemes::unquantized(DType::kBF16), schemes::mxfp4_w4a16()}) {
    Case spec;
    spec.num_tokens = 300;
    spec.num_experts = 6;
    spec.topk = 3;
    spec.hidden = 4160;  // more than one decoded panel
    spec.intermediate = 96;
    spec.scheme = scheme;
    spec.activation = Activation::kSwigluOai;
    spec.bias = true;
    const Problem problem = testing::make_problem(spec);
    for (DType dtype : {DType::kBF16, DType::kF32}) {
      for (const char* variant : {"cpu_batch_invariant", "cpu_batched_batch_invariant"}) {
        const Tensor whole = run(problem, variant, dtype);
        for (std::int64_t num_tokens : {1, 2, 3, 4, 5, 7, 13, 64, 200}) {
          const Tensor part = run(head(problem, num_tokens), variant, dtype);
          EXPECT_TRUE(bitwise_equal(part, whole.slice(0, 0, num_tokens)))
              << name(scheme) << " " << name(dtype) << " " << variant << " M = " << num_tokens;
        }
      }
    }
  }
}

TEST(CpuExpertsInvarianceTest, NumberOfThreadsDoesNotMatter) {
  Case spec;
  spec.num_tokens = 33;
  spec.scheme = schemes::mxfp4_w4a16();
  spec.hidden = 96;
  spec.intermediate = 160;
  const Problem problem = testing::make_problem(spec);
  set_num_threads(1);
  const Tensor one = run(problem, "cpu", DType::kBF16);
  set_num_threads(5);
  const Tensor five = run(problem, "cpu", DType::kBF16);
  set_num_threads(0);
  EXPECT_TRUE(bitwise_equal(one, five));
}

TEST(CpuExpertsTest, MapEntriesBeyondTheLocalExpertsAreNotLocal) {
  Case spec;
  spec.expert_map = true;
  for (const char* variant : {"cpu", "cpu_batched"}) {
    const Problem problem = testing::make_problem(spec);
    const Tensor expected = run(problem, variant, DType::kF32);
    auto* map = problem.expert_map.as<std::int32_t>();
    std::int32_t beyond = static_cast<std::int32_t>(problem.weights.num_experts());
    for (std::int64_t id = 0; id < problem.expert_map.numel(); ++id) {
      if (map[id] < 0) map[id] = std::exchange(beyond, 1 << 30);
    }
    EXPECT_TRUE(bitwise_equal(run(problem, variant, DType::kF32), expected));
  }
}

TEST(CpuExpertsTest, ArgumentsOnAnotherDeviceAreErrors) {
  const Problem problem = testing::make_problem({});
  const MoeConfig config = testing::make_config(problem.spec, DType::kF32);
  const auto experts = cpu::descriptor().create(config, {});
  const auto packed = experts->pack(problem.weights);
  const Tensor output = Tensor::empty(problem.hidden_states.shape(), DType::kF32);
  const Tensor map = Tensor::zeros({8}, DType::kI32);
  const std::pair<const char*, std::function<void(ForwardArgs&)>> faults[] = {
      {"hidden_states", [](auto& args) { args.hidden_states = on_cuda(args.hidden_states); }},
      {"fused_output", [](auto& args) { args.fused_output = on_cuda(args.fused_output); }},
      {"topk_ids", [](auto& args) { args.topk_ids = on_cuda(args.topk_ids); }},
      {"topk_weights", [](auto& args) { args.topk_weights = on_cuda(args.topk_weights); }},
      {"expert_map", [&](auto& args) { args.expert_map = on_cuda(map); }},
      {"hidden_scales", [&](auto& args) { args.hidden_scales = on_cuda(map); }},
      {"stream",
       [](auto& args) {
         args.stream = {testing::kCuda, &args};
       }},
  };
  for (const auto& [argument, spoil] : faults) {
    ForwardArgs args;
    args.weights = packed.get();
    args.fused_output = output;
    args.hidden_states = problem.hidden_states;
    args.topk_ids = problem.topk_ids;
    args.topk_weights = problem.topk_weights;
    spoil(args);
    testing::expect_error(argument, output, [&] { experts->apply(args); });
  }
}

TEST(CpuExpertsNanTest, StayInTheirTokens) {
  Case spec;
  spec.num_tokens = 5;
  const Problem problem = testing::make_problem(spec);
  const Tensor clean = run(problem, "cpu", DType::kF32);
  testing::poison(problem.hidden_states.slice(0, 2, 3));
  const Tensor actual = run(problem, "cpu", DType::kF32);
  for (std::int64_t token = 0; token < 5; ++token) {
    for (std::int64_t i = 0; i < spec.hidden; ++i) {
      const float value = actual.as<const float>()[token * spec.hidden + i];
      if (token == 2) {
        EXPECT_NE(value, value) << "NaN was lost at column " << i;
      } else {
        EXPECT_EQ(value, clean.as<const float>()[token * spec.hidden + i]);
      }
    }
  }
}

/// silu of a hugely negative gate is 0, whatever multiplies it.
TEST(CpuExpertsActivationTest, SaturatesToZero) {
  Case spec;
  spec.num_tokens = 1;
  spec.num_experts = spec.topk = 1;
  spec.hidden = spec.intermediate = 4;
  spec.scheme = schemes::unquantized(DType::kF32);
  Problem problem = testing::make_problem(spec);
  for (ExpertMatrices& expert : problem.weights.experts) {
    for (std::int64_t i = 0; i < 16; ++i) {
      expert.gate.values.as<float>()[i] = -1;
      expert.up.values.as<float>()[i] = 1;
    }
  }
  for (std::int64_t i = 0; i < 4; ++i) problem.hidden_states.as<float>()[i] = 1e18f;
  const Tensor actual = run(problem, "cpu", DType::kF32);
  for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(actual.as<const float>()[i], 0.0f);
}

TEST(CpuExpertsArgumentsTest, CountsOfTheBatchedFormatAreChecked) {
  Case spec;
  const Problem problem = testing::make_problem(spec);
  const MoeConfig config =
      testing::find_variant("cpu_batched").of(testing::make_config(spec, DType::kBF16));
  const auto experts = cpu::descriptor().create(config, {});
  const auto packed = experts->pack(problem.weights);
  const WorkspaceSizes sizes = experts->workspace_sizes(ProblemSize::of(config, 4));
  const auto scratch = [](std::size_t bytes) {
    return Tensor::zeros({static_cast<std::int64_t>(bytes)}, DType::kU8);
  };
  const Tensor workspace13 = scratch(sizes.workspace13_bytes);
  const Tensor workspace2 = scratch(sizes.workspace2_bytes);
  const Tensor counts = Tensor::zeros({spec.num_experts}, DType::kI32);
  ForwardArgs args;
  args.weights = packed.get();
  const Tensor hidden_states = Tensor::zeros(sizes.output_shape, DType::kBF16);
  const Tensor output = Tensor::zeros(sizes.output_shape, DType::kBF16);
  args.hidden_states = hidden_states;
  args.fused_output = output;
  args.expert_num_tokens = counts;
  args.workspace13 = workspace13.data();
  args.workspace2 = workspace2.data();
  EXPECT_NO_THROW(experts->apply(args));
  for (std::int32_t wrong : {-1, 5, 100000}) {
    counts.as<std::int32_t>()[1] = wrong;
    EXPECT_THROW(experts->apply(args), Error) << wrong;
  }
  counts.as<std::int32_t>()[1] = 0;
  args.weights = nullptr;
  EXPECT_THROW(experts->apply(args), Error);
}

/// Scales that vary wildly within a row, and blocks of zeros with any scale code.
TEST(CpuExpertsMxfp4Test, ExtremeScales) {
  Case spec;
  spec.num_tokens = 9;
  spec.num_experts = 2;
  spec.topk = 1;
  spec.hidden = 256;
  spec.intermediate = 64;
  spec.scheme = schemes::mxfp4_w4a16();
  Problem problem = testing::make_problem(spec);
  std::vector<Tensor> keep;
  testing::Random random(7);
  for (ExpertMatrices& expert : problem.weights.experts) {
    for (WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      const std::int64_t rows = matrix->scales.size(0), blocks = matrix->scales.size(1);
      Tensor values = Tensor::empty({rows, blocks * 16}, DType::kU8);
      Tensor scales = Tensor::empty({rows, blocks}, DType::kU8);
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t block = 0; block < blocks; ++block) {
          std::memcpy(
              values.as<std::uint8_t>() + (row * blocks + block) * 16,
              matrix->values.as<std::uint8_t>() + row * matrix->values.stride(0) + block * 16, 16);
          scales.as<std::uint8_t>()[row * blocks + block] =
              static_cast<std::uint8_t>(127 - 20 + random.below(25));
          if (random.below(4) == 0) {  // zeros and minus zeros
            std::memset(values.as<std::uint8_t>() + (row * blocks + block) * 16, 0x80, 16);
            scales.as<std::uint8_t>()[row * blocks + block] =
                static_cast<std::uint8_t>(random.below(255));
          }
        }
      }
      matrix->values = values;
      matrix->scales = scales;
      keep.push_back(values);
      keep.push_back(scales);
    }
  }
  const Tensor expected = run(problem, "reference", DType::kBF16);
  for (const char* variant : {"cpu", "cpu_batch_invariant"}) {
    const testing::Difference difference = compare(run(problem, variant, DType::kBF16), expected);
    EXPECT_LE(difference.max_element, tolerance(DType::kBF16).max)
        << variant << " " << difference.to_string();
  }
  const Tensor whole = run(problem, "cpu_batch_invariant", DType::kBF16);
  for (std::int64_t num_tokens = 1; num_tokens < 9; ++num_tokens) {
    EXPECT_TRUE(bitwise_equal(run(head(problem, num_tokens), "cpu_batch_invariant", DType::kBF16),
                              whole.slice(0, 0, num_tokens)));
  }
}

/// Tiles of a non-gated layer are 64 outputs, so 32 of them leave half a tile of padding.
TEST(CpuExpertsMxfp4Test, NonGatedWithHalfATile) {
  Case spec;
  spec.num_experts = 1;
  spec.topk = 1;
  spec.hidden = spec.intermediate = 32;
  spec.scheme = schemes::mxfp4_w4a16();
  spec.activation = Activation::kRelu2NoMul;
  const Problem problem = testing::make_problem(spec);
  const Tensor expected = run(problem, "reference", DType::kBF16);
  const testing::Difference difference = compare(run(problem, "cpu", DType::kBF16), expected);
  EXPECT_LE(difference.max_element, tolerance(DType::kBF16).max) << difference.to_string();
}

TEST(CpuExpertsMxfp4Test, ScalesTooFarApartAreRefused) {
  Case spec;
  spec.hidden = spec.intermediate = 64;
  spec.scheme = schemes::mxfp4_w4a16();
  Problem problem = testing::make_problem(spec);
  std::uint8_t* scales = problem.weights.experts[0].up.scales.as<std::uint8_t>();
  scales[0] = 160;
  scales[1] = 100;
  try {
    pack(problem);
    FAIL() << "packed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("100 to 160"), std::string::npos) << error.what();
  }
}

TEST(CpuExpertsMxfp4Test, ScaleOutsideItsRangeIsRefused) {
  Case spec;
  spec.hidden = spec.intermediate = 32;
  spec.scheme = schemes::mxfp4_w4a16();
  Problem problem = testing::make_problem(spec);
  std::uint8_t* scale = problem.weights.experts[1].down.scales.as<std::uint8_t>();
  *scale = 20;
  try {
    pack(problem);
    FAIL() << "packed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("E8M0 code 20"), std::string::npos) << error.what();
  }
}

}  // namespace fusedmoe::cpu_experts_test
