// The schemes of quantized weights that the experts run, by dtype of rows, and how close to
// the reference each must be.
#pragma once

#include <string>
#include <vector>

#include "experts_problem.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::testing {

/// A scheme with the dtype of its rows.
struct Rows {
  NamedScheme scheme;
  DType dtype;
  std::string name() const { return scheme.name + "_" + std::string(fusedmoe::name(dtype)); }
};
inline void PrintTo(const Rows& rows, std::ostream* stream) {
  *stream << rows.name();
}

/// All but those of 16-bit weights, which other tests are about.
inline std::vector<Rows> all_rows() {
  std::vector<Rows> result;
  for (const NamedScheme& scheme : named_schemes()) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      if (scheme.scheme.weights.quantized() && has_kernels(scheme.scheme, dtype)) {
        result.push_back({scheme, dtype});
      }
    }
  }
  return result;
}

/// Whether the intermediate size must be a multiple of 8: with promoted sums, slices of 8 rows have
/// the scales.
inline bool needs_whole_slices(const QuantScheme& scheme) {
  return scheme.weights.group.rows > 1 && scheme.activations;
}

/// Whether all rows of activations share a scale that follows from them.
inline bool has_tensor_scale(const QuantScheme& scheme) {
  const std::optional<QuantKey>& key = scheme.activations;
  return key && key->value == DType::kE4M3 && key->dynamic && key->group.rows < 0;
}

/// As expect_close() of two. Where activations are quantized, a value next to the edge of two codes
/// may get another one than the reference's, whose sums and activations are in double. The same is
/// true of the scale of its group, row or tensor: one bf16 step of its largest value, 1/256, moves
/// 6 % of its E4M3 codes by 1/16, which is 1.5 % of the result.
inline void expect_close(const TensorView& actual, const TensorView& expected,
                         const QuantScheme& scheme) {
  if (!scheme.activations) return expect_close(actual, expected);
  const bool fp4 = scheme.activations->value == DType::kE2M1;
  const Difference difference = compare(actual, expected);
  EXPECT_FALSE(difference.nonfinite_mismatch) << difference.to_string();
  EXPECT_LE(difference.max_element, fp4 ? 1.5e-1 : 2e-1) << difference.to_string();
  EXPECT_LE(difference.rms_element, fp4 ? 1.5e-2 : 2e-2) << difference.to_string();
}

}  // namespace fusedmoe::testing
