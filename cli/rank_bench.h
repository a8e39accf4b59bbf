// bench --ep: what it costs to bring rows to the ranks of their experts and back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fusedmoe/checkpoint.h"

namespace fusedmoe::cli {

struct RankBenchOptions {
  ModelConfig model;
  int num_ranks = 2;
  std::string device = "cpu";  ///< cuda: one GPU for each rank
  DType dtype = DType::kBF16;
  QuantScheme scheme;
  std::string transport;  ///< empty: all
  std::vector<std::int64_t> tokens;
  std::int64_t min_samples = 11;
  double max_seconds = 10;
  bool json = false;
};

/// Starts the ranks as threads, measures, and prints a table or JSON. Each time is the largest of
/// all ranks; beside it stands that of the data plane alone for the same bytes.
void run_rank_bench(const RankBenchOptions& options);

}  // namespace fusedmoe::cli
