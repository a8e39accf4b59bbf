// How evenly a batch loads the experts.
#pragma once

#include <cstdint>
#include <vector>

#include "fusedmoe/tensor.h"

namespace fusedmoe {

struct LoadStatistics {
  std::int64_t num_tokens = 0, topk = 0;
  std::vector<std::int64_t> rows_per_expert;  ///< (num_experts): tokens that chose each
  std::int64_t rows = 0;                      ///< their sum: slots that select something
  std::int64_t most = 0;                      ///< rows of the busiest expert
  double balance = 0;                         ///< most / mean; 1 is even, 0 without rows
  std::int64_t distinct_experts = 0;          ///< experts with rows: those whose weights are read
  /// What uniform routing would hit: E (1 - (1 - topk / E)^num_tokens).
  double expected_distinct_experts = 0;

  std::int64_t num_experts() const { return static_cast<std::int64_t>(rows_per_expert.size()); }
};

/// topk_ids: (num_tokens, topk) i32, global ids or -1. Throws Error for ids out of range.
LoadStatistics load_statistics(const TensorView& topk_ids, std::int64_t num_experts);
/// The same from ForwardOptions::expert_load in host memory.
LoadStatistics load_statistics(const TensorView& expert_load, std::int64_t num_tokens,
                               std::int64_t topk);

/// How many experts a token shares with the one before it, on average: weights that are still in a
/// cache when tokens come one by one. 0 for fewer than two tokens.
double shared_with_previous(const TensorView& topk_ids, std::int64_t num_experts);

}  // namespace fusedmoe
