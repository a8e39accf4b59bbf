// Experts that serve modular and monolithic configurations alike: where they get router logits,
// they route in their own workspace and go on with the ids and weights.
#pragma once

#include "fusedmoe/experts.h"
#include "moe/backend.h"

namespace fusedmoe::core {

class RoutedExperts : public Experts {
 public:
  RoutedExperts(const ExpertsDescriptor& descriptor, const MoeConfig& config,
                const Context& context, const Backend& backend)
      : Experts(descriptor, config, context), backend_(backend) {}

  WorkspacePlan plan(const ProblemSize& problem) const final;

 protected:
  /// Scratch of run_routed().
  virtual WorkspacePlan plan_routed(const ProblemSize& problem) const = 0;
  /// Experts::run with topk_ids and topk_weights.
  virtual void run_routed(const ForwardArgs& args) const = 0;

 private:
  void run(const ForwardArgs& args) const final;

  const Backend& backend_;
};

}  // namespace fusedmoe::core
