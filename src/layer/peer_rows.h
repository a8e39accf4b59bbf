// Rows between the GPUs of one host, which read each other's memory: each rank publishes its rows,
// and the others fetch those that name one of their experts. Nothing is packed or sent. Experts
// leave what they compute in the memory of the rank that the tokens came from, which adds it.
#pragma once

#include <optional>

#include "layer/rank_step.h"
#include "moe/peer_memory.h"

namespace fusedmoe::layer {

class PeerRows final : public RankStep {
 public:
  PeerRows(const RankRules& rules, const StepSizes& sizes, void* memory);

  /// What steps of such a layer need at most in the arena of each of `num_ranks` ranks.
  static PeerBytes arena_bytes(const MoeConfig& config, const RankOptions& ranks, int num_ranks);

 private:
  void send(const RowTensors& own, const ForwardArgs& args) override;
  void receive(Stream stream) override;
  const RowSources* row_sources() const override { return sources_ ? &*sources_ : nullptr; }
  const RowTargets* row_targets() const override { return sizes_.to_targets ? &targets_ : nullptr; }
  void expand_slots(ForwardArgs& args) override;
  void give_back(const ForwardArgs& args) override;
  void sum(const ForwardArgs& args) override;
  std::int64_t local_slots(const ForwardArgs& args) const override;
  bool finds_destinations() const override { return false; }

  PeerMemory& peers() const { return *rules_.group->peers(); }

  PeerStep step_;
  std::optional<RowSources> sources_;  // of rows that come beside the experts
  RowTargets targets_;                 // of what the experts leave
};

}  // namespace fusedmoe::layer
