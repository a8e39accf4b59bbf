// Experts that serve modular and monolithic configurations alike: with a monolithic one they first
// route, into the buffers of the caller, and go on with the ids and weights.
#pragma once

#include "fusedmoe/experts.h"
#include "moe/backend.h"

namespace fusedmoe::core {

/// The sizes of experts that write one row for each token, or for each row of the batched format,
/// without scratch memory.
WorkspaceSizes output_sizes(const MoeConfig& config, const ProblemSize& problem);

class RoutedExperts : public Experts {
 public:
  RoutedExperts(const ExpertsDescriptor& descriptor, const MoeConfig& config,
                const Context& context, const Backend& backend)
      : Experts(descriptor, config, context), backend_(backend) {}

 private:
  void run(const ForwardArgs& args) const final {
    if (config().monolithic) {
      route_and_run(args);
    } else {
      run_routed(args);
    }
  }
  /// Experts::run with topk_ids and topk_weights.
  virtual void run_routed(const ForwardArgs& args) const = 0;
  /// Experts::run of a monolithic configuration. The default routes and calls run_routed().
  virtual void route_and_run(const ForwardArgs& args) const;

 protected:
  /// Router logits, where the router's weights are given, ids and weights.
  void route(const ForwardArgs& args) const;

 private:
  const Backend& backend_;
};

}  // namespace fusedmoe::core
