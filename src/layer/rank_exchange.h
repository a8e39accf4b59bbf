// The two PrepareAndFinalize across ranks, "all2all" and "allgather_reducescatter". Both do the
// same in different amounts: tell the others how many rows come, send rows, let the experts run on
// what has arrived, send sums or rows back, add them up (rank_step.h).
#pragma once

#include <atomic>

#include "layer/rank_step.h"

namespace fusedmoe::layer {

class RankExchange final : public PrepareAndFinalize {
 public:
  /// Collective: it may split the communicator.
  RankExchange(const PrepareFinalizeDescriptor& descriptor, const MoeConfig& config,
               const Context& context, bool allgather)
      : PrepareAndFinalize(descriptor), rules_(config, context, allgather) {}

  bool moves_rows() const override { return true; }
  TransportSizes sizes(const ProblemSize& caller, const Preparation& preparation) const override;
  void abandon(std::string_view reason) const noexcept override;
  void move_experts(const ExpertPlacement& placement, Stream stream) const override {
    rules_.move_experts(placement, stream);
  }
  std::uint64_t layer() const override { return rules_.layer; }
  std::string rows_travel(const Preparation& read) const override {
    return rules_.rows_travel(read);
  }

 private:
  void do_start_prepare(ForwardArgs& args, const TransportSizes& sizes) const override;
  void do_finish_prepare(ForwardArgs& args) const override;
  void do_start_finalize(const ForwardArgs& args) const override;
  void do_finish_finalize(const ForwardArgs& args) const override;
  void check(const StepSizes& sizes) const;

  mutable RankRules rules_;        // move_experts() rewrites who has which
  mutable std::atomic_flag busy_;  // a rank runs one step of a layer at a time
};

}  // namespace fusedmoe::layer
