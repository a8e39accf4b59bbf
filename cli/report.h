// What `run` tells about a forward: the load of the experts, and rows checked against reference.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fusedmoe/layer.h"
#include "testing/compare.h"

namespace fusedmoe::cli {

/// Rows that each of num_experts experts gets, from topk_ids (num_tokens, topk) i32.
std::vector<std::int64_t> expert_load(const TensorView& topk_ids, std::int64_t num_experts);

/// A bar per expert (the 32 busiest, if there are more than 64) and a line of totals.
std::string load_chart(const std::vector<std::int64_t>& load);

/// Rows of an output against the reference implementation in f32 on the same inputs.
struct RowCheck {
  std::int64_t rows = 0;
  std::int64_t num_tokens = 0;
  std::int64_t rows_routed_differently = 0;
  testing::Difference difference;
  double tolerance = 0;  ///< of Difference::max_norm_relative

  bool passed() const;
  std::string text() const;
};

/// Checks `count` rows spread evenly over `output` (num_tokens, hidden), made from x.
RowCheck check_rows(const LayerWeights& weights, const TensorView& x, const TensorView& output,
                    const TensorView& topk_ids, std::int64_t count);

}  // namespace fusedmoe::cli
