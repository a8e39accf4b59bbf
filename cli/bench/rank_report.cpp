#include "bench/rank_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "moe/row_flops.h"
#include "tools/fit_costs.h"

namespace fusedmoe::cli {

namespace {

/// "4 ranks (tp 2, dp 2, ep)"
std::string describe(const RankBenchOptions& options) {
  const Deployment& deployment = options.deployment;
  std::string text;
  const auto add = [&](bool given, const std::string& what) {
    if (given) text += (text.empty() ? "" : ", ") + what;
  };
  add(deployment.tp_size > 1, fmt::format("tp {}", deployment.tp_size));
  add(deployment.dp_size > 1, fmt::format("dp {}", deployment.dp_size));
  add(deployment.expert_parallel, "ep");
  return fmt::format("{} ranks ({})", options.num_ranks(), text);
}

void print_notes(bool travels, bool has_messages, bool copies, bool steps, bool together) {
  fmt::print("\nTimes and bytes are those of the rank with most.\n");
  if (has_messages) fmt::print("bare: the data plane alone for the same bytes.\n");
  fmt::print("{}", travels ? "sent, back: what leaves a rank in dispatch and in combine.\n"
                           : "All ranks have the same tokens, so no rows travel. combine: the sum "
                             "over the ranks. back: what leaves a rank for it.\n");
  if (has_messages) {
    fmt::print(
        "link: the share of the link's bandwidth; above 100 % the bytes came from a cache.\n");
  }
  if (together) {
    fmt::print(
        "By peer memory dispatch and combine of fixed sizes are timed together, under dispatch.\n");
  }
  if (copies) {
    fmt::print("memcpy: one copy of {}; its ratio is {} / memcpy.\n",
               travels ? "what is sent and one of what returns" : "what leaves a rank",
               travels ? "(dispatch + combine)" : "combine");
  }
  if (steps) {
    fmt::print(
        "step: {}experts and combine without a pause. experts: of the rank whose take longest."
        " exposed: step - experts.\n",
        travels ? "dispatch, " : "");
  }
}

/// "all2all"; what is not as the title says behind it.
std::string label(const RankRow& row, std::string_view backend) {
  std::string text = row.transport;
  if (row.combine != CombineMode::kPerRank) text += fmt::format("+{}", name(row.combine));
  if (row.backend != backend) text += "+" + row.backend;
  return text;
}

}  // namespace

void print_rank_table(const RankBenchOptions& options, const std::optional<RankLink>& link,
                      const std::vector<RankRow>& rows) {
  const std::string& backend = rows.front().backend;
  fmt::print("{} over {}, hidden {}, topk {} of {}, {}\n", describe(options), backend,
             options.model.experts_hidden(), options.model.router.topk,
             options.model.router.num_experts, name(options.dtype));
  if (link) {
    fmt::print("link: {:.1f} GB/s by {}, all ranks at once\n", 1e-9 * link->bytes_per_second,
               link->what);
  }
  const bool travels = options.parallel(0).needs_dispatch();
  const bool copies = rows.front().copy_us > 0, steps = rows.front().step_us > 0;
  const auto time_of = [&](const char* name) {
    return link ? fmt::format("{:>9} {:>9} {:>6} ", name, "bare", "ratio")
                : fmt::format("{:>9} ", name);
  };
  const auto moved_of = [&](const char* name) {
    return link ? fmt::format("{:>9} {:>6}", name, "link") : fmt::format("{:>9}", name);
  };
  fmt::print("\n{:<24} {:<6} {:>7} {}{}{}{}{}{}\n", "transport", "sizes", "tokens",
             travels ? time_of("dispatch") : "", time_of("combine"),
             travels ? moved_of("sent MB") + " " : "", moved_of("back MB"),
             copies ? fmt::format(" {:>9} {:>6}", "memcpy", "ratio") : "",
             steps ? fmt::format(" {:>11} {:>11} {:>9}", "step", "experts", "exposed") : "");
  const auto times = [&](double ours, double bare) {
    return link ? fmt::format("{:>6.1f} us {:>6.1f} us {:>6.2f} ", ours, bare,
                              bare > 0 ? ours / bare : 0)
                : fmt::format("{:>6.1f} us ", ours);
  };
  const auto moved = [&](double bytes, const auto& share) {
    return link ? fmt::format("{:>9.3f} {:>4.0f} %", 1e-6 * bytes, 100 * share(*link))
                : fmt::format("{:>9.3f}", 1e-6 * bytes);
  };
  // scripts/ep-check.sh reads the columns up to the second ratio, and the last three.
  for (const RankRow& row : rows) {
    const auto dispatch_share = [&](const RankLink& on) { return row.dispatch_share(on); };
    const auto combine_share = [&](const RankLink& on) { return row.combine_share(on); };
    fmt::print("{:<24} {:<6} {:>7} {}{}{}{}", label(row, backend),
               row.fixed_sizes ? "fixed" : "exact", row.num_tokens,
               travels ? times(row.dispatch_us, row.bare_dispatch_us) : "",
               times(row.combine_us, row.bare_combine_us),
               travels ? moved(row.sent_bytes, dispatch_share) + " " : "",
               moved(row.returned_bytes, combine_share));
    if (copies) fmt::print(" {:>6.1f} us {:>6.2f}", row.copy_us, row.times_of_copy());
    if (steps) {
      fmt::print(" {:>8.1f} us {:>8.1f} us {:>6.1f} us", row.step_us, row.experts_us,
                 row.exposed_us);
    }
    fmt::print("\n");
  }
  const bool together = std::any_of(rows.begin(), rows.end(), std::mem_fn(&RankRow::is_one_time));
  print_notes(travels, link.has_value(), copies, steps, together);
}

void print_rank_json(const RankBenchOptions& options, const std::optional<RankLink>& link,
                     const std::vector<RankRow>& rows) {
  const Deployment& deployment = options.deployment;
  const bool travels = options.parallel(0).needs_dispatch();
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const RankRow& row : rows) {
    nlohmann::ordered_json object, of_ranks;
    object["ranks"] = options.num_ranks();
    object["tp"] = deployment.tp_size;
    object["dp"] = deployment.dp_size;
    object["expert_parallel"] = deployment.expert_parallel;
    object["backend"] = row.backend;
    object["combine"] = name(row.combine);
    object["scheme"] = name(options.scheme);
    object["transport"] = row.transport;
    object["sizes"] = row.fixed_sizes ? "fixed" : "exact";
    object["num_tokens"] = row.num_tokens;
    if (travels) {
      object["dispatch_dtype"] = row.sent_dtype;
      object["dispatch_us"] = row.dispatch_us;
      if (link) object["bare_dispatch_us"] = row.bare_dispatch_us;
      object["sent_bytes"] = row.sent_bytes;
      object["gigabytes_per_second"] = row.gigabytes();
      if (link) object["dispatch_share_of_link"] = row.dispatch_share(*link);
      of_ranks["dispatch_us"] = row.ranks.dispatch_us;
      of_ranks["sent_bytes"] = row.ranks.sent_bytes;
    }
    object["combine_us"] = row.combine_us;
    object["returned_bytes"] = row.returned_bytes;
    if (link) {
      object["bare_combine_us"] = row.bare_combine_us;
      object["combine_share_of_link"] = row.combine_share(*link);
      object["link"] = link->what;
      object["link_gigabytes_per_second"] = 1e-9 * link->bytes_per_second;
    }
    of_ranks["combine_us"] = row.ranks.combine_us;
    of_ranks["returned_bytes"] = row.ranks.returned_bytes;
    of_ranks["experts_us"] = row.ranks.experts_us;
    object["of_ranks"] = of_ranks;
    if (row.copy_us > 0) object["memcpy_us"] = row.copy_us;
    if (row.step_us > 0) {
      object["step_us"] = row.step_us;
      object["experts_us"] = row.experts_us;
      object["exposed_us"] = row.exposed_us;
    }
    list.push_back(std::move(object));
  }
  fmt::print("{}\n", list.dump());
}

