// fusedmoe bench: a model's experts, or also its router, at several numbers of tokens, as a table,
// JSON or CSV. Exit status 1 if a timed configuration does not agree with `reference`.
#include "bench/bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/bench_problem.h"
#include "bench/bench_subject.h"
#include "bench/rank_bench.h"
#include "commands.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/version.h"
#include "ranks.h"
#include "support.h"
#include "testing/error_bound.h"

namespace fusedmoe::cli {
namespace {

struct Options {
  BenchSubjects subjects;
  std::vector<std::string> schemes;
  std::vector<std::string> experts;
  std::vector<std::int64_t> tokens;
  std::string replay_routing;
  std::string device = "cpu";
  std::string dtype = "bf16";
  std::string skew = "balanced";
  int threads = 0;
  RankOptionsOf ranks;
  std::int64_t min_samples = 11;
  double max_seconds = 10;
  bool json = false, csv = false, markdown = false;
  bool load = false, heat_map = false;
  bool rows_only = false;
  bool layer = false;
};

struct Row {
  std::string model, scheme, dtype, implementation;
  BenchRow result;
};

struct Column {
  const char* name;
  std::string (*text)(const Row&);
};

/// Of a measured value; a dash where no sample was kept.
std::string number(const Row& row, double value, int digits) {
  return row.result.samples ? fmt::format("{:.{}f}", value, digits) : "-";
}

std::string or_dash(const std::string& text) {
  return text.empty() ? "-" : text;
}

const std::vector<Column>& columns() {
  static const std::vector<Column> table{
      {"model", [](const Row& r) { return r.model; }},
      {"scheme", [](const Row& r) { return r.scheme; }},
      {"dtype", [](const Row& r) { return r.dtype; }},
      {"experts", [](const Row& r) { return r.implementation; }},
      {"tokens", [](const Row& r) { return fmt::format("{}", r.result.num_tokens); }},
      {"kernel_config", [](const Row& r) { return or_dash(r.result.kernel_config); }},
      {"distinct", [](const Row& r) { return number(r, r.result.distinct_experts, 1); }},
      {"median_ms", [](const Row& r) { return number(r, r.result.median_ms, 4); }},
      {"floor_ms", [](const Row& r) { return number(r, r.result.floor_ms, 4); }},
      {"min_ms", [](const Row& r) { return number(r, r.result.min_ms, 3); }},
      {"p99_ms", [](const Row& r) { return number(r, r.result.p99_ms, 3); }},
      {"GFLOP/s", [](const Row& r) { return number(r, r.result.gflops, 0); }},
      {"weight_MB", [](const Row& r) { return number(r, 1e-6 * r.result.weight_bytes, 2); }},
      {"GB/s", [](const Row& r) { return number(r, r.result.gbytes, 1); }},
      {"read_GB/s", [](const Row& r) { return number(r, r.result.read_gbytes, 1); }},
      {"dots", [](const Row& r) { return std::string(r.result.dot_products); }},
      {"peak_GFLOP/s", [](const Row& r) { return number(r, r.result.peak_gflops, 0); }},
      {"%bandwidth", [](const Row& r) { return number(r, r.result.percent_of_bandwidth(), 0); }},
      {"%flops", [](const Row& r) { return number(r, r.result.percent_of_flops(), 0); }},
      {"time/floor", [](const Row& r) { return number(r, r.result.ratio, 3); }},
      {"rel_error", [](const Row& r) { return fmt::format("{:.1e}", r.result.relative_error); }},
      {"samples",
       [](const Row& r) { return fmt::format("{} (-{})", r.result.samples, r.result.dropped); }},
  };
  return table;
}

std::vector<std::string> cells(const Row& row) {
  std::vector<std::string> result;
  for (const Column& column : columns()) result.push_back(column.text(row));
  return result;
}

void print_table(const std::vector<Row>& rows, bool markdown) {
  std::vector<std::vector<std::string>> lines(1);
  for (const Column& column : columns()) lines[0].emplace_back(column.name);
  for (const Row& row : rows) lines.push_back(cells(row));
  std::vector<std::size_t> widths(columns().size());
  for (const auto& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  for (std::size_t n = 0; n < lines.size(); ++n) {
    std::string text = markdown ? "|" : "";
    for (std::size_t i = 0; i < widths.size(); ++i) {
      text += fmt::format("{}{:>{}}{}", markdown ? " " : "", lines[n][i], widths[i],
                          markdown ? " |" : "  ");
    }
    std::cout << text << '\n';
    if (markdown && n == 0) {
      std::string rule = "|";
      for (std::size_t width : widths) rule += fmt::format(" {:->{}}: |", "", width - 1);
      std::cout << rule << '\n';
    }
  }
}

void print_json(const std::vector<Row>& rows) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    const BenchRow& r = row.result;
    all.push_back({{"model", row.model},
                   {"scheme", row.scheme},
                   {"dtype", row.dtype},
                   {"experts", row.implementation},
                   {"num_tokens", r.num_tokens},
                   {"kernel_config", r.kernel_config},
                   {"distinct_experts", r.distinct_experts},
                   {"median_ms", r.median_ms},
                   {"min_ms", r.min_ms},
                   {"p99_ms", r.p99_ms},
                   {"gflops", r.gflops},
                   {"weight_bytes", r.weight_bytes},
                   {"weight_gbytes_per_s", r.gbytes},
                   {"machine_read_gbytes_per_s", r.read_gbytes},
                   {"dot_products", r.dot_products},
                   {"machine_gflops", r.peak_gflops},
                   {"floor_ms", r.floor_ms},
                   {"time_over_floor", r.ratio},
                   {"relative_error", r.relative_error},
                   {"samples", r.samples},
                   {"dropped_samples", r.dropped},
                   {"load", nlohmann::ordered_json::parse(load_json(r.load))},
                   {"note", r.note}});
  }
  const nlohmann::ordered_json context{
      {"version", FUSEDMOE_VERSION}, {"isa", cpu_isa()}, {"threads", num_threads()}};
  std::cout << nlohmann::ordered_json{{"context", context}, {"rows", all}}.dump(2) << '\n';
}

void print_csv(const std::vector<Row>& rows) {
  std::vector<std::string> names;
  for (const Column& column : columns()) names.emplace_back(column.name);
  std::cout << fmt::format("{}\n", fmt::join(names, ","));
  for (const Row& row : rows) std::cout << fmt::format("{}\n", fmt::join(cells(row), ","));
}

void print_load(const Options& options, const std::vector<Row>& rows) {
  for (const Row& row : rows) {
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
std::vector<std::string> schemes_of(const Options& options, const BenchSubject& subject,
                                    const std::string& experts) {
  if (options.schemes.empty()) return {name(subject.model.scheme)};
  if (options.schemes != std::vector<std::string>{"all"}) return options.schemes;
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

bool run_scheme(const Options& options, const BenchSubject& subject, const std::string& scheme,
                const std::string& experts, std::vector<Row>& rows) {
  BenchOptions bench_options;
  bench_options.model = subject.model;
  bench_options.scheme = parse_scheme(scheme);
  bench_options.dtype = parse_float_dtype(options.dtype);
  bench_options.device = parse_device(options.device);
  bench_options.experts = experts;
  bench_options.layer = options.layer;
  bench_options.skew =
      options.skew == "zipf" ? testing::RoutingSkew::kZipf : testing::RoutingSkew::kBalanced;
  if (!options.replay_routing.empty()) {
    const RouterConfig& router = subject.model.router;
    if (router.num_zero_experts > 0) {
      throw Error::conflict("--replay-routing", subject.name,
                            "its router has zero experts, which experts never see");
    }
    bench_options.replay = replay_routing(options.replay_routing, router.num_experts, router.topk);
  }
  bench_options.min_samples = options.min_samples;
  bench_options.max_seconds = options.max_seconds;
  const double bound = testing::error_bound(bench_options.dtype, bench_options.scheme,
                                            bench_options.model.intermediate);
  const std::string what = fmt::format("{} {}", subject.name, scheme);
  std::unique_ptr<LayerBench> bench;
  {
    Progress progress("packing " + what);
    const auto update = [&](std::int64_t done, std::int64_t total) {
      progress.update(done, total);
    };
    bench = bench_options.device.is_cpu() ? make_cpu_bench(std::move(bench_options), update)
                                          : make_device_bench(std::move(bench_options), update);
  }
  std::vector<std::int64_t> tokens = options.tokens;
  if (tokens.empty()) {
    // Decode and prefill say what there is to say of many schemes.
    tokens = options.schemes.empty() ? std::vector<std::int64_t>{1, 8, 32, 128, 512}
                                     : std::vector<std::int64_t>{1, 512};
  }
  bool right = true;
  Progress progress("timing " + what);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    progress.update(static_cast<std::int64_t>(i), static_cast<std::int64_t>(tokens.size()));
    Row row{subject.name, scheme, options.dtype, bench->implementation(), bench->run(tokens[i])};
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

/// The way of the rows, and whole steps: a table for each model.
void run_ranks(const Options& options) {
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
    bench.max_seconds = std::min(options.max_seconds, 0.5);
    bench.threads = options.threads;
    bench.rows_only = options.rows_only;
    bench.json = options.json;
    run_rank_bench(bench);
  }
}

void run(const Options& options) {
  if (options.threads > 0) set_num_threads(options.threads);
  const bool on_ranks = options.ranks.num_ranks() > 1;
  const char* other = on_ranks                          ? "--ep, --tp and --dp"
                      : options.skew != "balanced"      ? "--skew"
                      : !options.replay_routing.empty() ? "--replay-routing"
                                                        : nullptr;
  if (options.layer && other) {
    throw Error::conflict("--layer", other, "its router routes random hidden states");
  }
  if (on_ranks) return run_ranks(options);
  options.ranks.dispatched();  // an Error if it is given
  if (options.rows_only) {
    throw Error::invalid("--rows-only", "--rows-only needs several ranks: --ep or --dp");
  }
  for (const std::string& experts : options.experts) check_experts_name(experts);
  bool right = true;
  std::vector<Row> rows;
  const std::vector<std::string> best{""};
  for (const BenchSubject& subject : options.subjects.get()) {
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
    print_table(rows, options.markdown);
    if (options.load || options.heat_map) print_load(options, rows);
  }
  if (!right) {
    throw Error::invalid("bench", "results differ from reference by more than their bound");
  }
}

}  // namespace

void add_bench(Command& program) {
  auto options = std::make_shared<Options>();
  Command command = program.add_command("bench",
                                        "Time the experts of a model's MoE layer; on several ranks "
                                        "dispatch, combine and whole steps");
  options->subjects.add_to(command);
  command.add_option("--scheme", options->schemes, "Schemes, or all (default: as published; bf16)")
      .list();
  command
      .add_option("--tokens", options->tokens,
                  "Numbers of tokens (default: 1,8,32,128,512; of given schemes 1,512)")
      .list()
      .between(std::int64_t{1}, std::int64_t{1} << 20);
  command
      .add_option("--experts", options->experts,
                  "Implementations (default: the best); on ranks a transport")
      .list();
  command.add_flag("--layer", options->layer,
                   "Time the layer from hidden states: its router, with random weights, and the "
                   "routed experts. The floor is that of the experts");
  command.add_option("--device", options->device, "cpu, cuda or cuda:<index>").show_default();
  command.add_option("--dtype", options->dtype, "dtype of the hidden states")
      .one_of({"bf16", "f16", "f32"});
  command.add_option("--skew", options->skew, "How tokens spread over experts")
      .one_of({"balanced", "zipf"});
  command.add_option("--replay-routing", options->replay_routing,
                     "Take ids and weights in turn from a file of run --record-routing");
  command.add_option("--threads", options->threads, "CPU threads (default: all cores)")
      .between(1, kMaxThreads);
  options->ranks.add_to(command);
  command.add_flag("--rows-only", options->rows_only,
                   "On ranks: time dispatch and combine without experts, so without weights");
  command.add_option("--min-samples", options->min_samples, "Samples for each number of tokens")
      .positive();
  command.add_option("--max-seconds", options->max_seconds, "Time for each number of tokens")
      .positive();
  Command format = command.add_group("format");
  format.require(0, 1);
  format.add_flag("--json", options->json, "JSON");
  format.add_flag("--csv", options->csv, "CSV");
  format.add_flag("--md", options->markdown, "Markdown");
  command.add_flag("--load", options->load, "Print the load of the experts below the table");
  command.add_flag("--heat-map", options->heat_map, "Print it as shades");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
