#include "bench/rank_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench_problem.h"
#include "bench/rank_link.h"
#include "bench/rank_row.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "ranks.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

/// Dispatch and combine of every transport.
std::vector<RankSubject> rank_subjects(const RankBenchOptions& options) {
  std::vector<RankSubject> subjects;
  const bool travels = options.parallel(0).needs_dispatch();
  for (const PrepareFinalizeDescriptor* transport : rank_transports(options)) {
    if (travels) subjects.push_back({transport});  // a sum over ranks always has the same size
    subjects.push_back({transport, true});
  }
  return subjects;
}

/// To calibrate also what layers on GPUs choose among.
std::vector<RankSubject> other_ways(const RankBenchOptions& options) {
  if (options.calibrate.empty() || options.device != "cuda" || options.peer_memory == false ||
      !options.parallel(0).needs_dispatch()) {
    return {};
  }
  std::vector<RankSubject> subjects;
  for (const PrepareFinalizeDescriptor* transport : rank_transports(options)) {
    subjects.push_back({transport, true, CombineMode::kPerRank, true, true, false});
    if (transport != &all2all()) continue;
    subjects.push_back({transport, true, CombineMode::kPerSlot, false, true, false});
  }
  return subjects;
}

/// For the most tokens, as the memory that GPUs lend each other cannot grow behind the first step.
/// False: rows are messages.
bool make_room(const RankBenchOptions& options, const std::shared_ptr<Communicator>& rank,
               const RankSubject& subject) {
  const std::int64_t most = *std::max_element(options.tokens.begin(), options.tokens.end());
  MoeConfig config = rank_config(options, rank->rank(), rank->device());
  config.combine = subject.combine;
  const auto made = subject.transport->create(config, context_of(subject, rank, most));
  if (made->rows_travel().starts_with("peer memory")) return true;
  if (options.peer_memory != true) return false;
  rank->barrier();  // so that none hears of it from another
  throw Error::invalid("--peer-memory",
                       fmt::format("--peer-memory: with {} the way is {}",
                                   subject.transport->name(), made->rows_travel()));
}

/// None where GPUs can but read each other's memory: all but messages is timed then.
std::optional<RankLink> connect_and_measure(Communicator& rank) {
  try {
    rank.connect("the times of the data plane alone");
  } catch (const Error& error) {
    if (!rank.peers()) throw;
    if (rank.rank() == 0) {
      fmt::print(stderr, "by peer memory alone, as the ranks cannot send messages: {}\n",
                 error.what());
    }
    return std::nullopt;
  }
  return measure_link(rank);
}

}  // namespace

void run_rank_bench(const RankBenchOptions& options) {
  if (options.rows_only && !options.parallel(0).needs_dispatch()) {
    throw Error::invalid("--rows-only",
                         "--rows-only needs rows that travel, with --ep alone or with --dp: here "
                         "all ranks have the same tokens");
  }
  const std::vector<RankSubject> always = rank_subjects(options), others = other_ways(options);
  std::vector<RankRow> rows;
  std::string device;
  std::optional<RankLink> link;
  double expert_bytes = 0;
  std::optional<bool> peer_memory = options.peer_memory;
  if (!others.empty()) peer_memory = true;  // to calibrate, whatever is predicted
  run_on_ranks(
      options.num_ranks(), options.device,
      [&](std::shared_ptr<Communicator> rank) {
        if (launched() && options.threads == 0) set_num_threads(threads_of_rank(*rank));
        std::vector<RankSubject> subjects = always;
        for (const RankSubject& subject : subjects) make_room(options, rank, subject);
        for (const RankSubject& subject : others) {
          if (!subject.as_messages && make_room(options, rank, subject))
            subjects.push_back(subject);
        }
        const std::optional<RankLink> measured = connect_and_measure(*rank);
        for (RankSubject& subject : subjects) subject.bare &= measured.has_value();
        for (const RankSubject& subject : others) {
          if (subject.as_messages && measured) subjects.push_back(subject);
        }
        const RankExperts experts = make_experts(options, rank->rank(), rank->device());
        for (const RankSubject& subject : subjects) {
          for (const std::int64_t tokens : options.tokens) {
            const RankRow row = time_rank_row(options, rank, experts, subject, tokens);
            if (rank->rank() > 0) continue;
            device = device_name(rank->device());
            link = measured;
            if (experts.experts) {
              expert_bytes = static_cast<double>(experts.weights->nbytes()) /
                             static_cast<double>(experts.weights->info().num_experts);
            }
            rows.push_back(row);
          }
        }
      },
      kRankTimeout, peer_memory);
  if (rows.empty()) return;  // rank 0, another process, has them
  (options.json ? print_rank_json : print_rank_table)(options, link, rows);
  if (options.calibrate.empty()) return;
  write_text(options.calibrate, costs_of(options, device, expert_bytes, rows).json());
}

}  // namespace fusedmoe::cli
