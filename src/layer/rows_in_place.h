// Rows that are read where they lie: by threads of one process in each other's memory, by processes
// of one host in memory that they share. Nothing is packed, and nothing returns: counts, headers
// and rows are read in one go, and sums read the rows of all ranks.
#pragma once

#include "layer/rank_step.h"

namespace fusedmoe::layer {

/// What a rank lends the others in dispatch.
struct LentRows {
  StepHeader header;
  TensorView counts;  // (num_ranks) i32: rows for each
  TensorView tokens;  // (num_ranks, stride) i32, of each; undefined: all of them, for every rank
  RowTensors rows;
};

/// And in combine: where the rows for each rank begin.
struct LentSums {
  const std::byte* rows;
  const std::int64_t* begins;
};

// They are assigned where memory has no object, and read by other processes.
static_assert(std::is_trivially_copyable_v<LentRows> && std::is_trivially_copyable_v<LentSums>);

class RowsInPlace final : public RankStep {
 public:
  RowsInPlace(const RankRules& rules, const StepSizes& sizes, void* memory);

 private:
  void send(const RowTensors& own, const ForwardArgs& args) override;
  void give_back(const ForwardArgs&) override {}
  void sum(const ForwardArgs& args) override;

  LentRows lent(const RowTensors& rows) const;
  RowTensors publish(const RowTensors& rows, Stream stream) const;
  void copy_from(int rank, const LentRows& lent, Stream stream) const;

  LentRows* lent_rows_;
  LentSums* lent_sums_;
  std::int64_t* begins_;  // (num_ranks)
  RowTensors published_;  // (num_tokens): own rows that do not lie in shared memory anyway
};

}  // namespace fusedmoe::layer