namespace {

/// The rows of the fewest and of the most tokens, of which each must be there twice at least.
class Ends {
 public:
  explicit Ends(const std::vector<RankRow>& rows) : rows_(rows) {
    const auto ends = std::minmax_element(
        rows.begin(), rows.end(),
        [](const RankRow& a, const RankRow& b) { return a.num_tokens < b.num_tokens; });
    fewest_ = ends.first->num_tokens;
    most_ = ends.second->num_tokens;
  }
  std::int64_t fewest() const { return fewest_; }
  std::int64_t most() const { return most_; }

  /// The one with the shortest of these times, of so many tokens; null: none is like that.
  template <typename IsIt>
  const RankRow* fastest(std::int64_t num_tokens, double RankRow::*time, const IsIt& is_it) const {
    const RankRow* found = nullptr;
    for (const RankRow& row : rows_) {
      if (row.num_tokens != num_tokens || !is_it(row)) continue;
      if (!found || row.*time < found->*time) found = &row;
    }
    return found;
  }
  /// `sample`: of a row.
  template <typename IsIt, typename Sample>
  LinkCost link(double RankRow::*time, const IsIt& is_it, const Sample& sample,
                const std::string& source) const {
    return fit_link(sample(*fastest(fewest_, time, is_it)), sample(*fastest(most_, time, is_it)),
                    source);
  }

