// fusedmoe bench: a model's experts, or also its router, at several numbers of tokens, as a table,
// JSON or CSV. Exit status 1 if a timed configuration does not agree with `reference`.
#include "bench/layer_bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>
#include <memory>

#include "bench/bench_problem.h"
#include "bench/bench_report.h"
#include "bench/bench_subject.h"
#include "bench/rank_bench.h"
#include "commands.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/version.h"
#include "manual.h"
#include "ranks.h"
#include "support.h"
#include "testing/error_bound.h"

namespace fusedmoe::cli {
namespace {

constexpr double kMaxSeconds = 10, kMaxSecondsOnRanks = 0.5;
const std::vector<std::string> kAllSchemes{"all"};
constexpr const char* kRanks = "--ep, --tp and --dp";

struct BenchCommand {
  BenchSubjects subjects;
  std::vector<std::string> schemes;
  std::vector<std::string> experts;
  std::vector<std::int64_t> tokens;
  std::string record_routing, replay_routing;
  std::string device = "cpu";
  std::string dtype = "bf16";
  std::string skew = "balanced";
  int threads = 0;
  RankOptionsOf ranks;
  std::int64_t min_samples = 11;
  double max_seconds = 0;  // 0: kMaxSeconds, on ranks kMaxSecondsOnRanks
  bool json = false, csv = false, markdown = false, wide = false, columns = false;
  bool load = false, heat_map = false;
  bool rows_only = false, peer_memory = false;
  std::string calibrate;
  bool layer = false;
};

void print_load(const BenchCommand& options, const std::vector<ReportRow>& rows) {
  for (const ReportRow& row : rows) {
    std::cout << fmt::format("\n{} {} {} tokens, {} samples\n", row.model, row.scheme,
                             row.result.num_tokens, row.result.samples + row.result.dropped);
    if (options.load) std::cout << load_table(row.result.load);
    if (options.heat_map) std::cout << load_heat_map(row.result.load);
  }
}

/// Why a configuration is left out of "all" schemes; empty when it is timed.
std::string why_not_timed(const MoeConfig& config, const std::string& experts) {
  if (experts.empty()) {
    const Selection selection = explain(config);
    return selection ? "" : selection.candidates.front().support.text;
  }
  try {
    select(config, experts);
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

/// Names of the schemes to time; "all": those that the experts serve, and a word on the others.
std::vector<std::string> schemes_of(const BenchCommand& options, const BenchSubject& subject,
                                    const std::string& experts) {
  if (options.schemes.empty()) return {name(subject.model.scheme)};
  if (options.schemes != kAllSchemes) return options.schemes;
  std::vector<std::string> names;
  for (const NamedScheme& entry : named_schemes()) {
    MoeConfig config =
        moe_config(subject.model, parse_float_dtype(options.dtype), parse_device(options.device));
    config.scheme = entry.scheme;
    const std::string refusal = why_not_timed(config, experts);
    if (refusal.empty()) {
      names.push_back(entry.name);
    } else {
      log(Level::kWarning, fmt::format("{} is left out: {}", entry.name, refusal));
    }
  }
  return names;
}

/// What several draws of the largest number of tokens give, kept in a file and then replayed, so
/// that the file is all that this run and other programs need to know.
RecordedRouting drawn_routing(const BenchCommand& options, const std::vector<std::int64_t>& tokens,
                              const RouterConfig& router, testing::RoutingSkew skew) {
  constexpr std::int64_t kDraws = 6;
  const std::int64_t rows = kDraws * *std::max_element(tokens.begin(), tokens.end());
  testing::Random random(2);
  RecordedRouting routing{Tensor::empty({rows, router.topk}, DType::kI32),
                          random_topk_weights(rows, router.topk, random)};
  RoutingDraw(router.num_experts, skew).draw(routing.topk_ids);
  record_routing(options.record_routing, routing, router.num_experts);
  return routing;
}

bool run_scheme(const BenchCommand& options, const BenchSubject& subject, const std::string& scheme,
                const std::string& experts, std::vector<ReportRow>& rows) {
  BenchOptions bench_options;
  bench_options.model = subject.model;
  bench_options.scheme = parse_scheme(scheme);
  bench_options.dtype = parse_float_dtype(options.dtype);
  bench_options.device = parse_device(options.device);
  bench_options.experts = experts;
  bench_options.layer = options.layer;
  bench_options.skew =
      options.skew == "zipf" ? testing::RoutingSkew::kZipf : testing::RoutingSkew::kBalanced;
  std::vector<std::int64_t> tokens = options.tokens;
  if (tokens.empty()) {
    // Decode and prefill say what there is to say of many schemes.
    tokens = options.schemes.empty() ? std::vector<std::int64_t>{1, 8, 32, 128, 512}
                                     : std::vector<std::int64_t>{1, 512};
  }
  const RouterConfig& router = subject.model.router;
  if (!options.replay_routing.empty()) {
    if (router.num_zero_experts > 0) {
      throw Error::conflict("--replay-routing", subject.name,
                            "its router has zero experts, which experts never see");
    }
    bench_options.replay = replay_routing(options.replay_routing, router.num_experts, router.topk);
  } else if (!options.record_routing.empty()) {
    bench_options.replay = drawn_routing(options, tokens, router, bench_options.skew);
  }
  bench_options.min_samples = options.min_samples;
  bench_options.max_seconds = options.max_seconds > 0 ? options.max_seconds : kMaxSeconds;
  const double bound = testing::error_bound(bench_options.dtype, bench_options.scheme,
                                            bench_options.model.intermediate);
  const std::string what = fmt::format("{} {}", subject.name, scheme);
  std::unique_ptr<LayerBench> bench;
  {
    Progress progress("Packing " + what);
    const auto update = [&](std::int64_t done, std::int64_t total) {
      progress.update(done, total);
    };
    bench = bench_options.device.is_cpu() ? make_cpu_bench(std::move(bench_options), update)
                                          : make_device_bench(std::move(bench_options), update);
  }
  bool right = true;
  Progress progress("Timing " + what);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    progress.update(static_cast<std::int64_t>(i), static_cast<std::int64_t>(tokens.size()));
    ReportRow row{subject.name, scheme, options.dtype, bench->implementation(),
                  bench->run(tokens[i])};
    if (!row.result.note.empty())
      log(Level::kWarning, fmt::format("{} {} tokens: {}", what, tokens[i], row.result.note));
    if (!(row.result.relative_error <= bound)) {
      log(Level::kError, fmt::format("{} {} tokens: relative error {:.2e} against reference, more "
                                     "than {:.1e}",
                                     what, tokens[i], row.result.relative_error, bound));
      right = false;
    }
    rows.push_back(std::move(row));
  }
  return right;
}

/// Throws Error for an option that says nothing to ranks.
void check_on_ranks(const BenchCommand& options) {
  const char* const of_ids = "each rank draws ids of its own";
  const char* const of_output = "ranks print a table of their own, or JSON";
  const bool schemes = options.schemes.size() > 1 || options.schemes == kAllSchemes;
  const struct {
    bool given;
    std::string option, because;
  } table[] = {
      {options.layer, "--layer", "its router routes random hidden states"},
      {options.skew != "balanced", "--skew", of_ids},
      {!options.replay_routing.empty(), "--replay-routing", of_ids},
      {!options.record_routing.empty(), "--record-routing", of_ids},
      {schemes, fmt::format("--scheme {}", fmt::join(options.schemes, ",")), "ranks time one"},
      {options.experts.size() > 1, fmt::format("--experts {}", fmt::join(options.experts, ",")),
       "ranks time one transport, or without --experts all"},
      {options.csv, "--csv", of_output},
      {options.markdown, "--md", of_output},
      {options.wide, "--wide", of_output},
      {options.load, "--load", of_output},
      {options.heat_map, "--heat-map", of_output},
  };
  for (const auto& row : table) {
    if (row.given) throw Error::conflict(row.option, kRanks, row.because);
  }
}

/// The way of the rows, and whole steps: a table for each model.
void run_ranks(const BenchCommand& options) {
  if (options.threads == 0 && !launched()) {
    set_num_threads(std::max(1, num_threads() / options.ranks.num_ranks()));
  }
  for (const BenchSubject& subject : options.subjects.get()) {
    RankBenchOptions bench;
    bench.model = subject.model;
    bench.deployment = options.ranks.deployment(0);
    bench.device = options.device;
    bench.dtype = parse_float_dtype(options.dtype);
    bench.scheme = options.schemes.empty() ? schemes::unquantized(bench.dtype)
                                           : parse_scheme(options.schemes.front());
    if (!options.experts.empty()) bench.transport = options.experts.front();
    bench.dispatch_dtype = options.ranks.dispatched();
    bench.tokens = options.tokens.empty() ? std::vector<std::int64_t>{1, 8, 32, 128, 1024, 8192}
                                          : options.tokens;
    bench.min_samples = options.min_samples;
    bench.max_seconds = options.max_seconds > 0 ? options.max_seconds : kMaxSecondsOnRanks;
    bench.threads = options.threads;
    bench.rows_only = options.rows_only;
    bench.peer_memory = options.peer_memory ? std::optional(true) : options.ranks.peer_memory();
    bench.json = options.json;
    bench.calibrate = options.calibrate;
    run_rank_bench(bench);
  }
}

void print_columns() {
  for (const auto& [name, meaning] : column_meanings()) fmt::print("{:<14}{}\n", name, meaning);
}

void run(const BenchCommand& options) {
  if (options.columns) return print_columns();
  if (options.threads > 0) set_num_threads(options.threads);
  const bool on_ranks = options.ranks.num_ranks() > 1;
  const char* routing_option = options.skew != "balanced"        ? "--skew"
                               : !options.replay_routing.empty() ? "--replay-routing"
                               : !options.record_routing.empty() ? "--record-routing"
                                                                 : nullptr;
  if (on_ranks) check_on_ranks(options);
  if (options.layer && routing_option) {
    throw Error::conflict("--layer", routing_option, "its router routes random hidden states");
  }
  if (!options.replay_routing.empty() && !options.record_routing.empty()) {
    throw Error::conflict("--record-routing", "--replay-routing");
  }
  const std::vector<BenchSubject> subjects = options.subjects.get();
  if (!options.record_routing.empty() && subjects.size() > 1) {
    throw Error::conflict("--record-routing", "several models", "a file holds the ids of one");
  }
  if (!options.calibrate.empty() && subjects.size() > 1) {
    throw Error::conflict("--calibrate", "several models", "a file holds the costs of one");
  }
  if (on_ranks) return run_ranks(options);
  options.ranks.dispatched();  // an Error if it is given
  options.ranks.peer_memory();
  for (const auto& [given, option] : {std::pair{options.rows_only, "--rows-only"},
                                      std::pair{options.peer_memory, "--peer-memory"},
                                      std::pair{!options.calibrate.empty(), "--calibrate"}}) {
    if (!given) continue;
    throw Error::invalid(option, fmt::format("{} needs several ranks: --ep or --dp", option));
  }
  for (const std::string& experts : options.experts) check_experts_name(experts);
  bool right = true;
  std::vector<ReportRow> rows;
  const std::vector<std::string> best{""};
  for (const BenchSubject& subject : subjects) {
    for (const std::string& experts : options.experts.empty() ? best : options.experts) {
      for (const std::string& scheme : schemes_of(options, subject, experts)) {
        right = run_scheme(options, subject, scheme, experts, rows) && right;
      }
    }
  }
  const std::string& routing =
      options.replay_routing.empty() ? options.skew : options.replay_routing;
  log(Level::kInfo,
      fmt::format("isa {}, {} threads, version {}; {}", cpu_isa(), num_threads(), FUSEDMOE_VERSION,
                  options.layer
                      ? "routed by a router of random weights"
                      : fmt::format("routing {}, cold weights, given top-k ids", routing)));
  if (options.json) {
    print_json(rows);
  } else if (options.csv) {
    print_csv(rows);
  } else {
    if (options.markdown) {
      print_markdown(rows);
    } else {
      print_table(rows, options.wide ? 0 : terminal_width(stdout, 0));
    }
    if (options.load || options.heat_map) print_load(options, rows);
  }
  if (!right) {
    throw Error::invalid("bench", "results differ from reference by more than their bound");
  }
}

}  // namespace

void add_bench(Program& program) {
  auto options = std::make_shared<BenchCommand>();
  Command command = program.add_command("bench",
                                        "Time the experts of a model's MoE layer; on several ranks "
                                        "dispatch, combine and whole steps");
  Command subject = options->subjects.add_to(command);
  subject.add_flag("--columns", options->columns, "Say what the columns of the table mean").alone();
  command
      .add_option(
          "--scheme", options->schemes, "SCHEME",
          "Schemes, or all; default: the published one of --model, bf16 for --shape; on ranks one, "
          "default: that of --dtype")
      .list();
  command
      .add_option("--tokens", options->tokens, "N",
                  "Numbers of tokens; default: 1,8,32,128,512; of given schemes 1,512; on ranks "
                  "1,8,32,128,1024,8192")
      .list()
      .between(std::int64_t{1}, std::int64_t{1} << 20);
  command
      .add_option("--experts", options->experts, "EXPERTS",
                  "Implementations; default: the best; on ranks one transport, default: all")
      .list();
  command.add_flag("--layer", options->layer,
                   "Time the layer from hidden states: its router, with random weights, and the "
                   "routed experts. The floor is that of the experts");
  command.add_option("--device", options->device, "DEVICE", "Where it runs").show_default();
  command.add_option("--dtype", options->dtype, "DTYPE", "Of the hidden states")
      .one_of({"bf16", "f16", "f32"})
      .show_default();
  const Option skew =
      command.add_option("--skew", options->skew, "NAME", "How tokens spread over experts")
          .one_of({"balanced", "zipf"})
          .show_default();
  command
      .add_option("--replay-routing", options->replay_routing, "PATH",
                  "Take ids and weights in turn from a file of --record-routing")
      .excludes(skew);
  command.add_option("--record-routing", options->record_routing, "PATH",
                     "Draw the ids and weights first, and keep them in this safetensors file");
  command.add_option("--threads", options->threads, "N", "CPU threads; default: all cores")
      .between(1, kMaxThreads);
  options->ranks.add_to(command);
  const Option rows_only =
      command.add_flag("--rows-only", options->rows_only,
                       "On ranks: time dispatch and combine without experts, so without weights");
  const Option peer_memory =
      command.add_flag("--peer-memory", options->peer_memory,
                       "On ranks: send all rows through the memory of the GPUs of one host, or "
                       "fail");
  options->ranks.add_no_peer_memory(command).excludes(peer_memory);
  command
      .add_option("--calibrate", options->calibrate, "PATH",
                  "On ranks: write what the fewest and the most tokens cost, for `simulate`")
      .excludes(rows_only);
  command
      .add_option("--min-samples", options->min_samples, "N", "Samples for each number of tokens")
      .positive()
      .show_default();
  command
      .add_option("--max-seconds", options->max_seconds, "SECONDS",
                  fmt::format("Time for each number of tokens; default: {}; on ranks {} for each "
                              "measurement",
                              kMaxSeconds, kMaxSecondsOnRanks))
      .positive();
  Command format = command.add_group(0, 1);
  format.add_flag("--wide", options->wide,
                  "Print all columns, also those that the terminal is too narrow for");
  const Option json =
      format.add_flag("--json", options->json, "Print JSON, which has all columns and the load");
  const Option csv = format.add_flag("--csv", options->csv, "Print CSV, which has all columns");
  format.add_flag("--md", options->markdown, "Print Markdown, which has all columns");
  command.add_flag("--load", options->load, "Print the load of the experts below the table")
      .excludes(csv);
  command.add_flag("--heat-map", options->heat_map, "Print it as shades")
      .excludes(json)
      .excludes(csv);
  command.example("fusedmoe bench --model gpt-oss-20b --tokens 1,64");
  command.explain("Columns", column_meanings());
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
