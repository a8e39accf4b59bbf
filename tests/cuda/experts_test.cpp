// The Hopper experts against the reference: every awkward case, every tile configuration around its
// edges, the same bits twice and in any batch.
#include "cuda/experts.h"

#include "cuda/gemm/heuristic.h"
#include "cuda_test.h"
#include "experts_problem.h"
#include "reference/experts.h"

namespace fusedmoe {
namespace {

using testing::bitwise_equal;
using testing::Case;
using testing::expect_close;
using testing::find_experts;
using testing::gpu_schemes;
using testing::is_mxfp4;
using testing::kGpu;
using testing::Problem;
using testing::run_rows;

/// Every case in every scheme that has a form for its sizes.
std::vector<Case> awkward_cases() {
  std::vector<Case> result;
  for (const Case& spec : testing::awkward_cases()) {
    for (const QuantScheme& scheme : gpu_schemes()) {
      Case changed = spec;
      if (is_mxfp4(scheme)) {
        if (spec.hidden % 2 != 0 || spec.intermediate % 2 != 0) continue;  // two codes in a byte
        changed.transposed = false;
      }
      changed.scheme = scheme;
      changed.name.append("_").append(name(scheme));
      result.push_back(changed);
    }
  }
  return result;
}

class CudaExpertsTest : public testing::CudaTestWith<Case> {};

TEST_P(CudaExpertsTest, MatchesReference) {
  const Problem problem = testing::make_problem(GetParam());
  const Tensor fused = run_rows(problem, *reference::make_experts(ActivationFormat::kStandard));
  const Tensor unfused = run_rows(problem, *reference::make_unfused_experts());
  const auto all = testing::experts_for(GetParam());
  for (const auto& experts : all) {
    SCOPED_TRACE(std::string(experts->name()));
    const Tensor actual = run_rows(problem, *experts);
    expect_close(actual, experts->has_hooks() ? unfused : fused);
    EXPECT_TRUE(bitwise_equal(run_rows(problem, *experts), actual)) << "second run";
  }
  // Hidden sizes that are no multiple of 8 are for the CPU.
  EXPECT_EQ(all.empty(), GetParam().hidden % 8 != 0);
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaExpertsTest, ::testing::ValuesIn(awkward_cases()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return info.param.name;
                         });

TEST(CudaExpertsRefuse, RowsOfAnotherDtype) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  const Problem problem = testing::make_problem(Case{});
  const auto experts = testing::find_experts("sm90_bf16");
  const auto packed = experts->pack(problem.weights);
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    EXPECT_THROW(testing::run_experts(problem, *make_no_ep(), *experts, *packed, dtype), Error);
  }
}

TEST(CudaExpertsRefuse, HiddenSizesThatRowsCannotHave) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  Case spec;
  spec.hidden = 36;
  EXPECT_THROW(testing::find_experts("sm90_bf16")->pack(testing::make_problem(spec).weights),
               Error);
}

/// Rows per expert around the edges of tiles, with sizes that end inside a record.
std::vector<Case> tile_cases() {
  std::vector<Case> result;
  for (const QuantScheme& scheme : gpu_schemes()) {
    for (const std::int64_t tokens : {1, 8, 9, 31, 65, 97, 129, 257, 520}) {
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
  const Tensor expected = run_rows(problem, *reference::make_experts(ActivationFormat::kStandard));
  const auto experts = find_experts("", spec.scheme);
  cuda::GemmShape shape;
  shape.format = testing::format_of(spec.scheme);
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
      const Tensor actual = run_rows(problem, *experts);
      expect_close(actual, expected);
      EXPECT_TRUE(bitwise_equal(run_rows(problem, *experts), actual)) << "second run";
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

class CudaExpertsInvarianceTest : public testing::CudaTest {};

TEST_F(CudaExpertsInvarianceTest, RowDoesNotDependOnItsBatch) {
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
    const auto experts = find_experts("_batch_invariant", scheme);
    const Tensor all = run_rows(problem, *experts);
    for (const std::int64_t rows : {1, 5, 64, 300, 1000}) {
      const Tensor few = run_rows(head(problem, rows), *experts);
      EXPECT_TRUE(bitwise_equal(few, all.slice(0, 0, rows))) << name(scheme) << " " << rows;
    }
  }
}

}  // namespace
}  // namespace fusedmoe
