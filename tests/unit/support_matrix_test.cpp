// One test for each "yes" of docs/support-matrix.md on the CPU, with each of its variants: it runs
// and agrees with the reference. The rows come from the registry, so a new implementation or scheme
// is tested without a word here.
#include "testing/support_matrix.h"

#include <gtest/gtest.h>

#include "fusedmoe/selection.h"
#include "testing/compare.h"

namespace fusedmoe::support_matrix_test {

using testing::Variant;

struct Cell {
  const NamedScheme* scheme;
  Variant variant;
  DType dtype;
};

const std::vector<Cell>& cells() {
  static const std::vector<Cell> list = [] {
    std::vector<Cell> all;
    for (const NamedScheme& scheme : named_schemes()) {
      for (const Variant& variant : testing::all_variants()) {
        const MoeConfig config = testing::support_config(scheme, *variant.experts);
        if (config.device.is_cpu() && variant.supports(config)) {
          all.push_back({&scheme, variant, config.dtype});
        }
      }
    }
    return all;
  }();
  return list;
}

/// Indices, because the names of test cases are all that a cell may say on the way to ctest.
std::vector<std::size_t> indices() {
  std::vector<std::size_t> result(cells().size());
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = i;
  return result;
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
  const Cell& cell = cells()[GetParam()];
  const testing::Problem problem = testing::make_problem(testing::support_case(*cell.scheme));
  // With hooks the reference rounds where the others do. It is itself held to the one without, in
  // f32, where what it rounds besides is of no account.
  const ExpertsDescriptor* reference = all_experts().back();
  const bool itself = cell.variant.hooks && cell.variant.experts == reference;
  const DType dtype = itself ? DType::kF32 : cell.dtype;
  const Tensor actual = testing::run_variant(problem, cell.variant, dtype);
  EXPECT_TRUE(testing::bitwise_equal(testing::run_variant(problem, cell.variant, dtype), actual))
      << "second run";
  const Variant expected{reference, &no_ep(), cell.variant.hooks && !itself};
  const testing::Difference difference =
      testing::compare(actual, testing::run_variant(problem, expected, dtype));
  const Tolerance bound = tolerance(cell.scheme->scheme);
  // Batched experts round their rows before the weighted sum.
  const bool batched = cell.variant.prepare_finalize != &no_ep();
  EXPECT_FALSE(difference.nonfinite_mismatch);
  EXPECT_LE(difference.max_element, (batched ? 2 : 1) * bound.max) << difference.to_string();
  EXPECT_LE(difference.rms_element, (batched ? 2 : 1) * bound.rms) << difference.to_string();
}

INSTANTIATE_TEST_SUITE_P(Yes, SupportMatrixTest, ::testing::ValuesIn(indices()),
                         [](const auto& info) {
                           const Cell& cell = cells()[info.param];
                           return cell.variant.name() + "_" + cell.scheme->name;
                         });

TEST(SupportMatrixPageTest, ReferenceServesEveryScheme) {
  const ExpertsDescriptor* reference = all_experts().back();
  for (const NamedScheme& scheme : named_schemes()) {
    const MoeConfig config = testing::support_config(scheme, *reference);
    EXPECT_TRUE((Variant{reference, &no_ep()}.supports(config))) << scheme.name;
    EXPECT_TRUE((Variant{reference, &batched()}.supports(config))) << scheme.name;
  }
}

TEST(SupportMatrixPageTest, HasALineForEachScheme) {
  const std::string page = testing::support_matrix_markdown();
  for (const NamedScheme& scheme : named_schemes()) {
    EXPECT_NE(page.find("\n| " + std::string(scheme.name) + " "), std::string::npos) << scheme.name;
  }
  EXPECT_NE(page.find("| reference | cpu "), std::string::npos);
}

}  // namespace fusedmoe::support_matrix_test
