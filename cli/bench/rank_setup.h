// What the ranks of bench run: the configuration of each, its experts, and the transports that
// serve the deployment.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/modular_kernel.h"

namespace fusedmoe::cli {

struct RankBenchOptions {
  ModelConfig model;
  Deployment deployment;       ///< of any rank
  std::string device = "cpu";  ///< cuda: one GPU for each rank
  DType dtype = DType::kBF16;
  QuantScheme scheme;
  std::optional<DType> dispatch_dtype;
  std::string transport;  ///< empty: all
  std::vector<std::int64_t> tokens;
  std::int64_t min_samples = 11;
  double max_seconds = 10;
  int threads = 0;  ///< of each process's CPU; 0: those of the host, shared by its ranks
  /// Without the experts, whose weights take memory, and time to pack.
  bool rows_only = false;
  /// Rows between GPUs of one host through each other's memory: none, where that is predicted to be
  /// faster; true, all or an Error; false, as messages.
  std::optional<bool> peer_memory;
  bool json = false;
  std::string calibrate;  ///< file to write RankCosts to; empty: none

  int num_ranks() const { return deployment.tp_size * deployment.dp_size; }
  ParallelConfig parallel(int rank) const {
    Deployment of_rank = deployment;
    of_rank.rank = rank;
    return ParallelConfig::of(of_rank);
  }
};

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
