// What bench prints of ranks.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/rank_link.h"
#include "bench/rank_setup.h"
#include "fusedmoe/simulation.h"

namespace fusedmoe::cli {

/// A number of tokens over a transport. Times are the largest of all ranks. Where rows do not
/// travel, all of dispatch is 0.
struct RankRow {
  std::string transport;
  bool fixed_sizes = false;
  std::string backend;     // "peer memory", or the data plane of messages
  std::string sent_dtype;  // of rows on their way to the experts
  CombineMode combine = CombineMode::kPerRank;
  std::int64_t num_tokens = 0;
  double dispatch_us = 0, bare_dispatch_us = 0, combine_us = 0, bare_combine_us = 0;
  double copy_us = 0;  // memcpy of what is sent and of what returns; on the CPU
  /// Of a whole step, of the experts in it, and of what they do not hide; 0: not measured.
  double step_us = 0, experts_us = 0, exposed_us = 0;
  double sent_bytes = 0, returned_bytes = 0;  // to other ranks, by the rank that sends most
  /// The same of each rank.
  struct {
    std::vector<double> dispatch_us, combine_us, experts_us, sent_bytes, returned_bytes;
  } ranks;
  /// Both ways through peer memory, as a graph replays them: combine_us is in dispatch_us. Not
  /// where it is but a sum.
  bool is_one_time() const { return by_peer_memory() && fixed_sizes && transport != "no_ep"; }
  bool by_peer_memory() const { return backend == "peer memory"; }
  double times_of_copy() const { return (dispatch_us + combine_us) / copy_us; }
  double gigabytes() const { return 1e-3 * sent_bytes / dispatch_us; }
  /// Of the bytes that the link could have moved in the same time.
  double dispatch_share(const RankLink& link) const {
    return 1e6 * sent_bytes / dispatch_us / link.bytes_per_second;
  }
  double combine_share(const RankLink& link) const {
    if (combine_us == 0) return 0;  // it is in dispatch_us
    return 1e6 * returned_bytes / combine_us / link.bytes_per_second;
  }
};

/// `link`: none where messages cannot be timed. What is said of these is left out then.
void print_rank_table(const RankBenchOptions& options, const std::optional<RankLink>& link,
                      const std::vector<RankRow>& rows);
/// One line.
void print_rank_json(const RankBenchOptions& options, const std::optional<RankLink>& link,
                     const std::vector<RankRow>& rows);

/// What the rows of the fewest and of the most tokens say that ranks cost: of each path the
/// shortest times; of paths without rows what default_rank_costs() says. `device`: its name.
/// `expert_bytes`: weights of an expert. Throws Error for rows without experts, or of one number of
/// tokens.
RankCosts costs_of(const RankBenchOptions& options, std::string_view device, double expert_bytes,
                   const std::vector<RankRow>& rows);

}  // namespace fusedmoe::cli
