#include "rank_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace fusedmoe::cli {

void print_rank_table(const RankBenchOptions& options, std::string_view backend,
                      const RankLink& link, const std::vector<RankRow>& rows) {
  fmt::print("{} ranks over {}, hidden {}, topk {} of {}, {}\n", options.num_ranks, backend,
             options.model.experts_hidden(), options.model.router.topk,
             options.model.router.num_experts, name(options.dtype));
  fmt::print("link: {:.1f} GB/s by {}, all ranks at once\n\n", 1e-9 * link.bytes_per_second,
             link.what);
  const bool copies = rows.front().copy_us > 0, steps = rows.front().step_us > 0;
  fmt::print("{:<24} {:<6} {:>7} {:>9} {:>9} {:>6} {:>9} {:>9} {:>6} {:>9} {:>6} {:>9} {:>6}{}{}\n",
             "transport", "sizes", "tokens", "dispatch", "bare", "ratio", "combine", "bare",
             "ratio", "sent MB", "link", "back MB", "link",
             copies ? fmt::format(" {:>9} {:>6}", "memcpy", "ratio") : "",
             steps ? fmt::format(" {:>11} {:>11} {:>9}", "step", "experts", "exposed") : "");
  for (const RankRow& row : rows) {  // scripts/ep-check.sh reads the columns up to the second ratio
    fmt::print(
        "{:<24} {:<6} {:>7} {:>6.1f} us {:>6.1f} us {:>6.2f} {:>6.1f} us {:>6.1f} us {:>6.2f} "
        "{:>9.3f} {:>4.0f} % {:>9.3f} {:>4.0f} %",
        row.transport, row.fixed_sizes ? "fixed" : "exact", row.num_tokens, row.dispatch_us,
        row.bare_dispatch_us, row.dispatch_us / row.bare_dispatch_us, row.combine_us,
        row.bare_combine_us, row.combine_us / row.bare_combine_us, 1e-6 * row.sent_bytes,
        100 * row.dispatch_share(link), 1e-6 * row.returned_bytes, 100 * row.combine_share(link));
    if (copies) fmt::print(" {:>6.1f} us {:>6.2f}", row.copy_us, row.times_of_copy());
    if (steps) {
      fmt::print(" {:>8.1f} us {:>8.1f} us {:>6.1f} us", row.step_us, row.experts_us,
                 row.exposed_us);
    }
    fmt::print("\n");
  }
  fmt::print(
      "\nTimes and bytes are those of the rank with most.\n"
      "bare: the data plane alone for the same bytes.\n"
      "sent, back: what leaves a rank in dispatch and in combine. link: their share of the link's "
      "bandwidth; above 100 % the bytes came from a cache.\n");
  if (copies) {
    fmt::print(
        "memcpy: one copy of what is sent and one of what returns; its ratio is (dispatch + "
        "combine) / memcpy.\n");
  }
  if (steps) {
    fmt::print(
        "step: dispatch, experts and combine without a pause. experts: of the rank whose take "
        "longest."
        " exposed: step - experts.\n");
  }
}

void print_rank_json(const RankBenchOptions& options, std::string_view backend,
                     const RankLink& link, const std::vector<RankRow>& rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const RankRow& row : rows) {
    list.push_back(
        {{"ranks", options.num_ranks},
         {"backend", backend},
         {"scheme", name(options.scheme)},
         {"dispatch_dtype", std::string(options.dispatch_dtype ? name(*options.dispatch_dtype)
                                                               : "what the experts read")},
         {"transport", row.transport},
         {"sizes", row.fixed_sizes ? "fixed" : "exact"},
         {"num_tokens", row.num_tokens},
         {"dispatch_us", row.dispatch_us},
         {"bare_dispatch_us", row.bare_dispatch_us},
         {"combine_us", row.combine_us},
         {"bare_combine_us", row.bare_combine_us},
         {"sent_bytes", row.sent_bytes},
         {"returned_bytes", row.returned_bytes},
         {"gigabytes_per_second", row.gigabytes()},
         {"link", link.what},
         {"link_gigabytes_per_second", 1e-9 * link.bytes_per_second},
         {"dispatch_share_of_link", row.dispatch_share(link)},
         {"combine_share_of_link", row.combine_share(link)},
         {"of_ranks",
          {{"dispatch_us", row.ranks.dispatch_us},
           {"combine_us", row.ranks.combine_us},
           {"experts_us", row.ranks.experts_us},
           {"sent_bytes", row.ranks.sent_bytes},
           {"returned_bytes", row.ranks.returned_bytes}}}});
    if (row.copy_us > 0) list.back()["memcpy_us"] = row.copy_us;
    if (row.step_us > 0) {
      list.back()["step_us"] = row.step_us;
      list.back()["experts_us"] = row.experts_us;
      list.back()["exposed_us"] = row.exposed_us;
    }
  }
  fmt::print("{}\n", list.dump());
}

}  // namespace fusedmoe::cli
