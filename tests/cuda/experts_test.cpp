// The Hopper experts against the reference: every awkward case, every tile configuration around its
// edges, the same bits twice and in any batch.
#include "cuda/experts.h"

#include <gtest/gtest.h>

#include <cstring>

#include "cuda/gemm/heuristic.h"
#include "fusedmoe/device.h"
#include "fusedmoe/error.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "reference/experts.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe {
namespace {

using testing::bitwise_equal;
using testing::Case;
using testing::compare;
using testing::Problem;

const Device kGpu{DeviceKind::kCuda, 0};

/// Bounds of spec "tolerances", section 5, against a reference that rounds at the same points. Rows
/// that GEMM 2 leaves in bf16, to the combine or to finalize, are one rounding more.
constexpr double kMaxElement = 2 * 2e-2, kRmsElement = 2 * 4e-3;

const PrepareAndFinalize& pair_of(const Experts& experts) {
  return experts.activation_format() == ActivationFormat::kStandard ? *all_prepare_finalize()[0]
                                                                    : *all_prepare_finalize()[1];
}

Tensor run(const Problem& problem, const Experts& experts) {
  return testing::run_experts(problem, pair_of(experts), experts, *experts.pack(problem.weights),
                              DType::kBF16);
}

void expect_close(const Tensor& actual, const Tensor& expected) {
  const testing::Difference difference = compare(actual, expected);
  EXPECT_FALSE(difference.nonfinite_mismatch) << difference.to_string();
  EXPECT_LE(difference.max_element, kMaxElement) << difference.to_string();
  EXPECT_LE(difference.rms_element, kRmsElement) << difference.to_string();
}

std::shared_ptr<const Experts> find_experts(std::string_view wanted) {
  for (const auto& experts : cuda::make_all_experts()) {
    if (experts->name() == wanted) return experts;
  }
  throw Error("experts", std::string(wanted), "in the registry");
}

std::vector<QuantScheme> gpu_schemes() {
  return {schemes::unquantized(DType::kBF16), schemes::mxfp4_w4a16()};
}

/// Whether a case has a form in the scheme.
bool fits(const Case& spec, const QuantScheme& scheme) {
  return scheme != schemes::mxfp4_w4a16() ||
         (spec.hidden % 32 == 0 && spec.intermediate % 32 == 0 && !spec.transposed);
}

std::vector<Case> awkward_cases() {
  std::vector<Case> result;
  for (const Case& spec : testing::awkward_cases()) {
    for (const QuantScheme& scheme : gpu_schemes()) {
      if (!fits(spec, scheme)) continue;
      Case changed = spec;
      changed.scheme = scheme;
      changed.name.append("_").append(name(scheme));
      result.push_back(changed);
    }
  }
  return result;
}

class CudaExpertsTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (const std::string problem = device_problem(kGpu); !problem.empty()) {
      GTEST_SKIP() << problem;
    }
  }
};

TEST_P(CudaExpertsTest, MatchesReference) {
  const Problem problem = testing::make_problem(GetParam());
  const auto reference = reference::make_experts(ActivationFormat::kStandard);
  const Tensor expected = run(problem, *reference);
  int ran = 0;
  for (const auto& experts : cuda::make_all_experts()) {
    MoeConfig config = testing::make_config(GetParam(), DType::kBF16, kGpu);
    config.activation_format = experts->activation_format();
    if (!experts->supports(config)) continue;
    ++ran;
    SCOPED_TRACE(std::string(experts->name()));
    const Tensor actual = run(problem, *experts);
    expect_close(actual, expected);
    EXPECT_TRUE(bitwise_equal(run(problem, *experts), actual)) << "second run";
  }
  // Hidden sizes that are no multiple of 8 are for the CPU.
  EXPECT_EQ(ran == 0, GetParam().hidden % 8 != 0);
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaExpertsTest, ::testing::ValuesIn(awkward_cases()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return info.param.name;
                         });

/// Rows per expert around the edges of tiles, with sizes that end inside a record.
std::vector<Case> tile_cases() {
  std::vector<Case> result;
  for (const QuantScheme& scheme : gpu_schemes()) {
    for (const std::int64_t tokens : {1, 8, 9, 31, 65, 129, 257, 520}) {
      Case spec;
      spec.name = std::string(name(scheme)) + "_" + std::to_string(tokens);
      spec.num_tokens = tokens;
      spec.num_experts = 5;
      spec.topk = 2;
      spec.hidden = 480;
      spec.intermediate = 160;
      spec.scheme = scheme;
      spec.activation = Activation::kSwigluOai;
      spec.bias = true;
      // All rows on two experts, so that their number is that of the tokens.
      spec.skew = testing::RoutingSkew::kOneExpert;
      spec.negative_ids = tokens == 65;
      result.push_back(spec);
    }
  }
  return result;
}

class CudaTileConfigTest : public CudaExpertsTest {};

TEST_P(CudaTileConfigTest, EveryPlanMatchesReference) {
  const Case& spec = GetParam();
  const Problem problem = testing::make_problem(spec);
  const Tensor expected = run(problem, *reference::make_experts(ActivationFormat::kStandard));
  const auto experts =
      find_experts(spec.scheme == schemes::mxfp4_w4a16() ? "sm90_mxfp4" : "sm90_bf16");
  cuda::GemmShape shape;
  shape.format = spec.scheme == schemes::mxfp4_w4a16() ? cuda::WeightFormat::kMXFP4
                                                       : cuda::WeightFormat::kBF16;
  shape.num_tokens = spec.num_tokens;
  shape.topk = spec.topk;
  shape.num_local_experts = spec.num_experts;
  shape.hidden = spec.hidden;
  shape.intermediate = spec.intermediate;
  for (cuda::GemmPlan plan : cuda::valid_plans(shape)) {
    for (const bool rows_f32 : {true, false}) {
      if (plan.splits > 1 && !rows_f32) continue;
      plan.rows_f32 = rows_f32;
      SCOPED_TRACE(to_string(plan));
      const cuda::PinnedPlan pin(plan);
      const Tensor actual = run(problem, *experts);
      expect_close(actual, expected);
      EXPECT_TRUE(bitwise_equal(run(problem, *experts), actual)) << "second run";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaTileConfigTest, ::testing::ValuesIn(tile_cases()),
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

TEST(CudaExpertsInvarianceTest, RowDoesNotDependOnItsBatch) {
  if (const std::string problem = device_problem(kGpu); !problem.empty()) GTEST_SKIP() << problem;
  for (const QuantScheme& scheme : gpu_schemes()) {
    Case spec;
    spec.num_tokens = 8192;
    spec.num_experts = 6;
    spec.topk = 3;
    spec.hidden = 416;
    spec.intermediate = 96;
    spec.scheme = scheme;
    spec.activation = Activation::kSwigluOai;
    spec.bias = true;
    const Problem problem = testing::make_problem(spec);
    const auto experts =
        find_experts(scheme == schemes::mxfp4_w4a16() ? "sm90_mxfp4_batch_invariant"
                                                      : "sm90_bf16_batch_invariant");
    const Tensor all = run(problem, *experts);
    for (const std::int64_t rows : {1, 5, 64, 300, 1000}) {
      const Tensor few = run(head(problem, rows), *experts);
      EXPECT_TRUE(bitwise_equal(few, all.slice(0, 0, rows))) << name(scheme) << " " << rows;
    }
  }
}

}  // namespace
}  // namespace fusedmoe
