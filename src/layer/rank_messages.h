// What rows as messages have in common, from the host and from a device: counts travel first, then
// rows, packed where they do not go to all ranks; and the rows that the experts leave come back.
#pragma once

#include "layer/rank_step.h"

namespace fusedmoe::layer {

class RankMessages : public RankStep {
 protected:
  RankMessages(const RankRules& rules, const StepSizes& sizes, void* memory, std::int64_t packed);

  void give_back(const ForwardArgs& args) override;

  void exchange_counts(Stream stream);
  /// `own`: rows for all, sent from where they are; null: from among those received.
  void exchange_rows(const RowTensors* own, Stream stream) const;
  Parts parts_of_others() const;
  /// Where the rows that a rank has computed for this one come back to.
  std::int64_t returned_begin(int rank) const;

  std::int64_t slots_here_ = 0;  // of all ranks' tokens, that name an expert of this one
  TensorView returned_;  // of rank r from returned_begin(r) on; per slot one behind the other

 private:
  void return_slots(const ForwardArgs& args) const;

  TensorView records_;  // (num_ranks, bytes) u8: of every rank its header and its counts
};

}  // namespace fusedmoe::layer
