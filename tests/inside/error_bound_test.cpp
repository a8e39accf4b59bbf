// The bound of `fusedmoe bench`: what one number that is rounded to the next code may change.
#include "testing/error_bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "testing/cases.h"

namespace fusedmoe::testing::error_bound_test {

/// Largest change of results over the largest result when the largest number of a row, at least 4
/// times its rms, is moved by the step of E4M3. Rows and weights are random.
double change_of_one_code(std::int64_t width) {
  constexpr int kResults = 256;
  Random random(7);
  std::vector<double> row(static_cast<std::size_t>(width));
  for (double& x : row) x = random.normal();
  row[0] = std::max(4.0, std::abs(*std::max_element(row.begin(), row.end())));
  double largest = 0, change = 0;
  for (int i = 0; i < kResults; ++i) {
    double sum = 0, first = 0;
    for (std::int64_t k = 0; k < width; ++k) {
      const double weight = random.normal();
      if (k == 0) first = weight;
      sum += weight * row[static_cast<std::size_t>(k)];
    }
    largest = std::max(largest, std::abs(sum));
    change = std::max(change, std::abs(first * row[0] / 8));
  }
  return change / largest;
}

TEST(ErrorBoundTest, OneCodeOfANarrowLayerIsWithin) {
  for (const std::int64_t width : {48, 64, 128, 256, 768, 2048}) {
    EXPECT_LE(change_of_one_code(width),
              error_bound(DType::kBF16, parse_scheme("fp8_tensor"), width))
        << width;
  }
}

TEST(ErrorBoundTest, WideAndUnquantizedLayersAreHeldToLess) {
  const QuantScheme fp8 = parse_scheme("fp8_tensor");
  EXPECT_GT(change_of_one_code(128), 3e-2) << "narrow layers need more";
  EXPECT_LT(error_bound(DType::kBF16, fp8, 128), 8e-2);
  EXPECT_EQ(error_bound(DType::kBF16, fp8, 14336), 3e-2);
  EXPECT_EQ(error_bound(DType::kBF16, parse_scheme("int8_w8a8"), 128), 3e-2);
  EXPECT_EQ(error_bound(DType::kBF16, parse_scheme("fp8_channel_w8a16"), 128), 1e-2);
  EXPECT_EQ(error_bound(DType::kF32, parse_scheme("f32"), 128), 2e-5);
}

}  // namespace fusedmoe::testing::error_bound_test
