// fusedmoe run: hidden states from a file through one MoE layer of a checkpoint, results to a file.
#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "commands.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/safetensors.h"
#include "fusedmoe/version.h"
#include "outputs.h"
#include "run/row_check.h"
#include "run/run.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

/// The same for every spelling of a file, also of one that is not there yet.
std::filesystem::path place_of(const std::string& path) {
  std::error_code unknown;
  const std::filesystem::path place = std::filesystem::absolute(path, unknown);
  return std::filesystem::weakly_canonical(place, unknown);
}

void check_outputs(const RunOptions& options, const Checkpoint& checkpoint) {
  namespace fs = std::filesystem;
  std::vector<FileRead> read = files_of(checkpoint);
  read.push_back({options.family, "the file of --family"});
  read.push_back({options.input.path, "the file of --input"});
  read.push_back({options.replay_routing, "the file of --replay-routing"});
  read.push_back({options.plan, "the file of --plan"});
  for (const auto& [option, path] : {std::pair{"--output", options.output},
                                     std::pair{"--record-routing", options.record_routing}}) {
    if (path.empty()) continue;
    check_output(option, path, read);
    std::error_code unknown;
    const fs::file_status status = fs::status(path, unknown);
    if (fs::exists(status) && !fs::is_regular_file(status)) {
      throw Error::invalid(option, fmt::format("{} {} is not a regular file", option, path));
    }
  }
  if (options.output.empty() || options.record_routing.empty()) return;
  if (place_of(options.record_routing) == place_of(options.output)) {
    throw Error::invalid("--record-routing",
                         fmt::format("--record-routing {} is the file of --output: name another",
                                     options.record_routing));
  }
}

void print_text(const RunOptions& options, const RunResults& results, const RowCheck* check) {
  const std::int64_t num_tokens = results.output.size(0);
  std::string time = fmt::format("first (cold) {:.2f} ms", results.times_ms.front());
  if (const auto warm = results.warm_ms()) {
    time += fmt::format(", then {:.2f} ms", *warm);
    if (options.repeat > 1) time += fmt::format(" (median of {})", options.repeat);
  }
  fmt::print("{}  tokens={}  {}\n", results.plan_line, num_tokens, time);
  if (options.load) {
    fmt::print("{}a token shares {:.2f} of its {} experts with the token before\n",
               load_table(results.load), results.shared_with_previous, results.load.topk);
  }
  if (options.load_chart) fmt::print("{}", load_chart(results.load));
  if (options.heat_map) fmt::print("{}", load_heat_map(results.load));
  if (check) fmt::print("{}\n", check->text());
}

void print_json(const RunOptions&, const RunResults& results, const RowCheck* check) {
  nlohmann::json object{{"plan", results.plan_line},
                        {"experts", results.experts},
                        {"prepare_finalize", results.prepare_finalize},
                        {"num_tokens", results.output.size(0)},
                        {"cold_ms", results.times_ms.front()},
                        {"times_ms", results.times_ms},
                        {"load", nlohmann::json::parse(load_json(results.load))}};
  if (const auto warm = results.warm_ms()) object["warm_ms"] = *warm;
  object["load"]["shared_with_previous"] = results.shared_with_previous;
  if (check) {
    object["check"] = {{"rows", check->rows},
                       {"max_norm_relative", check->difference.max_norm_relative},
                       {"tolerance", check->tolerance},
                       {"rows_within_codes", check->rows_within_codes},
                       {"tolerance_with_codes", check->tolerance_with_codes},
                       {"passed", check->passed()}};
  }
  fmt::print("{}\n", object.dump());
}

void save_output(const RunOptions& options, const RunResults& results) {
  std::map<std::string, TensorView> tensors{{"output", results.output},
                                            {"topk_ids", results.routing.topk_ids},
                                            {"topk_weights", results.routing.topk_weights}};
  if (results.router_logits) tensors["router_logits"] = results.router_logits;
  save_safetensors(options.output, tensors,
                   {{"fusedmoe_version", FUSEDMOE_VERSION}, {"plan", results.plan_line}});
  log(Level::kInfo, fmt::format("wrote {}", options.output));
}

void save(const RunOptions& options, std::int64_t num_choices, const RunResults& results) {
  if (!options.output.empty()) save_output(options, results);
  if (options.record_routing.empty()) return;
  record_routing(options.record_routing, results.routing, num_choices);
  log(Level::kInfo, fmt::format("wrote {}", options.record_routing));
}

