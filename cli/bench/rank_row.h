// A row of what bench tells of ranks, as each of them times it.
#pragma once

#include <cstdint>
#include <memory>

#include "bench/rank_report.h"
#include "bench/rank_setup.h"

namespace fusedmoe::cli {

/// What is timed for each number of tokens.
struct RankSubject {
  const PrepareFinalizeDescriptor* transport = nullptr;
  bool fixed_sizes = false;
  CombineMode combine = CombineMode::kPerRank;
  bool as_messages = false;  // also where rows could go through peer memory
  bool rows_only = false;    // else also whole steps
  bool bare = true;          // and the data plane alone
};

/// What binds its transport to the other ranks.
Context context_of(const RankSubject& subject, std::shared_ptr<Communicator> communicator,
                   std::int64_t max_tokens);

/// Collective. Times are the largest of all ranks, on every rank.
RankRow time_rank_row(const RankBenchOptions& options, std::shared_ptr<Communicator> communicator,
                      const RankExperts& experts, const RankSubject& subject,
                      std::int64_t num_tokens);

}  // namespace fusedmoe::cli
