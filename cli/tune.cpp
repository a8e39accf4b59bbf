// fusedmoe tune: every tile plan of the experts of a model's layer, measured as bench does; the
// fastest of each number of tokens goes to the file of tuned plans. A plan whose result does not
// agree with `reference` is an Error.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "bench_problem.h"
#include "bench_subject.h"
#include "commands.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "support.h"
#include "tools/tune.h"

namespace fusedmoe::cli {
namespace {

struct Options {
  BenchSubjects subjects;
  std::string scheme, experts, output;
  std::vector<std::int64_t> tokens;
  std::string device = "cuda";
  std::string dtype = "bf16";
  std::int64_t min_samples = 30;
};

/// A plan replaces the heuristic's where it takes less than so much of its time: smaller gains are
/// noise.
constexpr double kGain = 0.99;

/// The rows of one number of tokens as a table; returns the one that is tuned.
const BenchRow& print_rows(const std::string& what, const std::vector<BenchRow>& rows) {
  const BenchRow& heuristic = rows.front();
  const BenchRow& fastest = *std::min_element(
      rows.begin(), rows.end(),
      [](const BenchRow& a, const BenchRow& b) { return a.median_ms < b.median_ms; });
  const BenchRow& tuned = fastest.median_ms < kGain * heuristic.median_ms ? fastest : heuristic;
  fmt::print("\n{}, {} tokens, floor {:.1f} us\n{:<28} {:>10} {:>10} {:>9}\n", what,
             heuristic.num_tokens, 1e3 * heuristic.floor_ms, "plan", "us", "time/floor", "error");
  for (const BenchRow& row : rows) {
    fmt::print("{:<28} {:>10.1f} {:>10.3f} {:>9.1e}{}{}\n", row.tile_plan, 1e3 * row.median_ms,
               row.ratio, row.relative_error, &row == &heuristic ? "  heuristic" : "",
               &row == &tuned ? "  tuned" : "");
  }
  std::fflush(stdout);
  return tuned;
}

void check_results(const std::string& what, const std::vector<BenchRow>& rows, double bound) {
  for (const BenchRow& row : rows) {
    if (row.relative_error <= bound) continue;
    throw Error(fmt::format("{}, {} tokens, plan {}", what, row.num_tokens, row.tile_plan),
                fmt::format("off by {:.2e} from reference", row.relative_error),
                fmt::format("within {:.0e}", bound));
  }
}

/// The key of the problem's plans, but for the number of tokens.
TunedPlan key_of(const BenchOptions& options, const Experts& experts) {
  const bool batched = experts.activation_format() == ActivationFormat::kBatchedExperts;
  TunedPlan key;
  key.device = device_name(options.device);
  key.experts = experts.name();
  key.hidden = options.model.hidden;
  key.intermediate = options.model.intermediate;
  key.num_local_experts = options.model.router.num_experts;
  key.topk = batched ? 1 : options.model.router.topk;
  return key;
}

void check_reads_tuned_plans(const Experts& experts, MoeConfig config) {
  const auto refuse = [&](const char* expected) {
    throw Error("experts", std::string(experts.name()), expected);
  };
  if (experts.tile_plans(ProblemSize::of(config, 1), config.device).empty()) {
    refuse("experts that have tile plans");
  }
  if (dynamic_cast<const MonolithicExperts*>(&experts)) {
    refuse("the experts inside of it, whose plans it runs");
  }
  config.batch_invariant = true;
  if (experts.supports(config)) refuse("experts whose sums may depend on the number of tokens");
}

void tune(const Options& options, const BenchSubject& subject, const std::string& path,
          TunedPlans& plans) {
  BenchOptions bench_options;
  bench_options.model = subject.model;
  bench_options.scheme =
      options.scheme.empty() ? subject.model.scheme : parse_scheme(options.scheme);
  bench_options.dtype = parse_float_dtype(options.dtype);
  bench_options.device = parse_device(options.device);
  bench_options.experts = options.experts;
  bench_options.min_samples = options.min_samples;
  const double bound = error_bound(bench_options.dtype, bench_options.scheme);
  MoeConfig config = moe_config(subject.model, bench_options.dtype, bench_options.device);
  config.scheme = bench_options.scheme;
  const auto experts = select(config, options.experts).experts;
  check_reads_tuned_plans(*experts, config);
  const TunedPlan key = key_of(bench_options, *experts);
  const std::string what = fmt::format("{} {}", subject.name, experts->name());

  std::unique_ptr<LayerBench> bench;
  {
    Progress progress("packing " + what);
    bench = make_device_bench(bench_options, [&](std::int64_t done, std::int64_t total) {
      progress.update(done, total);
    });
  }
  for (const std::int64_t num_tokens : options.tokens) {
    const std::vector<BenchRow> rows = bench->run_tile_plans(num_tokens);
    const BenchRow& tuned = print_rows(what, rows);
    check_results(what, rows, bound);
    TunedPlan plan = key;
    plan.num_tokens = num_tokens;
    plan.plan = tuned.tile_plan;
    plan.time_us = 1e3 * tuned.median_ms;
    plans.set(std::move(plan));
    plans.save(path);  // what is measured is kept, whatever comes after
  }
}

void run(const Options& options) {
  const std::string path = options.output.empty() ? tuned_plans_path().string() : options.output;
  if (path.empty()) throw Error("--output", "not given, and there is no home", "a file");
  TunedPlans plans;
  if (std::filesystem::exists(path)) plans = TunedPlans::load(path);
  for (const BenchSubject& subject : options.subjects.get()) tune(options, subject, path, plans);
  log(Level::kInfo, fmt::format("{} plans in {}", plans.plans().size(), path));
}

}  // namespace

void add_tune(Command& program) {
  auto options = std::make_shared<Options>();
  for (std::int64_t tokens = 1; tokens <= 8192; tokens *= 2) options->tokens.push_back(tokens);
  Command command = program.add_command(
      "tune", "Measure the tile plans of a model's experts and keep the fastest");
  options->subjects.add_to(command);
  command.add_option("--scheme", options->scheme, "Of the experts; default: as published; bf16");
  command
      .add_option("--tokens", options->tokens,
                  "Numbers of tokens (default: powers of two up to 8192)")
      .list()
      .between(std::int64_t{1}, std::int64_t{1} << 20);
  command.add_option("--experts", options->experts, "Implementation (default: the best)");
  command.add_option("--device", options->device, "cuda or cuda:<index>").show_default();
  command.add_option("--dtype", options->dtype, "dtype of the hidden states")
      .one_of({"bf16", "f16", "f32"});
  command.add_option("--min-samples", options->min_samples, "Samples for each plan").positive();
  command.add_option("--output", options->output,
                     "File to add the plans to (default: the one that the library reads)");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
