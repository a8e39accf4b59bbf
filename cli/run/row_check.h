// Rows of a forward, checked against reference.
#pragma once

#include <cstdint>
#include <string>

#include "fusedmoe/layer.h"
#include "testing/compare.h"

namespace fusedmoe::cli {

/// Rows of an output against the reference implementation on the same inputs.
struct RowCheck {
  std::int64_t rows = 0;
  std::int64_t num_tokens = 0;
  std::int64_t rows_routed_differently = 0;
  testing::Difference difference;
  double tolerance = 0;       ///< of Difference::max_norm_relative
  DType dtype = DType::kF32;  ///< of the reference's hidden states
  /// Rows beyond the tolerance, and how many of them are within what bounds_of_one_code() adds to
  /// it; the largest of these sums; and most_rows_with_other_codes().
  std::int64_t rows_beyond = 0, rows_within_codes = 0, most_beyond = 0;
  double tolerance_with_codes = 0;

  bool passed() const;
  std::string text() const;
};

/// How an output was made, as far as its arithmetic depends on it.
struct CheckedRun {
  std::int64_t count = 0;  ///< rows to check
  Routing routing;
  bool replayed =
      false;           ///< the routing: else the reference routes by itself, which is checked too
  bool hooks = false;  ///< the steps between the GEMMs store rows, which rounds them
  ParallelConfig parallel;
};

/// Checks rows spread evenly over `output` (num_tokens, hidden), made from x, against a reference
/// that rounds and quantizes where the run did. On several ranks a dynamic scale may be each rank's
/// own, so codes and output differ more.
RowCheck check_rows(const LayerWeights& weights, const TensorView& x, const TensorView& output,
                    const CheckedRun& run);

}  // namespace fusedmoe::cli
