// fusedmoe simulate: how long a layer would take on ranks that are not here.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "bench/bench_problem.h"
#include "bench/bench_subject.h"
#include "bench/rank_setup.h"
#include "commands.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/simulation.h"
#include "load.h"
#include "ranks.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

constexpr int kMostRanksOfHost = 8;

struct Options {
  BenchSubjects subjects;
  std::vector<std::int64_t> ep, tokens{8, 128, 1024, 8192};
  std::int64_t num_hosts = 0;  // 0: of kMostRanksOfHost ranks at most
  std::string scheme, dispatch_dtype, costs, routing, placement;
  std::string skew = "balanced";
  bool json = false;
};

/// Experts and rows as a Hopper GPU has them; schemes that none runs, as the CPU.
MoeConfig layer_config(const Options& options, const ModelConfig& model) {
  MoeConfig config = moe_config(model, DType::kBF16, {DeviceKind::kCuda, 0});
  config.compute_capability = 90;
  if (!options.scheme.empty()) config.scheme = parse_scheme(options.scheme);
  config.dispatch_dtype = parse_dispatch_dtype(options.dispatch_dtype);
  if (!explain(config)) {
    config.device = {};
    config.compute_capability.reset();
  }
  return config;
}

/// As given, else as few as have at most kMostRanksOfHost ranks each.
int num_hosts(const Options& options, std::int64_t ranks) {
  const auto divides = [&](std::int64_t hosts) { return ranks % hosts == 0; };
  if (options.num_hosts > 0 && !divides(options.num_hosts)) {
    throw Error("--hosts", fmt::format("{}", options.num_hosts),
                fmt::format("a divisor of the number of ranks, {}", ranks));
  }
  std::int64_t hosts = std::max<std::int64_t>(1, options.num_hosts);
  while (options.num_hosts == 0 && (!divides(hosts) || ranks / hosts > kMostRanksOfHost)) ++hosts;
  return static_cast<int>(hosts);
}

/// Those of the file, or as many random ones as all ranks have tokens.
Tensor make_ids(const Options& options, const ModelConfig& model, std::int64_t num_tokens) {
  const std::int64_t num_experts = model.router.num_experts, topk = model.router.topk;
  if (!options.routing.empty()) {
    return replay_routing(options.routing, num_experts, topk).topk_ids;
  }
  Tensor ids = Tensor::empty({num_tokens, topk}, DType::kI32);
  RoutingDraw(num_experts, options.skew == "zipf" ? testing::RoutingSkew::kZipf
                                                  : testing::RoutingSkew::kBalanced)
      .draw(ids);
  return ids;
}

void print_step(const SimulatedLayer& layer, const SimulatedStep& step) {
  fmt::print(
      "{:>6} {:>6} {:>7} {:>8.1f} us{:1}{:>8.1f} us {:>8.1f} us {:>9.1f} us {:>10.3f} {:>10.3f} "
      "{:>8.3f}\n",
      layer.placement.num_ranks(), layer.num_hosts, layer.tokens_per_rank, step.dispatch_us,
      step.quantize_us > 0 ? "*" : "", step.experts_us, step.combine_us, step.step_us(),
      1e-6 * step.inside_bytes, 1e-6 * step.between_bytes, step.balance);
}

nlohmann::ordered_json step_json(const SimulatedLayer& layer, const SimulatedStep& step) {
  return {{"ranks", layer.placement.num_ranks()},
          {"hosts", layer.num_hosts},
          {"num_tokens", layer.tokens_per_rank},
          {"dispatch_us", step.dispatch_us},
          {"quantize_us", step.quantize_us},
          {"experts_us", step.experts_us},
          {"combine_us", step.combine_us},
          {"step_us", step.step_us()},
          {"inside_bytes", step.inside_bytes},
          {"between_bytes", step.between_bytes},
          {"balance", step.balance}};
}

struct SimulatedRow {
  SimulatedLayer layer;
  SimulatedStep step;
};

void print_notes(const RankCosts& costs, const std::vector<SimulatedRow>& rows) {
  fmt::print(
      "\nEach number is that of the rank that has the most.\n"
      "step: dispatch, experts and combine, one after the other.\n"
      "inside, between: MB of dispatch that a rank sends or gets, whichever is more, within its "
      "host "
      "and between hosts.\n"
      "balance: rows of the busiest rank over the mean.\n\n");
  const auto link = [](std::string_view what, const LinkCost& cost) {
    fmt::print("{}: {:.1f} us and {:.1f} GB/s ({})\n", what, cost.floor_us,
               1e-3 * cost.bytes_per_us, cost.source);
  };
  for (const RowPath path : {RowPath::kPeerMemory, RowPath::kAll2all, RowPath::kAllgather}) {
    const auto takes = [&](const SimulatedRow& row) { return row.layer.path_inside() == path; };
    if (std::none_of(rows.begin(), rows.end(), takes)) continue;
    const CombineMode combine = rows.front().layer.combine;
    link(fmt::format("{} dispatch within a host", name(path)), costs.of(path).dispatch);
    link(fmt::format("{} {} within a host", name(path), name(combine)),
         costs.of(path).combine(combine));
  }
  link("between hosts", costs.between_hosts);
  const auto is_quantized = [](const SimulatedRow& row) { return row.step.quantize_us > 0; };
  if (std::any_of(rows.begin(), rows.end(), is_quantized)) {
    link("* rows are quantized before they travel, which is in dispatch", costs.quantize);
  }
  fmt::print("experts: {:.0f} GB/s and {:.0f} TFLOP/s ({})\n", 1e-3 * costs.experts.bytes_per_us,
             1e-6 * costs.experts.flops_per_us, costs.experts.source);
}

