// One test for each "yes" of docs/support-matrix.md: it runs and agrees with the reference. The
// rows come from the registry, so a new implementation or scheme is tested without a word here.
#include "testing/support_matrix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "testing/compare.h"

namespace fusedmoe {
namespace {

using testing::SupportRow;

const std::vector<SupportRow>& rows() {
  static const std::vector<SupportRow> matrix = testing::support_matrix();
  return matrix;
}

/// Indices, because the names of test cases are all that a row may say on the way to ctest.
std::vector<std::size_t> supported_rows() {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < rows().size(); ++i) {
    if (rows()[i].candidate.support) result.push_back(i);
  }
  return result;
}

std::shared_ptr<const Experts> experts_of(std::string_view name) {
  for (const auto& experts : all_experts()) {
    if (experts->name() == name) return experts;
  }
  return nullptr;
}

Tensor run(const Experts& experts, const PrepareAndFinalize& prepare_finalize,
           const testing::Problem& problem, DType dtype) {
  return testing::run_experts(problem, prepare_finalize, experts, *experts.pack(problem.weights),
                              dtype);
}

/// Largest and rms of |a - e| / max(rms(e), |e|); spec "tolerances", section 5. Where activations
/// are quantized, the order of a sum may carry a value over a tie: codes of E2M1 lie up to a third
/// apart, of E4M3 a sixteenth.
struct Tolerance {
  double max = 2e-2, rms = 4e-3;
};
Tolerance tolerance(const QuantScheme& scheme) {
  const bool e2m1 = scheme.activations && scheme.activations->value == DType::kE2M1;
  return e2m1 ? Tolerance{1.5e-1, 1.5e-2} : Tolerance{};
}

class SupportMatrixTest : public ::testing::TestWithParam<std::size_t> {};

TEST_P(SupportMatrixTest, AgreesWithReference) {
  const SupportRow& row = rows()[GetParam()];
  const Experts& experts = *row.candidate.experts;
  const testing::Problem problem = testing::make_problem(row.spec);
  // Unfused experts have a reference that rounds where they do. That one is held to the fused one
  // in f32, where what it rounds besides is of no account.
  const bool unfused = experts.has_hooks();
  const bool first = unfused && experts.is_reference();
  const DType dtype = first ? DType::kF32 : DType::kBF16;
  const Tensor actual = run(experts, *row.candidate.prepare_finalize, problem, dtype);
  EXPECT_TRUE(
      testing::bitwise_equal(run(experts, *row.candidate.prepare_finalize, problem, dtype), actual))
      << "second run";
  const auto reference = experts_of(unfused && !first ? "reference_unfused" : "reference");
  const testing::Difference difference =
      testing::compare(actual, run(*reference, *make_no_ep(), problem, dtype));
  const Tolerance bound = tolerance(row.spec.scheme);
  // Batched experts round their rows before the weighted sum.
  const bool batched = experts.activation_format() == ActivationFormat::kBatchedExperts;
  EXPECT_FALSE(difference.nonfinite_mismatch);
  EXPECT_LE(difference.max_element, (batched ? 2 : 1) * bound.max) << difference.to_string();
  EXPECT_LE(difference.rms_element, (batched ? 2 : 1) * bound.rms) << difference.to_string();
}

INSTANTIATE_TEST_SUITE_P(Yes, SupportMatrixTest, ::testing::ValuesIn(supported_rows()),
                         [](const auto& info) {
                           const SupportRow& row = rows()[info.param];
                           return std::string(row.candidate.experts->name()) + "_" + row.scheme;
                         });

TEST(SupportMatrixPageTest, HasARowForEveryImplementationAndScheme) {
  const auto on_cpu =
      std::count_if(all_experts().begin(), all_experts().end(),
                    [](const auto& experts) { return testing::runs_on_cpu(*experts); });
  EXPECT_EQ(rows().size(), static_cast<std::size_t>(on_cpu) * named_schemes().size());
  std::map<std::string, int> served;
  for (const SupportRow& row : rows()) {
    served[row.scheme] += static_cast<bool>(row.candidate.support);
    EXPECT_EQ(row.candidate.support.text.empty(), static_cast<bool>(row.candidate.support));
  }
  for (const NamedScheme& entry : named_schemes()) {
    EXPECT_GE(served[entry.name], 2) << entry.name << ": by the reference, in both formats";
  }
}

TEST(SupportMatrixPageTest, PageHasALineForEachRow) {
  const std::string page = testing::support_matrix_markdown();
  std::size_t lines = 0;
  for (const SupportRow& row : rows()) {
    const std::string name = "| " + std::string(row.candidate.experts->name()) + " ";
    EXPECT_NE(page.find(name), std::string::npos) << name;
  }
  for (std::size_t at = 0; (at = page.find("\n| ", at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, rows().size() + named_schemes().size() + 4) << "two tables, two heads";
}

}  // namespace
}  // namespace fusedmoe
