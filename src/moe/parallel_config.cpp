// Who shares what: the table of groups, and slices of the intermediate size.
#include "core/check.h"
#include "fusedmoe/comm.h"

namespace fusedmoe {

ParallelConfig ParallelConfig::of(const Deployment& deployment) {
  const auto& [tp, dp, expert_parallel, sequence_parallel, rank] = deployment;
  FUSEDMOE_CHECK(tp >= 1, "tp_size", core::to_string(tp), "at least 1");
  FUSEDMOE_CHECK(dp >= 1, "dp_size", core::to_string(dp), "at least 1");
  FUSEDMOE_CHECK(rank >= 0 && rank < tp * dp, "rank", core::to_string(rank),
                 core::format("in [0, {}), tp_size x dp_size", tp * dp));
  ParallelConfig config;
  config.dp_size = dp;
  (expert_parallel ? config.ep_size : config.tp_size) = tp * dp;
  (expert_parallel ? config.ep_rank : config.tp_rank) = rank;
  // With one rank in a group there is nothing to divide.
  config.sequence_parallel = sequence_parallel && tp > 1;
  config.validate();
  return config;
}

void ParallelConfig::validate() const {
  FUSEDMOE_CHECK(tp_size >= 1, "parallel.tp_size", core::to_string(tp_size), "at least 1");
  FUSEDMOE_CHECK(ep_size >= 1, "parallel.ep_size", core::to_string(ep_size), "at least 1");
  FUSEDMOE_CHECK(dp_size >= 1, "parallel.dp_size", core::to_string(dp_size), "at least 1");
  FUSEDMOE_CHECK(ep_rank >= 0 && ep_rank < ep_size, "parallel.ep_rank", core::to_string(ep_rank),
                 core::format("below ep_size, {}", ep_size));
  FUSEDMOE_CHECK(tp_rank >= 0 && tp_rank < tp_size, "parallel.tp_rank", core::to_string(tp_rank),
                 core::format("below tp_size, {}", tp_size));
  FUSEDMOE_CHECK(tp_size == 1 || ep_size == 1, "parallel.ep_size",
                 core::format("{} with tp_size {}", ep_size, tp_size),
                 "1: ranks share either whole experts or slices of them");
  FUSEDMOE_CHECK(num_ranks() % dp_size == 0, "parallel.dp_size",
                 core::format("{} of {} ranks", dp_size, num_ranks()),
                 "a divisor of the number of ranks");
  if (sequence_parallel && ep_size == 1) {
    throw Error::conflict("parallel.sequence_parallel", "ep_size 1",
                          "it is a way of expert parallelism");
  }
}

std::vector<int> ParallelConfig::gather_group() const {
  std::vector<int> group;
  for (int r = 0; r < num_ranks(); ++r) {
    if (sequence_parallel || r % group_size() == rank() % group_size()) group.push_back(r);
  }
  return group;
}

std::vector<int> ParallelConfig::reduce_group(Combine combine) const {
  const bool complete =
      combine == Combine::kComplete || (combine == Combine::kReduceScatter && sequence_parallel);
  std::vector<int> group;
  for (int r = 0; r < num_ranks(); ++r) {
    if (complete ? r == rank() : r / group_size() == rank() / group_size()) group.push_back(r);
  }
  return group;
}

Slice slice_of(std::int64_t size, std::int64_t unit, int num_ranks, int rank) {
  FUSEDMOE_CHECK(size >= 1 && unit >= 1, "size", core::format("{} in units of {}", size, unit),
                 "positive");
  FUSEDMOE_CHECK(num_ranks >= 1 && rank >= 0 && rank < num_ranks, "rank",
                 core::format("{} of {}", rank, num_ranks),
                 "at least 0 and below the number of ranks");
  const std::int64_t units = (size + unit - 1) / unit;
  FUSEDMOE_CHECK(units >= num_ranks, "size", core::format("{}, {} units of {}", size, units, unit),
                 core::format("at least one unit for each of {} ranks", num_ranks));
  const std::int64_t each = units / num_ranks, more = units % num_ranks;
  const auto begin_of = [&](std::int64_t r) {
    return std::min(size, (r * each + std::min(r, more)) * unit);
  };
  return {begin_of(rank), begin_of(rank + 1)};
}

}  // namespace fusedmoe