void run(const RunOptions& options) {
  begin_outputs({options.output, options.record_routing}, options.force);
  const DType dtype = parse_float_dtype(options.dtype);
  parse_device(options.device);
  check_experts_name(options.experts);
  options.ranks.dispatched();  // an Error if it is wrong, or given without ranks
  options.ranks.peer_memory();
  set_num_threads(options.threads);
  const Checkpoint checkpoint = open_checkpoint(options.checkpoint, options.family);
  check_outputs(options, checkpoint);
  const std::vector<std::int64_t> layers = moe_layers_of(checkpoint, options.checkpoint);
  const std::int64_t index = chosen_layer(options.layer, layers);
  const ModelConfig model = checkpoint.config(index);
  const Tensor x = options.input.load(model.hidden, dtype);
  LayerWeights weights;
  RunResults results;
  if (options.ranks.num_ranks() > 1) {
    if (!options.replay_routing.empty()) {
      throw Error::conflict("--replay-routing", "--ep, --tp and --dp");
    }
    results = forward_on_ranks(options, checkpoint, index, x);
    if (!results.output) return;  // rank 0, another process, has them
  } else {
    weights = load_weights(options, checkpoint, index);
    warn_of_uncalibrated(checkpoint, index);
    results = forward(options, weights, x);
  }

  RowCheck check;
  if (options.check_rows > 0) {
    if (weights.experts.experts.empty()) weights = load_weights(options, checkpoint, index);
    check = check_rows(weights, x, results.output,
                       {.count = options.check_rows,
                        .routing = {results.routing.topk_ids, results.routing.topk_weights},
                        .replayed = results.replayed,
                        .hooks = options.hooks,
                        .parallel = ParallelConfig::of(options.ranks.deployment(0))});
    if (!check.passed()) throw std::runtime_error("--check: " + check.text());
  }
  save(options, model.router.num_choices(), results);
  const RowCheck* shown = options.check_rows > 0 ? &check : nullptr;
  (options.json ? print_json : print_text)(options, results, shown);
}

}  // namespace

void add_run(Program& program) {
  auto options = std::make_shared<RunOptions>();
  Command command =
      program.add_command("run", "Run hidden states through one MoE layer of a checkpoint");
  command
      .add_option("--checkpoint", options->checkpoint, "PATH",
                  "Directory (config.json + *.safetensors) or one safetensors file")
      .required();
  add_family_option(command, options->family);
  command.add_option("--scheme", options->scheme, "SCHEME",
                     "Quantize activations by other rules (mxfp4:ocp, mxfp4:even); default: as "
                     "published");
  add_layer_option(command, options->layer);
  const Option input = options->input.add_to(command, 0);
  command.add_option("--seed", options->input.seed, "N", "Seed of the random hidden states")
      .show_default()
      .excludes(input);
  command.add_option("--output", options->output, "PATH",
                     "Safetensors file to write: output, topk_ids, topk_weights, router_logits");
  command.add_option("--device", options->device, "DEVICE", "Where it runs").show_default();
  const Option experts =
      command.add_option("--experts", options->experts, "EXPERTS",
                         "Implementation that must run (see explain); default: the best");
  command.add_flag("--hooks", options->hooks,
                   "Only experts that can call hooks between their steps");
  const Option monolithic =
      command.add_flag("--monolithic", options->monolithic,
                       "Only experts that choose each token's experts themselves, without a router "
                       "before them");
  command.add_flag("--batch-invariant", options->batch_invariant,
                   "Only experts whose rows do not depend on their batch");
  command.add_option("--dtype", options->dtype, "DTYPE", "Of hidden states and output")
      .one_of({"bf16", "f16", "f32"})
      .show_default();
  options->ranks.add_to(command);
  options->ranks.add_no_peer_memory(command);
  command.add_option("--threads", options->threads, "N", "CPU threads; default: all")
      .between(1, kMaxThreads);
  command
      .add_option("--max-workspace", options->max_workspace_mib, "MIB",
                  "Most MiB of scratch memory: longer inputs run in chunks of tokens")
      .between(1, 1 << 30);
  command
      .add_option("--repeat", options->repeat, "N",
                  "Warm forwards after the first one, of which the median time is printed")
      .between(0, 1 << 20)
      .show_default();
  command
      .add_option("--check", options->check_rows, "N",
                  "Compare so many rows with the reference implementation; fail on excess")
      .positive();
  command.add_option("--plan", options->plan, "PATH", "Pin the plan that explain --save-plan wrote")
      .excludes(experts);
  command.add_option("--record-routing", options->record_routing, "PATH",
                     "Safetensors file to write: topk_ids, topk_weights");
  command
      .add_option("--replay-routing", options->replay_routing, "PATH",
                  "Take ids and weights from such a file instead of the router")
      .excludes(monolithic);
  command.add_flag("--load", options->load, "Print the load of the experts as a table");
  const Option chart =
      command.add_flag("--load-chart", options->load_chart, "Print the tokens per expert as bars");
  const Option heat_map =
      command.add_flag("--heat-map", options->heat_map, "Print the tokens per expert as shades");
  add_force_option(command, options->force);
  command.add_flag("--json", options->json, "Print one JSON object instead of text")
      .excludes(chart)
      .excludes(heat_map);
  command.example("fusedmoe run --checkpoint gpt-oss-20b --tokens 64 --check 4");
  command.example(
      "fusedmoe run --checkpoint gpt-oss-20b --input x.safetensors --output y.safetensors");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
