// fusedmoe tune: every kernel configuration of the experts of a model's layer, measured as bench
// does; the fastest of each number of tokens goes to the file of tuned configurations. One whose
// result does not agree with `reference` is an Error.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "bench/bench_problem.h"
#include "bench/bench_subject.h"
#include "commands.h"
#include "cuda/device/capability.h"
#include "cuda/device/device_code.h"
#include "cuda/device/properties.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/version.h"
#include "layer/tuned_configs.h"
#include "outputs.h"
#include "support.h"
#include "testing/error_bound.h"

namespace fusedmoe::cli {
namespace {

struct TuneOptions {
  BenchSubjects subjects;
  std::string scheme, experts, output, report, measured_by;
  std::vector<std::int64_t> tokens;
  std::string device = "cuda";
  std::string dtype = "bf16";
  std::int64_t min_samples = 30;
  bool force = false;
};

/// A configuration replaces the heuristic's where it takes less than so much of its time: smaller
/// gains are noise.
constexpr double kGain = 0.99;

/// The rows of one number of tokens as a table; returns the one that is tuned.
const BenchRow& print_rows(const std::string& what, const std::vector<BenchRow>& rows) {
  const BenchRow& heuristic = rows.front();
  const BenchRow& fastest = *std::min_element(
      rows.begin(), rows.end(),
      [](const BenchRow& a, const BenchRow& b) { return a.median_ms < b.median_ms; });
  const BenchRow& tuned = fastest.median_ms < kGain * heuristic.median_ms ? fastest : heuristic;
  fmt::print("\n{}, {} tokens, floor {:.1f} us\n{:<28} {:>10} {:>10} {:>9}\n", what,
             heuristic.num_tokens, 1e3 * heuristic.floor_ms, "configuration", "us", "time/floor",
             "error");
  for (const BenchRow& row : rows) {
    fmt::print("{:<28} {:>10.1f} {:>10.3f} {:>9.1e}{}{}\n", row.kernel_config, 1e3 * row.median_ms,
               row.ratio, row.relative_error, &row == &heuristic ? "  heuristic" : "",
               &row == &tuned ? "  tuned" : "");
  }
  std::fflush(stdout);
  return tuned;
}

/// What a user can send to those who choose configurations: the device and every time. The file is
/// one of tuned configurations, too, which say who measured them.
class Report {
 public:
  explicit Report(const TuneOptions& options)
      : path_(options.report), measured_by_(options.measured_by) {
    if (path_.empty()) return;
    const Device device = parse_device(options.device);
    const cuda::DeviceLimits& limits = cuda::limits_of(device);
    text_ = {{"fusedmoe", version()},
             {"measured_by", measured_by_},
             {"device", device_name(device)},
             {"compute_capability", cuda::compute_capability(device) / 10.0},
             {"driver", cuda::driver_version()},
             {"multiprocessors", limits.multiprocessors},
             {"block_shared_bytes", limits.block_shared_bytes},
             {"multiprocessor_shared_bytes", limits.multiprocessor_shared_bytes},
             {"l2_bytes", limits.l2_bytes},
             {"cells", nlohmann::ordered_json::array()}};
  }

  /// The rows of one number of tokens, the heuristic's first, and the configuration they give.
  void add(const std::string& model, const std::string& code, TunedConfig tuned,
           const std::vector<BenchRow>& rows) {
    if (path_.empty()) return;
    nlohmann::ordered_json cell{{"model", model},
                                {"scheme", tuned.scheme},
                                {"code", code},
                                {"num_tokens", tuned.num_tokens},
                                {"floor_us", 1e3 * rows.front().floor_ms},
                                {"heuristic", rows.front().kernel_config},
                                {"tuned", tuned.config}};
    for (const BenchRow& row : rows) cell["times_us"][row.kernel_config] = 1e3 * row.median_ms;
    text_["cells"].push_back(std::move(cell));
    tuned.measured_by = measured_by_;
    configs_.set(std::move(tuned));
    save_tuned_configs(configs_, path_, text_.dump());
  }