 private:
  const std::vector<RankRow>& rows_;
  std::int64_t fewest_ = 0, most_ = 0;
};

/// Dispatch and combine through peer memory are timed together. per_rank gives the costs of either.
/// The dispatch of per_slot is the same, so the rest of its time is its combine.
void fit_peer_memory(const Ends& ends, const std::string& source, RowCosts& costs) {
  const auto is = [](CombineMode combine) {
    return [combine](const RankRow& row) { return row.is_one_time() && row.combine == combine; };
  };
  const auto per_rank = is(CombineMode::kPerRank), per_slot = is(CombineMode::kPerSlot);
  if (!ends.fastest(ends.most(), &RankRow::dispatch_us, per_rank)) return;
  const auto both = [](const RankRow& row) {
    return LinkSample{row.sent_bytes + row.returned_bytes, row.dispatch_us};
  };
  costs.dispatch = costs.per_rank =
      each_way(ends.link(&RankRow::dispatch_us, per_rank, both, source));
  if (!ends.fastest(ends.most(), &RankRow::dispatch_us, per_slot)) return;
  const auto back = [&](const RankRow& row) {
    return LinkSample{row.returned_bytes, row.dispatch_us - costs.dispatch.us(row.sent_bytes)};
  };
  costs.per_slot = ends.link(&RankRow::dispatch_us, per_slot, back, source);
}

/// On the CPU rows may be read in place instead. Those per slot take what those per rank do, by the
/// byte.
void fit_messages(const Ends& ends, std::string_view transport, const std::string& source,
                  RowCosts& costs) {
  const auto is_it = [&](const RankRow& row) {
    const bool moves = row.sent_bytes > 0 && row.returned_bytes > 0;
    return row.transport == transport && !row.by_peer_memory() && moves;
  };
  if (!ends.fastest(ends.most(), &RankRow::dispatch_us, is_it)) return;
  costs.dispatch = ends.link(
      &RankRow::dispatch_us, is_it,
      [](const RankRow& row) {
        return LinkSample{row.sent_bytes, row.dispatch_us};
      },
      source);
  costs.per_rank = ends.link(
      &RankRow::combine_us, is_it,
      [](const RankRow& row) {
        return LinkSample{row.returned_bytes, row.combine_us};
      },
      source);
  costs.per_slot = costs.per_rank;
  costs.per_slot.source = "assumed: as per_rank";
}

}  // namespace

RankCosts costs_of(const RankBenchOptions& options, std::string_view device, double expert_bytes,
                   const std::vector<RankRow>& rows) {
  const std::string source = fmt::format("measured: bench --ep {} on {}, {}", options.num_ranks(),
                                         device, name(options.scheme));
  const Ends ends(rows);
  const ModelConfig& model = options.model;
  const auto experts = [&](std::int64_t num_tokens) {
    // Ids are drawn evenly: each rank's experts get as many rows as its own tokens choose.
    const auto rows_here = static_cast<double>(num_tokens * model.router.topk);
    const double here = static_cast<double>(model.router.num_experts) / options.num_ranks();
    const double hit = here * (1 - std::pow(1 - 1 / here, rows_here));
    const RankRow* fastest = ends.fastest(num_tokens, &RankRow::experts_us,
                                          [](const RankRow& row) { return row.experts_us > 0; });
    return ExpertsSample{
        hit * expert_bytes,
        rows_here * core::row_flops(model.activation, model.experts_hidden(), model.intermediate),
        fastest ? fastest->experts_us : 0};
  };
  RankCosts costs = default_rank_costs();
  fit_peer_memory(ends, source, costs.peer_memory);
  fit_messages(ends, name(RowPath::kAll2all), source, costs.all2all);
  fit_messages(ends, name(RowPath::kAllgather), source, costs.allgather_reducescatter);
  costs.experts = fit_experts(experts(ends.fewest()), experts(ends.most()), source);
  return costs;
}

}  // namespace fusedmoe::cli
