// Which experts to put on which rank, and which to copy, for loads that were measured.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fusedmoe/export.h"
#include "fusedmoe/parallel.h"

namespace fusedmoe {

class Communicator;

/// How many tokens chose each expert of some layers in the last forwards: the loads that balance()
/// takes. One thread at a time.
class FUSEDMOE_API LoadWindow {
 public:
  /// Keeps the counts of each layer's last num_forwards forwards. Throws Error unless all three
  /// numbers are positive.
  LoadWindow(std::int64_t num_layers, std::int64_t num_experts, std::int64_t num_forwards);
  ~LoadWindow();
  LoadWindow(LoadWindow&&) noexcept;
  LoadWindow& operator=(LoadWindow&&) noexcept;

  /// A forward's ForwardOptions::expert_load, i32; what zero experts have behind the others is left
  /// out. Of a GPU's it waits for all work that the device has, whichever stream the forward is on.
  void add(std::int64_t layer, const TensorView& expert_load);
  /// (num_layers, num_experts): sums over the window.
  std::vector<double> loads() const;
  /// Collective: the sums over the ranks, which see different tokens. The same on all.
  std::vector<double> loads(Communicator& ranks) const;
  /// Forgets all forwards.
  void clear();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct BalanceOptions {
  int num_ranks = 1;
  std::int64_t redundant = 0;  ///< copies beyond one of each expert; all ranks hold equally many
  /// Above 1: each host holds whole groups of experts, and the copies of an expert share a host.
  int num_hosts = 1;
  std::int64_t num_groups = 0;  ///< consecutive experts of equal number; 0: each is one of its own
  /// What the ranks hold now: one placement for all layers, or one for each. An expert that stays
  /// on its rank keeps its place there. Empty: ExpertPlacement::linear(), and places are free.
  std::vector<ExpertPlacement> placements;
};

struct BalancedLayer {
  ExpertPlacement placement;
  /// Load of the busiest rank over the mean of all, with the placement that there was and with the
  /// new one; 1 is even, 0 without loads. Each copy of an expert has an equal share of its load.
  double before = 0, after = 0;
};

/// Spreads the experts of each layer over ranks by DeepSeek's algorithm (EPLB): copies go to the
/// experts with the largest load per copy; then, the largest loads first, each goes to the rank
/// that has least to do, of those with room. A rank never holds two copies of an expert. On one
/// host, a placement that is as good already and equally large stays. The same arguments give the
/// same result. loads: (layers, num_experts), tokens that chose each. Throws Error naming the
/// argument.
FUSEDMOE_API std::vector<BalancedLayer> balance(std::span<const double> loads,
                                                std::int64_t num_experts,
                                                const BalanceOptions& options);

}  // namespace fusedmoe
