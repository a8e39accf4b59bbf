// fusedmoe balance: from recorded routing, which experts to put on which rank.
#include "fusedmoe/balance.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.h"
#include "load.h"
#include "outputs.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

struct Options {
  std::string routing, placement, output;
  BalanceOptions balance;
  bool json = false, force = false;
};

/// Experts that a rank of the new placement has and did not have.
std::int64_t count_moves(const ExpertPlacement& before, const ExpertPlacement& after) {
  std::int64_t moves = 0;
  for (int rank = 0; rank < after.num_ranks(); ++rank) {
    const std::vector<std::int32_t> held = before.local_experts(rank);
    for (const std::int32_t expert : after.local_experts(rank)) {
      if (std::find(held.begin(), held.end(), expert) == held.end()) ++moves;
    }
  }
  return moves;
}

void run(const Options& options) {
  begin_outputs({options.output}, options.force);
  check_output("--output", options.output, {{options.routing, "the file of --routing"}});
  const LoadStatistics load = recorded_load(options.routing);
  const std::vector<double> rows(load.rows_per_expert.begin(), load.rows_per_expert.end());
  BalanceOptions balance = options.balance;
  if (!options.placement.empty()) {
    balance.placements.push_back(parsed(options.placement, ExpertPlacement::parse));
  }
  const BalancedLayer layer = fusedmoe::balance(rows, load.num_experts(), balance).front();
  write_text(options.output, layer.placement.json() + "\n");

  const ExpertPlacement before =
      balance.placements.empty()
          ? ExpertPlacement::linear(load.num_experts(), balance.num_ranks, balance.redundant)
          : balance.placements.front();
  const std::int64_t moves = count_moves(before, layer.placement);
  if (options.json) {
    fmt::print("{}\n", nlohmann::ordered_json{{"path", options.output},
                                              {"num_experts", load.num_experts()},
                                              {"num_ranks", balance.num_ranks},
                                              {"redundant", balance.redundant},
                                              {"num_tokens", load.num_tokens},
                                              {"before", layer.before},
                                              {"after", layer.after},
                                              {"moves", moves}}
                           .dump());
  } else {
    fmt::print("{}: {} experts and {} copies on {} ranks, {} of them moved\n", options.output,
               load.num_experts(), balance.redundant, balance.num_ranks, moves);
    fmt::print("busiest rank over the mean: {:.3f} before, {:.3f} after\n", layer.before,
               layer.after);
  }
}

}  // namespace

void add_balance(Program& program) {
  auto options = std::make_shared<Options>();
  BalanceOptions& balance = options->balance;
  Command command = program.add_command(
      "balance",
      "Place experts on ranks so that all have equally much to do, from recorded routing");
  command
      .add_option("--routing", options->routing, "PATH",
                  "File of --record-routing, of `run` or `bench`")
      .required();
  command.add_option("--ep", balance.num_ranks, "N", "Ranks that share the experts")
      .positive()
      .required();
  command.add_option("--redundant", balance.redundant, "N", "Copies beyond one of each expert")
      .not_negative()
      .show_default();
  const Option hosts =
      command
          .add_option("--hosts", balance.num_hosts, "N",
                      "Hosts of equally many ranks; all copies of an expert stay on one")
          .positive()
          .show_default();
  command
      .add_option("--groups", balance.num_groups, "N",
                  "Groups that the router chooses first; each stays on one host. Default: none")
      .positive()
      .needs(hosts);
  command.add_option(
      "--placement", options->placement, "PATH",
      "Placement that there is, from an earlier run; experts that stay on their rank "
      "keep their place. Default: consecutive experts");
  command
      .add_option("--output", options->output, "PATH",
                  "JSON file to write, for placement= in Python and "
                  "ExpertPlacement::parse")
      .required();
  add_force_option(command, options->force);
  command.add_flag("--json", options->json, "Print one JSON object instead of text");
  command.example(
      "fusedmoe bench --model qwen3-30b-a3b --skew zipf --record-routing ids.safetensors");
  command.example("fusedmoe balance --routing ids.safetensors --ep 8 --output placement.json");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
