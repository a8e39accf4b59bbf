#include "rank_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace fusedmoe::cli {

void print_rank_table(const RankBenchOptions& options, std::string_view backend,
                      const std::vector<RankRow>& rows) {
  fmt::print("{} ranks over {}, hidden {}, topk {} of {}, {}\n\n", options.num_ranks, backend,
             options.model.experts_hidden(), options.model.router.topk,
             options.model.router.num_experts, name(options.dtype));
  const bool copies = rows.front().copy_us > 0, steps = rows.front().step_us > 0;
  fmt::print("{:<24} {:<6} {:>7} {:>9} {:>9} {:>6} {:>9} {:>9} {:>6} {:>9} {:>7}{}{}\n",
             "transport", "sizes", "tokens", "dispatch", "bare", "ratio", "combine", "bare",
             "ratio", "sent MB", "GB/s",
             copies ? fmt::format(" {:>9} {:>6}", "memcpy", "ratio") : "",
             steps ? fmt::format(" {:>11} {:>11} {:>9}", "step", "experts", "exposed") : "");
  for (const RankRow& row : rows) {
    fmt::print(
        "{:<24} {:<6} {:>7} {:>6.1f} us {:>6.1f} us {:>6.2f} {:>6.1f} us {:>6.1f} us "
        "{:>6.2f} {:>9.3f} {:>7.1f}",
        row.transport, row.fixed_sizes ? "fixed" : "exact", row.num_tokens, row.dispatch_us,
        row.bare_dispatch_us, row.dispatch_us / row.bare_dispatch_us, row.combine_us,
        row.bare_combine_us, row.combine_us / row.bare_combine_us, 1e-6 * row.sent_bytes,
        row.gigabytes());
    if (copies) fmt::print(" {:>6.1f} us {:>6.2f}", row.copy_us, row.times_of_copy());
    if (steps) {
      fmt::print(" {:>8.1f} us {:>8.1f} us {:>6.1f} us", row.step_us, row.experts_us,
                 row.exposed_us);
    }
    fmt::print("\n");
  }
  fmt::print("\nbare: the data plane alone for the same bytes.\n");
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
                     const std::vector<RankRow>& rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const RankRow& row : rows) {
    list.push_back({{"ranks", options.num_ranks},
                    {"backend", backend},
                    {"transport", row.transport},
                    {"sizes", row.fixed_sizes ? "fixed" : "exact"},
                    {"num_tokens", row.num_tokens},
                    {"dispatch_us", row.dispatch_us},
                    {"bare_dispatch_us", row.bare_dispatch_us},
                    {"combine_us", row.combine_us},
                    {"bare_combine_us", row.bare_combine_us},
                    {"sent_bytes", row.sent_bytes},
                    {"gigabytes_per_second", row.gigabytes()}});
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
