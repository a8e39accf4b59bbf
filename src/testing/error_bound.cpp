#include "testing/error_bound.h"

#include <algorithm>
#include <cmath>

namespace fusedmoe::testing {

double code_step(const QuantKey& key) {
  switch (key.value) {
    case DType::kE2M1:
      return 1.0 / 2;
    case DType::kE4M3:
      return 1.0 / 8;
    case DType::kI16:
      return 1.0 / 16384;  // the scale is a power of two
    default:
      return 1.0 / 127;
  }
}

double error_bound(DType dtype, const QuantScheme& scheme, std::int64_t intermediate) {
  const double rounding = dtype == DType::kBF16 ? 1e-2 : dtype == DType::kF16 ? 2e-3 : 2e-5;
  if (!scheme.activations) return rounding;
  // Sums in another order round some of the numbers that GEMM 2 reads to the code next to theirs.
  // Of many such numbers, the most that was seen is 2.1e-2: W4A8 of mixtral-8x7b on an H200. In a
  // narrow layer one alone weighs more. A result is a sum of `intermediate` products, and a number
  // is seldom more than 6 times the rms of its row, so its share of a result is
  // 6 / sqrt(intermediate), which changes by a code's step.
  constexpr double kManyCodes = 3e-2, kLargest = 6;
  const double one_code =
      kLargest * code_step(*scheme.activations) / std::sqrt(static_cast<double>(intermediate));
  return std::max(kManyCodes, rounding + one_code);
}

}  // namespace fusedmoe::testing
