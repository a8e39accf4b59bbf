// bench --ep, --tp and --dp: what it costs to bring rows to the ranks of their experts and back, to
// add the sums of ranks with the same tokens, and what of that a step shows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fusedmoe/checkpoint.h"

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
  bool json = false;

  int num_ranks() const { return deployment.tp_size * deployment.dp_size; }
  ParallelConfig parallel(int rank) const {
    Deployment of_rank = deployment;
    of_rank.rank = rank;
    return ParallelConfig::of(of_rank);
  }
};

/// Runs on ranks (run_on_ranks), measures, and prints a table or JSON from rank 0: dispatch and
/// combine, beside the data plane alone for the same bytes, and on the CPU one memcpy; and whole
/// steps, beside their experts. Each time is the largest of all ranks. Where all ranks have the
/// same tokens no rows travel, and combine is the sum over the ranks.
void run_rank_bench(const RankBenchOptions& options);

}  // namespace fusedmoe::cli
