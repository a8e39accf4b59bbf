#include "testing/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::testing {

Difference compare(const TensorView& actual, const TensorView& expected) {
  if (!(actual.shape() == expected.shape()) || !actual.contiguous() || !expected.contiguous()) {
    throw Error("compare.actual", fusedmoe::to_string(actual.shape()),
                "contiguous " + fusedmoe::to_string(expected.shape()));
  }
  const std::int64_t count = expected.numel();
  const auto value = [](const TensorView& view, std::int64_t i) {
    return static_cast<double>(load_f32(view.data(), view.dtype(), i));
  };
  double sum_squares = 0, largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double e = value(expected, i);
    if (!std::isfinite(e)) continue;
    sum_squares += e * e;
    largest = std::max(largest, std::abs(e));
  }
  const double rms = count ? std::sqrt(sum_squares / static_cast<double>(count)) : 0;
  constexpr double kTiny = 1e-300;

  Difference result;
  double error_squares = 0, element_squares = 0, worst = -1;
  for (std::int64_t i = 0; i < count; ++i) {
    const double a = value(actual, i), e = value(expected, i);
    if (!std::isfinite(a) || !std::isfinite(e)) {
      const bool same = std::isnan(a) ? std::isnan(e) : a == e;
      if (!same && !result.nonfinite_mismatch) {
        result.nonfinite_mismatch = true;
        result.worst_index = i;
        result.worst_actual = a;
        result.worst_expected = e;
      }
      continue;
    }
    const double error = std::abs(a - e);
    const double element = error / std::max({rms, std::abs(e), kTiny});
    error_squares += error * error;
    element_squares += element * element;
    result.max_norm_relative = std::max(result.max_norm_relative, error / std::max(largest, kTiny));
    result.max_element = std::max(result.max_element, element);
    if (element > worst && !result.nonfinite_mismatch) {
      worst = element;
      result.worst_index = i;
      result.worst_actual = a;
      result.worst_expected = e;
    }
  }
  if (count) {
    const auto n = static_cast<double>(count);
    result.rms_relative = std::sqrt(error_squares / n) / std::max(rms, kTiny);
    result.rms_element = std::sqrt(element_squares / n);
  }
  return result;
}

std::string Difference::to_string() const {
  return fmt::format(
      "max-norm {:.3g}, rms {:.3g}, element max {:.3g} rms {:.3g}{}; worst at {}: {} against {}",
      max_norm_relative, rms_relative, max_element, rms_element,
      nonfinite_mismatch ? ", NON-FINITE MISMATCH" : "", worst_index, worst_actual, worst_expected);
}

bool bitwise_equal(const TensorView& a, const TensorView& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.nbytes())) == 0;
}

}  // namespace fusedmoe::testing