std::vector<SimulatedRow> make_rows(const Options& options, const RankCosts& costs,
                                    const ModelConfig& model) {
  std::vector<SimulatedRow> rows;
  const Selection selection = select(layer_config(options, model));
  for (const std::int64_t ranks : options.ep) {
    const ExpertPlacement placement =
        options.placement.empty()
            ? ExpertPlacement::linear(model.router.num_experts, static_cast<int>(ranks))
            : parsed(options.placement, ExpertPlacement::parse);
    if (placement.num_experts() != model.router.num_experts) {
      throw Error("--placement", fmt::format("one of {} experts", placement.num_experts()),
                  fmt::format("of the {} of the layer", model.router.num_experts));
    }
    if (placement.num_ranks() != ranks) {
      throw Error("--placement", fmt::format("one of {} ranks", placement.num_ranks()),
                  fmt::format("of the {} of --ep", ranks));
    }
    SimulatedLayer layer = simulated_layer(selection, placement);
    layer.num_hosts = num_hosts(options, ranks);
    for (const std::int64_t tokens : options.tokens) {
      layer.tokens_per_rank = tokens;
      rows.push_back({layer, simulate(costs, layer, make_ids(options, model, ranks * tokens))});
    }
  }
  return rows;
}

void print_simulation_json(const std::string& name, const RankCosts& costs,
                           const std::vector<SimulatedRow>& rows) {
  nlohmann::ordered_json steps = nlohmann::ordered_json::array();
  for (const SimulatedRow& row : rows) steps.push_back(step_json(row.layer, row.step));
  fmt::print("{}\n", nlohmann::ordered_json{{"name", name},
                                            {"steps", std::move(steps)},
                                            {"costs", nlohmann::json::parse(costs.json())}}
                         .dump());
}

void print_simulation(const std::string& name, const RankCosts& costs,
                      const std::vector<SimulatedRow>& rows) {
  fmt::print("{}\n{:>6} {:>6} {:>7} {:>11} {:>11} {:>11} {:>12} {:>10} {:>10} {:>8}\n", name,
             "ranks", "hosts", "tokens", "dispatch", "experts", "combine", "step", "inside MB",
             "between MB", "balance");
  for (const SimulatedRow& row : rows) print_step(row.layer, row.step);
  print_notes(costs, rows);
}

void run(const Options& options) {
  const RankCosts costs =
      options.costs.empty() ? rank_costs() : parsed(options.costs, RankCosts::parse);
  for (const BenchSubject& subject : options.subjects.get()) {
    const std::vector<SimulatedRow> rows = make_rows(options, costs, subject.model);
    (options.json ? print_simulation_json : print_simulation)(subject.name, costs, rows);
  }
}

}  // namespace

void add_simulate(Program& program) {
  auto options = std::make_shared<Options>();
  Command command = program.add_command(
      "simulate", "Tell how long a layer would take on ranks that are not here");
  options->subjects.add_to(command);
  command.add_option("--ep", options->ep, "N", "Ranks that share the experts")
      .list()
      .between(std::int64_t{1}, std::int64_t{1} << 12)
      .required();
  command
      .add_option(
          "--hosts", options->num_hosts, "N",
          fmt::format("Hosts of equally many ranks; default: of at most {}", kMostRanksOfHost))
      .positive();
  command
      .add_option("--tokens", options->tokens, "N", "Tokens of each rank; default: 8,128,1024,8192")
      .list()
      .between(std::int64_t{1}, std::int64_t{1} << 16);
  command.add_option("--scheme", options->scheme, "SCHEME",
                     "Of the experts; default: as published");
  add_dispatch_dtype(command, options->dispatch_dtype);
  command.add_option(
      "--costs", options->costs, "PATH",
      "File of `bench --calibrate`; default: that of FUSEDMOE_RANK_COSTS, or H200s, and other "
      "hosts assumed");
  const Option routing = command.add_option(
      "--routing", options->routing, "PATH",
      "File of --record-routing, whose tokens are taken in turn; default: random ids");
  command.add_option("--skew", options->skew, "NAME", "How random tokens spread over experts")
      .one_of({"balanced", "zipf"})
      .excludes(routing)
      .show_default();
  command.add_option("--placement", options->placement, "PATH",
                     "File of `balance`, for as many ranks; default: consecutive experts");
  command.add_flag("--json", options->json, "Print a JSON object for each model instead of text");
  command.example("fusedmoe simulate --model deepseek-v3 --ep 8,64,256 --tokens 128");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
