// The one comparison helper of tests, benchmarks and the CLI.
#pragma once

#include <cstdint>
#include <string>

#include "fusedmoe/tensor.h"

namespace fusedmoe::testing {

/// How far `actual` is from `expected` (any floating dtypes, same shape).
struct Difference {
  bool nonfinite_mismatch = false;  ///< a NaN or infinity in one that the other does not have
  double max_norm_relative = 0;     ///< max |a - e| / max |e|
  double rms_relative = 0;          ///< rms(a - e) / rms(e)
  /// max over elements of |a - e| / max(rms(e), |e|): triton_kernels' "maxtol"
  double max_element = 0;
  /// sqrt(mean((|a - e| / max(rms(e), |e|))^2)): triton_kernels' "rmstol"
  double rms_element = 0;
  std::int64_t worst_index = -1;
  double worst_actual = 0, worst_expected = 0;

  std::string to_string() const;
};
Difference compare(const TensorView& actual, const TensorView& expected);

/// Same dtype, shape and bytes.
bool bitwise_equal(const TensorView& a, const TensorView& b);

}  // namespace fusedmoe::testing
