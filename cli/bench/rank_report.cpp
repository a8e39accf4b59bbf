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

}  // namespace

void print_rank_table(const RankBenchOptions& options, std::string_view backend,
                      const std::optional<RankLink>& link, const std::vector<RankRow>& rows) {
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
    return link ? fmt::format("{:>6.1f} us {:>6.1f} us {:>6.2f} ", ours, bare, ours / bare)
                : fmt::format("{:>6.1f} us ", ours);
  };
  const auto moved = [&](double bytes, const auto& share) {
    return link ? fmt::format("{:>9.3f} {:>4.0f} %", 1e-6 * bytes, 100 * share(*link))
                : fmt::format("{:>9.3f}", 1e-6 * bytes);
  };
  for (const RankRow& row : rows) {  // scripts/ep-check.sh reads the columns up to the second ratio
    const auto dispatch_share = [&](const RankLink& on) { return row.dispatch_share(on); };
    const auto combine_share = [&](const RankLink& on) { return row.combine_share(on); };
    fmt::print("{:<24} {:<6} {:>7} {}{}{}{}", row.transport, row.fixed_sizes ? "fixed" : "exact",
               row.num_tokens, travels ? times(row.dispatch_us, row.bare_dispatch_us) : "",
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

void print_rank_json(const RankBenchOptions& options, std::string_view backend,
                     const std::optional<RankLink>& link, const std::vector<RankRow>& rows) {
  const Deployment& deployment = options.deployment;
  const bool travels = options.parallel(0).needs_dispatch();
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const RankRow& row : rows) {
    nlohmann::ordered_json object, of_ranks;
    object["ranks"] = options.num_ranks();
    object["tp"] = deployment.tp_size;
    object["dp"] = deployment.dp_size;
    object["expert_parallel"] = deployment.expert_parallel;
    object["backend"] = backend;
    object["scheme"] = name(options.scheme);
    object["dispatch_dtype"] = std::string(options.dispatch_dtype ? name(*options.dispatch_dtype)
                                                                  : "what the experts read");
    object["transport"] = row.transport;
    object["sizes"] = row.fixed_sizes ? "fixed" : "exact";
    object["num_tokens"] = row.num_tokens;
    if (travels) {
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

RankCosts costs_of(const RankBenchOptions& options, std::string_view device, double expert_bytes,
                   const std::vector<RankRow>& rows) {
  // Where some rows are one time for both ways, only these count: they come from graphs.
  const bool one = std::any_of(rows.begin(), rows.end(), std::mem_fn(&RankRow::is_one_time));
  const std::string source = fmt::format("bench --ep {} on {}, {}{}", options.num_ranks(), device,
                                         name(options.scheme), one ? ", peer memory" : "");
  const auto ends = std::minmax_element(
      rows.begin(), rows.end(),
      [](const RankRow& a, const RankRow& b) { return a.num_tokens < b.num_tokens; });
  const std::int64_t fewest = ends.first->num_tokens, most = ends.second->num_tokens;
  const auto fastest = [&](std::int64_t num_tokens, double RankRow::*time) {
    const RankRow* found = nullptr;
    for (const RankRow& row : rows) {
      if (row.num_tokens != num_tokens || row.is_one_time() != one) continue;
      if (!found || row.*time < found->*time) found = &row;
    }
    return *found;
  };
  const auto link = [&](double RankRow::*bytes, double RankRow::*time) {
    const RankRow few = fastest(fewest, time), many = fastest(most, time);
    return fit_link({few.*bytes, few.*time}, {many.*bytes, many.*time}, source);
  };
  const ModelConfig& model = options.model;
  const auto experts = [&](std::int64_t num_tokens) {
    // Ids are drawn evenly: each rank's experts get as many rows as its own tokens choose.
    const auto rows_here = static_cast<double>(num_tokens * model.router.topk);
    const double here = static_cast<double>(model.router.num_experts) / options.num_ranks();
    const double hit = here * (1 - std::pow(1 - 1 / here, rows_here));
    return ExpertsSample{
        hit * expert_bytes,
        rows_here * core::row_flops(model.activation, model.experts_hidden(), model.intermediate),
        fastest(num_tokens, &RankRow::experts_us).experts_us};
  };
  RankCosts costs = default_rank_costs();
  if (one) {
    const auto both = [&](std::int64_t num_tokens) {
      const RankRow row = fastest(num_tokens, &RankRow::dispatch_us);
      return LinkSample{row.sent_bytes + row.returned_bytes, row.dispatch_us};
    };
    costs.dispatch = costs.combine = each_way(fit_link(both(fewest), both(most), source));
  } else {
    costs.dispatch = link(&RankRow::sent_bytes, &RankRow::dispatch_us);
    costs.combine = link(&RankRow::returned_bytes, &RankRow::combine_us);
  }
  costs.experts = fit_experts(experts(fewest), experts(most), source);
  return costs;
}

}  // namespace fusedmoe::cli
