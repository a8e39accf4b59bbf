// What the ranks of bench run: the configuration of each, its experts, and the transports that
// serve the deployment.
#pragma once

#include <memory>
#include <vector>

#include "fusedmoe/modular_kernel.h"
#include "rank_bench.h"

namespace fusedmoe::cli {

/// A rank's part of the layer: some of the experts, or a slice of each.
MoeConfig rank_config(const RankBenchOptions& options, int rank, Device device);

/// Those of the registry that serve the deployment, or the one that --experts names. Throws Error
/// with the reasons where there is none.
std::vector<const PrepareFinalizeDescriptor*> rank_transports(const RankBenchOptions& options);

/// Ranks that get rows of this one, which may be among them.
std::vector<int> ranks_of_rows(const ParallelConfig& parallel,
                               const PrepareFinalizeDescriptor& transport);
/// Ranks whose sums are added to this one's when the rows are back.
std::vector<int> ranks_of_sums(const ParallelConfig& parallel,
                               const PrepareFinalizeDescriptor& transport);

/// Of one rank, for all rows; `experts` is null where they do not run.
struct RankExperts {
  std::shared_ptr<const Experts> experts;
  std::shared_ptr<const PackedWeights> weights;
};
/// With the experts that the layer's own selection takes.
RankExperts make_experts(const RankBenchOptions& options, int rank, Device device);

}  // namespace fusedmoe::cli
