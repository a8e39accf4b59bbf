// Rows between the GPUs of one host, which read each other's memory: each rank publishes its rows,
// and the others fetch those that name one of their experts. Nothing is counted, packed or sent.
// Experts leave what they compute where the rank that the tokens came from reads and adds it.
#pragma once

#include <optional>

#include "layer/rank_step.h"
#include "moe/peer_memory.h"

namespace fusedmoe::layer {

class PeerRows final : public RankStep {
 public:
  PeerRows(const RankRules& rules, const StepSizes& sizes, void* memory);

  /// Bytes of the arena of each of `num_ranks` ranks that steps of such a layer need at most.
  static std::size_t arena_bytes(const MoeConfig& config, const RankOptions& ranks, int num_ranks);

 private:
  void send(const RowTensors& own, const ForwardArgs& args) override;
  void receive(Stream stream) override;
  const RowSources* row_sources() const override { return sources_ ? &*sources_ : nullptr; }
  void expand_slots(ForwardArgs& args) override;
  void give_back(const ForwardArgs& args) override;
  void sum(const ForwardArgs& args) override;
  std::int64_t local_slots(const ForwardArgs& args) const override;
  bool finds_destinations() const override { return false; }

  PeerMemory& peers() const { return *rules_.group->peers(); }

  PeerStep step_;
  std::optional<RowSources> sources_;  // of rows that come beside the experts
  TensorView own_ids_;                 // (num_tokens, topk) i32, in the arena: of physical experts
};

}  // namespace fusedmoe::layer