 private:
  const std::string path_, measured_by_;
  nlohmann::ordered_json text_;
  TunedConfigs configs_;
};

void check_results(const std::string& what, const std::vector<BenchRow>& rows, double bound) {
  for (const BenchRow& row : rows) {
    if (row.relative_error <= bound) continue;
    throw Error::invalid(
        "tune", fmt::format("{}, {} tokens, {}: relative error {:.2e} against reference, more than "
                            "{:.1e}",
                            what, row.num_tokens, row.kernel_config, row.relative_error, bound));
  }
}

/// The key of the problem's configurations, but for the number of tokens.
TunedConfig key_of(const BenchOptions& options, const Selection& selection) {
  const bool batched =
      selection.prepare_finalize->activation_format() == ActivationFormat::kBatchedExperts;
  TunedConfig key;
  key.device = device_name(options.device);
  key.experts = selection.experts->name();
  key.scheme = name(options.scheme);
  key.hidden = options.model.experts_hidden();
  key.intermediate = options.model.intermediate;
  key.num_local_experts = options.model.router.num_experts;
  key.topk = batched ? 1 : options.model.router.topk;
  return key;
}

void check_has_kernel_configs(const Selection& selection) {
  const ModularKernel kernel = selection.create({});
  if (!kernel.experts().kernel_configs(ProblemSize::of(selection.config, 1)).empty()) return;
  throw Error::invalid("experts", fmt::format("tune needs a GPU: experts {} have no kernel "
                                              "configurations to choose from",
                                              selection.experts->name()));
}

void tune(const TuneOptions& options, const BenchSubject& subject, const std::string& path,
          TunedConfigs& configs, Report& report) {
  BenchOptions bench_options;
  bench_options.model = subject.model;
  bench_options.scheme =
      options.scheme.empty() ? subject.model.scheme : parse_scheme(options.scheme);
  bench_options.dtype = parse_float_dtype(options.dtype);
  bench_options.device = parse_device(options.device);
  bench_options.experts = options.experts;
  bench_options.tuned = false;
  bench_options.min_samples = options.min_samples;
  const double bound = testing::error_bound(bench_options.dtype, bench_options.scheme,
                                            bench_options.model.intermediate);
  const Selection selection = select(bench_options.config(), options.experts);
  check_has_kernel_configs(selection);
  const TunedConfig key = key_of(bench_options, selection);
  const std::string what = fmt::format("{} {} {}", subject.name, key.experts, key.scheme);
  const std::string code = selection.experts->supports(selection.config).text;

  std::unique_ptr<LayerBench> bench;
  {
    Progress progress("Packing " + what);
    bench = make_device_bench(bench_options, [&](std::int64_t done, std::int64_t total) {
      progress.update(done, total);
    });
  }
  for (const std::int64_t num_tokens : options.tokens) {
    const std::vector<BenchRow> rows = bench->run_kernel_configs(num_tokens);
    const BenchRow& tuned = print_rows(what, rows);
    check_results(what, rows, bound);
    TunedConfig config = key;
    config.num_tokens = num_tokens;
    config.config = tuned.kernel_config;
    config.time_us = 1e3 * tuned.median_ms;
    configs.set(config);
    save_tuned_configs(configs, path);  // what is measured is kept, whatever comes after
    report.add(subject.name, code, std::move(config), rows);
  }
}

void run(const TuneOptions& options) {
  check_experts_name(options.experts);
  const std::string path = options.output.empty() ? tuned_configs_path().string() : options.output;
  if (path.empty()) {
    throw Error::invalid("--output", "--output is required: there is no home directory");
  }
  if (options.report.empty() != options.measured_by.empty()) {
    throw Error::invalid("--report",
                         "--report and --measured-by need each other: a report says "
                         "who measured it");
  }
  namespace fs = std::filesystem;
  if (!options.report.empty() && fs::weakly_canonical(fs::absolute(options.report)) ==
                                     fs::weakly_canonical(fs::absolute(path))) {
    throw Error::invalid(
        "--report",
        fmt::format("--report {} is the file of --output: name another", options.report));
  }
  std::vector<std::string> outputs{path};
  if (!options.report.empty()) outputs.push_back(options.report);
  begin_outputs(outputs, options.force);
  TunedConfigs configs;
  if (std::filesystem::exists(path)) configs = load_tuned_configs(path);
  Report report(options);
  for (const BenchSubject& subject : options.subjects.get()) {
    tune(options, subject, path, configs, report);
  }
  log(Level::kInfo, fmt::format("{} configurations in {}", configs.all().size(), path));
}

}  // namespace

void add_tune(Program& program) {
  auto options = std::make_shared<TuneOptions>();
  for (std::int64_t tokens = 1; tokens <= 8192; tokens *= 2) options->tokens.push_back(tokens);
  Command command = program.add_command(
      "tune", "Measure the kernel configurations of a model's experts and keep the fastest");
  options->subjects.add_to(command);
  command.add_option("--scheme", options->scheme, "SCHEME",
                     "Of the experts; default: the published one of --model, bf16 for --shape");
  command
      .add_option("--tokens", options->tokens, "N",
                  "Numbers of tokens; default: powers of two up to 8192")
      .list()
      .between(std::int64_t{1}, std::int64_t{1} << 20);
  command.add_option("--experts", options->experts, "EXPERTS", "Implementation; default: the best");
  command.add_option("--device", options->device, "DEVICE", "The GPU").show_default();
  command.add_option("--dtype", options->dtype, "DTYPE", "Of the hidden states")
      .one_of({"bf16", "f16", "f32"})
      .show_default();
  command.add_option("--min-samples", options->min_samples, "N", "Samples for each configuration")
      .positive();
  command.add_option("--output", options->output, "PATH",
                     "File to add them to; default: the one that the library reads");
  command.add_option("--report", options->report, "PATH",
                     "File to write besides: the device and all times, to send to the project");
  command.add_option("--measured-by", options->measured_by, "NAME", "Who measures, for the report");
  add_force_option(command, options->force);
  command.example("fusedmoe tune --model gpt-oss-20b --tokens 1,64,1024");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
