// fusedmoe bench: the experts of a model's layer at several numbers of tokens, as a table, JSON or
// CSV. Exit status 1 if a timed configuration does not agree with `reference`.
#include "bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "fusedmoe/error.h"
#include "fusedmoe/version.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

struct Options {
  std::vector<std::string> models;
  std::vector<std::string> schemes;
  std::vector<std::string> experts;
  std::vector<std::int64_t> tokens{1, 8, 32, 128, 512};
  std::string dtype = "bf16";
  std::string skew = "balanced";
  int threads = 0;
  std::int64_t min_samples = 11;
  double max_seconds = 10;
  bool json = false, csv = false, markdown = false;
};

struct Row {
  std::string model, scheme, dtype, implementation;
  BenchRow result;
};

struct Column {
  const char* name;
  std::string (*text)(const Row&);
};

const std::vector<Column>& columns() {
  static const std::vector<Column> table{
      {"model", [](const Row& r) { return r.model; }},
      {"scheme", [](const Row& r) { return r.scheme; }},
      {"dtype", [](const Row& r) { return r.dtype; }},
      {"experts", [](const Row& r) { return r.implementation; }},
      {"tokens", [](const Row& r) { return fmt::format("{}", r.result.num_tokens); }},
      {"distinct", [](const Row& r) { return fmt::format("{:.1f}", r.result.distinct_experts); }},
      {"median_ms", [](const Row& r) { return fmt::format("{:.3f}", r.result.median_ms); }},
      {"min_ms", [](const Row& r) { return fmt::format("{:.3f}", r.result.min_ms); }},
      {"p99_ms", [](const Row& r) { return fmt::format("{:.3f}", r.result.p99_ms); }},
      {"GFLOP/s", [](const Row& r) { return fmt::format("{:.0f}", r.result.gflops); }},
      {"GB/s", [](const Row& r) { return fmt::format("{:.1f}", r.result.gbytes); }},
      {"read_GB/s", [](const Row& r) { return fmt::format("{:.1f}", r.result.read_gbytes); }},
      {"peak_GFLOP/s", [](const Row& r) { return fmt::format("{:.0f}", r.result.peak_gflops); }},
      {"%bandwidth",
       [](const Row& r) {
         return fmt::format("{:.0f}", 100 * r.result.gbytes / r.result.read_gbytes);
       }},
      {"%flops",
       [](const Row& r) {
         return fmt::format("{:.0f}", 100 * r.result.gflops / r.result.peak_gflops);
       }},
      {"time/floor", [](const Row& r) { return fmt::format("{:.3f}", r.result.ratio); }},
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
                   {"distinct_experts", r.distinct_experts},
                   {"median_ms", r.median_ms},
                   {"min_ms", r.min_ms},
                   {"p99_ms", r.p99_ms},
                   {"gflops", r.gflops},
                   {"weight_gbytes_per_s", r.gbytes},
                   {"machine_read_gbytes_per_s", r.read_gbytes},
                   {"machine_gflops", r.peak_gflops},
                   {"floor_ms", r.floor_ms},
                   {"time_over_floor", r.ratio},
                   {"relative_error", r.relative_error},
                   {"samples", r.samples},
                   {"dropped_samples", r.dropped},
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

/// Largest accepted error of a timed configuration: the bound of the golden tests for bf16, and
/// likewise for the sums of f32 and the rounding of f16.
double error_bound(DType dtype) {
  return dtype == DType::kBF16 ? 1e-2 : dtype == DType::kF16 ? 2e-3 : 2e-5;
}

bool run_model(const Options& options, const std::string& model, const std::string& scheme,
               const std::string& experts, std::vector<Row>& rows) {
  BenchOptions bench_options;
  bench_options.model = parse_model_config(model_preset(model));
  bench_options.scheme = scheme.empty() ? bench_options.model.scheme : parse_scheme(scheme);
  bench_options.dtype = parse_float_dtype(options.dtype);
  bench_options.experts = experts;
  bench_options.skew =
      options.skew == "zipf" ? testing::RoutingSkew::kZipf : testing::RoutingSkew::kBalanced;
  bench_options.min_samples = options.min_samples;
  bench_options.max_seconds = options.max_seconds;
  const QuantScheme chosen = bench_options.scheme;
  std::unique_ptr<LayerBench> bench;
  {
    Progress progress("packing " + model);
    bench = std::make_unique<LayerBench>(
        std::move(bench_options),
        [&](std::int64_t done, std::int64_t total) { progress.update(done, total); });
  }
  bool right = true;
  Progress progress("timing " + model);
  for (std::size_t i = 0; i < options.tokens.size(); ++i) {
    progress.update(static_cast<std::int64_t>(i), static_cast<std::int64_t>(options.tokens.size()));
    Row row{model, name(chosen), options.dtype, bench->implementation(),
            bench->run(options.tokens[i])};
    if (!row.result.note.empty()) {
      spdlog::warn("{} tokens: {}", options.tokens[i], row.result.note);
    }
    if (!(row.result.relative_error <= error_bound(parse_float_dtype(options.dtype)))) {
      spdlog::error("{} {} {} tokens: relative error {:.2e} against reference", model, row.scheme,
                    options.tokens[i], row.result.relative_error);
      right = false;
    }
    rows.push_back(std::move(row));
  }
  return right;
}

void run(const Options& options) {
  if (options.threads > 0) set_num_threads(options.threads);
  bool right = true;
  std::vector<Row> rows;
  const std::vector<std::string> best{""};
  for (const std::string& model : options.models) {
    for (const std::string& scheme : options.schemes.empty() ? best : options.schemes) {
      for (const std::string& experts : options.experts.empty() ? best : options.experts) {
        right = run_model(options, model, scheme, experts, rows) && right;
      }
    }
  }
  spdlog::info("isa {}, {} threads, version {}; routing {}, cold weights, given top-k ids",
               cpu_isa(), num_threads(), FUSEDMOE_VERSION, options.skew);
  if (options.json) {
    print_json(rows);
  } else if (options.csv) {
    print_csv(rows);
  } else {
    print_table(rows, options.markdown);
  }
  if (!right) {
    throw Error("bench", "a result that disagrees with reference", "within the error bound");
  }
}

}  // namespace

void add_bench(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("bench", "Time the experts of a model's MoE layer");
  command->add_option("--model", options->models, "Model presets")
      ->required()
      ->delimiter(',')
      ->check(CLI::IsMember(model_preset_names()));
  command->add_option("--scheme", options->schemes, "Schemes (default: as published)")
      ->delimiter(',');
  command->add_option("--tokens", options->tokens, "Numbers of tokens")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
  command->add_option("--experts", options->experts, "Implementations (default: the best)")
      ->delimiter(',');
  command->add_option("--dtype", options->dtype, "dtype of the hidden states")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}));
  command->add_option("--skew", options->skew, "How tokens spread over experts")
      ->check(CLI::IsMember({"balanced", "zipf"}));
  command->add_option("--threads", options->threads, "CPU threads (default: all cores)")
      ->check(CLI::Range(1, kMaxThreads));
  command->add_option("--min-samples", options->min_samples, "Samples for each number of tokens")
      ->check(CLI::PositiveNumber);
  command->add_option("--max-seconds", options->max_seconds, "Time for each number of tokens")
      ->check(CLI::PositiveNumber);
  auto* format = command->add_option_group("format")->require_option(0, 1);
  format->add_flag("--json", options->json, "JSON");
  format->add_flag("--csv", options->csv, "CSV");
  format->add_flag("--md", options->markdown, "Markdown");
  command->callback([options] { run(*options); });
}

}  // namespace fusedmoe::cli
