// fusedmoe run: hidden states from a file through one MoE layer of a checkpoint, results to a file.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "commands.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/safetensors.h"
#include "fusedmoe/version.h"
#include "load.h"
#include "ranks.h"
#include "report.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

struct Options {
  std::string family, scheme;
  std::string checkpoint, input, output;
  std::string input_name = "hidden_states";
  std::string device = "cpu";
  std::string experts;
  std::string dtype = "bf16";
  std::int64_t layer = -1;
  int threads = 0;
  int repeat = 1;
  std::int64_t check_rows = 0;
  std::int64_t max_workspace_mib = 0;
  std::string plan, record_routing, replay_routing;
  bool hooks = false, monolithic = false, batch_invariant = false;
  bool load = false, load_chart = false, heat_map = false;
  bool json = false;
  RankOptionsOf ranks;
};

/// The hidden states of --input as `dtype`.
Tensor load_hidden_states(const Options& options, std::int64_t hidden, DType dtype) {
  const Tensor stored = load_tensor(options.input, options.input_name, hidden);
  Tensor x = Tensor::empty(stored.shape(), dtype);
  convert(stored, x);
  return x;
}

/// The layer, or the part of one rank; with --scheme its activations are quantized by other rules.
LayerWeights load_weights(const Options& options, const Checkpoint& checkpoint, std::int64_t index,
                          const ParallelConfig& parallel = {}) {
  LayerWeights weights = checkpoint.load_layer(index, parallel);
  if (options.scheme.empty()) return weights;
  const QuantScheme stored = weights.experts.scheme, wanted = parse_scheme(options.scheme);
  const auto is_static = [](const QuantScheme& scheme) {
    return scheme.activations && !scheme.activations->dynamic;
  };
  if (wanted.weights != stored.weights || wanted.down != stored.down || is_static(wanted) ||
      is_static(stored)) {
    throw Error("--scheme", options.scheme,
                fmt::format("a scheme that differs from {} in dynamic activations", name(stored)));
  }
  weights.experts.scheme = wanted;
  if (weights.shared_experts && weights.shared_experts->weights.scheme == stored) {
    weights.shared_experts->weights.scheme = wanted;
  }
  return weights;
}

/// Files that are written replace files of that name: none may be one that the program reads.
void check_output(const Options& options, const Checkpoint& checkpoint, const char* option,
                  const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const auto check_other = [&](const std::string& read, const char* what) {
    if (!read.empty() && fs::equivalent(path, read, ignored)) {
      throw Error(option, fmt::format("{}, {}", path, what), "another file");
    }
  };
  check_other(options.input, "the file of --input");
  check_other(options.replay_routing, "the file of --replay-routing");
  check_other(options.plan, "the file of --plan");
  for (const std::string& file : checkpoint.files()) check_other(file, "a file of the checkpoint");
  const fs::file_status status = fs::status(path, ignored);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw Error(option, fmt::format("{}, not a regular file", path), "a new or a regular file");
  }
}

void check_outputs(const Options& options, const Checkpoint& checkpoint) {
  check_output(options, checkpoint, "--output", options.output);
  if (options.record_routing.empty()) return;
  check_output(options, checkpoint, "--record-routing", options.record_routing);
  if (std::filesystem::path(options.record_routing).lexically_normal() ==
      std::filesystem::path(options.output).lexically_normal()) {
    throw Error("--record-routing", options.record_routing, "another file than --output");
  }
}

/// Everything a forward leaves behind, on the device of the layer until it is fetched.
struct Results {
  Tensor output;         // (num_tokens, hidden)
  Tensor router_logits;  // (num_tokens, num_experts) f32; undefined when the routing was replayed
  RecordedRouting routing;  // (num_tokens, topk)
  Tensor expert_load;       // (num_experts) i32; undefined when the routing was replayed
  bool replayed = false;
  LoadStatistics load;
  double shared_with_previous = 0;  // see shared_with_previous()
  std::vector<double> times_ms;
  std::string plan_line, experts, prepare_finalize;  // of the layer, or of rank 0's

  void describe(const MoeLayer& layer) {
    plan_line = layer.plan_line();
    experts = layer.selection().experts->name();
    prepare_finalize = layer.selection().prepare_finalize->name();
  }
  double median_ms() const {
    std::vector<double> sorted = times_ms;
    std::nth_element(sorted.begin(), sorted.begin() + sorted.size() / 2, sorted.end());
    return sorted[sorted.size() / 2];
  }
  /// Brings the tensors to host memory.
  void fetch() {
    for (Tensor* tensor :
         {&output, &router_logits, &routing.topk_ids, &routing.topk_weights, &expert_load}) {
      if (*tensor) *tensor = to_device(*tensor, {});
    }
  }
};

Results make_results(const Options& options, const MoeConfig& config, const Tensor& x) {
  const std::int64_t num_tokens = x.size(0);
  const Device device = config.device;
  Results results;
  results.output = Tensor::empty(x.shape(), x.dtype(), device);
  results.replayed = !options.replay_routing.empty();
  if (results.replayed) {
    results.routing = replay_routing(options.replay_routing, config.num_experts, config.topk);
    if (results.routing.topk_ids.size(0) != num_tokens) {
      throw Error("--replay-routing", fmt::format("{} rows", results.routing.topk_ids.size(0)),
                  fmt::format("{}, one for each row of --input", num_tokens));
    }
    results.routing = {to_device(results.routing.topk_ids, device),
                       to_device(results.routing.topk_weights, device)};
    return results;
  }
  results.expert_load = Tensor::empty({config.num_experts}, DType::kI32, device);
  results.router_logits = Tensor::empty({num_tokens, config.num_experts}, DType::kF32, device);
  results.routing = {Tensor::empty({num_tokens, config.topk}, DType::kI32, device),
                     Tensor::empty({num_tokens, config.topk}, DType::kF32, device)};
  return results;
}

void add_statistics(const MoeConfig& config, Results& results) {
  const Tensor& ids = results.routing.topk_ids;
  results.load = results.replayed ? load_statistics(ids, config.num_experts)
                                  : load_statistics(results.expert_load, ids.size(0), config.topk);
  results.shared_with_previous = shared_with_previous(ids, config.num_experts);
}

/// Tokens of the largest of so many groups.
std::int64_t most_tokens(std::int64_t total, std::int64_t groups) {
  return std::max<std::int64_t>(1, (total + groups - 1) / groups);
}

/// Room for what a router finds out.
Results make_part(const MoeConfig& config, const Tensor& x) {
  return make_results({}, config, x);
}

MoeLayer make_layer(const Options& options, const LayerWeights& weights, DType dtype,
                    const std::function<void(LayerOptions&)>& change);

Results forward(const Options& options, const MoeLayer& layer, const Tensor& hidden_states) {
  const Stream stream{layer.config().device};
  const Tensor x = to_device(hidden_states, stream.device);
  Results results = make_results(options, layer.config(), x);
  const std::size_t bytes = layer.workspace_bytes(x.size(0));
  const Tensor memory =
      Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, stream.device);
  const Workspace workspace{memory.data(), bytes};
  const Routing routing{results.routing.topk_ids, results.routing.topk_weights};
  const ForwardOptions wanted{.router_logits = results.router_logits,
                              .topk_ids = routing.topk_ids,
                              .topk_weights = routing.topk_weights,
                              .expert_load = results.expert_load};
  Progress progress("Running");
  for (int i = 0; i < options.repeat; ++i) {
    results.times_ms.push_back(time_ms([&] {
      if (results.replayed) {
        layer.forward_routed(x, routing, results.output, workspace);
      } else {
        layer.forward(x, results.output, workspace, wanted);
      }
      synchronize(stream);
    }));
    progress.update(i + 1, options.repeat);
  }
  results.fetch();
  results.describe(layer);
  add_statistics(layer.config(), results);
  return results;
}

/// Rows of a tensor that belong to a data-parallel group.
Tensor rows_of_group(const Tensor& all, std::int64_t group, std::int64_t groups) {
  const std::int64_t total = all.size(0);
  return {all.slice(0, total * group / groups, total * (group + 1) / groups), all.owner()};
}

/// Brings the results of all data-parallel groups, each from its first rank, to rank 0: there
/// `whole` has room for them.
void gather_results(Communicator& communicator, const ParallelConfig& parallel, const Results& mine,
                    const Results& whole) {
  const auto members = [](const Results& results) {
    return std::array{results.output, results.router_logits, results.routing.topk_ids,
                      results.routing.topk_weights};
  };
  const auto add = [](std::vector<Message>& list, int peer, const Tensor& rows) {
    list.push_back({peer, rows.data(), static_cast<std::size_t>(rows.nbytes())});
  };
  std::vector<Message> sends, receives;
  const int rank = communicator.rank();
  if (rank > 0 && rank % parallel.group_size() == 0) {
    for (const Tensor& rows : members(mine)) add(sends, 0, rows);
  }
  for (int group = 0; rank == 0 && group < parallel.dp_size; ++group) {
    for (std::size_t i = 0; i < members(mine).size(); ++i) {
      const Tensor rows = rows_of_group(members(whole)[i], group, parallel.dp_size);
      if (group > 0) add(receives, group * parallel.group_size(), rows);
      if (group == 0) copy(members(mine)[i], rows, Stream{communicator.device()});
    }
  }
  const Stream stream{communicator.device()};
  communicator.exchange(sends, receives, stream, "results");
  synchronize(stream);
  communicator.check();
}

/// This rank's part of the work. On rank 0 the results of all.
Results forward_on_rank(const Options& options, const MoeLayer& layer, const Tensor& all,
                        Communicator& communicator, const ParallelConfig& parallel) {
  const Stream stream{communicator.device()};
  const std::int64_t groups = parallel.dp_size;
  const std::int64_t group = parallel.rank() / parallel.group_size();
  const Tensor x = to_device(rows_of_group(all, group, groups), stream.device);
  Results mine = make_part(layer.config(), x);
  const std::size_t bytes = layer.workspace_bytes(most_tokens(all.size(0), groups));
  const Tensor memory =
      Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, stream.device);
  for (int i = 0; i < options.repeat; ++i) {
    mine.times_ms.push_back(time_ms([&] {
      layer.forward(x, mine.output, {memory.data(), bytes},
                    {.router_logits = mine.router_logits,
                     .topk_ids = mine.routing.topk_ids,
                     .topk_weights = mine.routing.topk_weights});
      synchronize(stream);
    }));
  }
  Results whole;
  if (parallel.rank() == 0) {
    whole = make_part(layer.config(), all);
    whole.describe(layer);
    whole.times_ms = mine.times_ms;
  }
  gather_results(communicator, parallel, mine, whole);
  if (parallel.rank() > 0) return whole;
  whole.expert_load = {};
  whole.replayed = true;  // the load comes from the ids of all ranks
  whole.fetch();
  add_statistics(layer.config(), whole);
  return whole;
}

/// The layer on ranks, each of which loads what it holds. Nothing where rank 0 is another process.
Results forward_on_ranks(const Options& options, const Checkpoint& checkpoint, std::int64_t index,
                         const Tensor& x) {
  Results results;
  run_on_ranks(
      options.ranks.num_ranks(), options.device, [&](const std::shared_ptr<Communicator>& rank) {
        const auto parallel = ParallelConfig::of(options.ranks.deployment(rank->rank()));
        const LayerWeights weights = load_weights(options, checkpoint, index, parallel);
        const MoeLayer layer = make_layer(options, weights, x.dtype(), [&](LayerOptions& of_rank) {
          of_rank.device = rank->device();
          of_rank.parallel = parallel;
          of_rank.ranks.communicator = rank;
          of_rank.ranks.max_tokens_per_rank = most_tokens(x.size(0), parallel.dp_size);
          of_rank.num_threads = threads_of_rank(*rank);
        });
        Results mine = forward_on_rank(options, layer, x, *rank, parallel);
        if (rank->rank() == 0) results = std::move(mine);
      });
  return results;
}

void print_text(const Options& options, const Results& results, const RowCheck* check) {
  const std::int64_t num_tokens = results.output.size(0);
  std::string time = fmt::format("{:.2f} ms", results.median_ms());
  if (results.times_ms.size() > 1) {
    time += fmt::format(" (median of {})", results.times_ms.size());
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

void print_json(const Options&, const Results& results, const RowCheck* check) {
  nlohmann::json object{{"plan", results.plan_line},
                        {"experts", results.experts},
                        {"prepare_finalize", results.prepare_finalize},
                        {"num_tokens", results.output.size(0)},
                        {"ms", results.median_ms()},
                        {"times_ms", results.times_ms},
                        {"load", nlohmann::json::parse(load_json(results.load))}};
  object["load"]["shared_with_previous"] = results.shared_with_previous;
  if (check) {
    object["check"] = {{"rows", check->rows},
                       {"max_norm_relative", check->difference.max_norm_relative},
                       {"tolerance", check->tolerance},
                       {"passed", check->passed()}};
  }
  fmt::print("{}\n", object.dump());
}

void save(const Options& options, std::int64_t num_experts, const Results& results) {
  std::map<std::string, TensorView> tensors{{"output", results.output},
                                            {"topk_ids", results.routing.topk_ids},
                                            {"topk_weights", results.routing.topk_weights}};
  if (results.router_logits) tensors["router_logits"] = results.router_logits;
  save_safetensors(options.output, tensors,
                   {{"fusedmoe_version", FUSEDMOE_VERSION}, {"plan", results.plan_line}});
  log(Level::kInfo, fmt::format("wrote {}", options.output));
  if (options.record_routing.empty()) return;
  record_routing(options.record_routing, results.routing, num_experts);
  log(Level::kInfo, fmt::format("wrote {}", options.record_routing));
}

MoeLayer make_layer(const Options& options, const LayerWeights& weights, DType dtype,
                    const std::function<void(LayerOptions&)>& change) {
  Progress progress("Packing weights");
  LayerOptions layer;
  layer.device = parse_device(options.device);
  layer.dtype = dtype;
  layer.require = options.experts;
  layer.hooks = options.hooks;
  layer.monolithic = options.monolithic;
  layer.batch_invariant = options.batch_invariant;
  layer.max_workspace_bytes = static_cast<std::size_t>(options.max_workspace_mib) << 20;
  if (!options.plan.empty()) layer.plan = read_text(options.plan);
  layer.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  if (change) change(layer);
  return {weights, layer};
}

void run(const Options& options) {
  const DType dtype = parse_float_dtype(options.dtype);
  parse_device(options.device);
  check_experts_name(options.experts);
  set_num_threads(options.threads);
  const Checkpoint checkpoint = open_checkpoint(options.checkpoint, options.family);
  check_outputs(options, checkpoint);
  const std::vector<std::int64_t> layers = checkpoint.moe_layers();
  if (layers.empty()) throw Error(options.checkpoint, "without MoE layers", "at least one");
  const std::int64_t index = options.layer < 0 ? layers.front() : options.layer;
  const ModelConfig& model = checkpoint.config();
  const Tensor x = load_hidden_states(options, model.hidden, dtype);
  LayerWeights weights;
  Results results;
  if (options.ranks.num_ranks() > 1) {
    if (!options.replay_routing.empty()) {
      throw Error("--replay-routing", "given with ranks", "given without --ep, --tp and --dp");
    }
    results = forward_on_ranks(options, checkpoint, index, x);
    if (!results.output) return;  // rank 0, another process, has them
  } else {
    weights = load_weights(options, checkpoint, index);
    results = forward(options, make_layer(options, weights, dtype, {}), x);
  }

  RowCheck check;
  if (options.check_rows > 0) {
    if (weights.experts.experts.empty()) weights = load_weights(options, checkpoint, index);
    check = check_rows(weights, x, results.output,
                       {results.routing.topk_ids, results.routing.topk_weights}, results.replayed,
                       options.check_rows);
    if (!check.passed()) throw Error("output", check.text(), "within the tolerance");
  }
  save(options, model.router.num_experts, results);
  const RowCheck* shown = options.check_rows > 0 ? &check : nullptr;
  (options.json ? print_json : print_text)(options, results, shown);
}

}  // namespace

void add_run(Command& program) {
  auto options = std::make_shared<Options>();
  Command command = program.add_command(
      "run", "Run hidden states through one MoE layer of a checkpoint and write the output");
  command
      .add_option("--checkpoint", options->checkpoint,
                  "Directory (config.json + *.safetensors) or one safetensors file")
      .required();
  add_family_option(command, options->family);
  command.add_option("--scheme", options->scheme,
                     "Quantize activations by other rules (mxfp4:ocp, mxfp4:even); default: as "
                     "published");
  command.add_option("--layer", options->layer, "Layer index; default: the first MoE layer")
      .not_negative();
  command.add_option("--input", options->input, "Safetensors file with the hidden states")
      .required();
  command.add_option("--input-name", options->input_name, "Name of the tensor in it")
      .show_default();
  command
      .add_option("--output", options->output,
                  "Safetensors file to write: output, topk_ids, topk_weights, router_logits")
      .required();
  command.add_option("--device", options->device, "cpu, cuda or cuda:<index>").show_default();
  const Option experts =
      command.add_option("--experts", options->experts,
                         "Implementation that must run (see explain); default: the best");
  command.add_flag("--hooks", options->hooks, "Only experts that have injection points");
  command.add_flag("--monolithic", options->monolithic, "The experts route by themselves");
  command.add_flag("--batch-invariant", options->batch_invariant,
                   "Only experts whose rows do not depend on their batch");
  command.add_option("--dtype", options->dtype, "Of hidden states and output: bf16, f32 or f16")
      .show_default();
  options->ranks.add_to(command);
  command.add_option("--threads", options->threads, "CPU threads; default: all")
      .between(1, kMaxThreads);
  command
      .add_option("--max-workspace", options->max_workspace_mib,
                  "Most MiB of scratch memory: longer inputs run in chunks of tokens")
      .between(1, 1 << 30);
  command.add_option("--repeat", options->repeat, "Run so many times and print the median time")
      .positive();
  command
      .add_option("--check", options->check_rows,
                  "Compare so many rows with the reference implementation; fail on excess")
      .positive();
  command.add_option("--plan", options->plan, "Pin the plan that explain --save-plan wrote")
      .excludes(experts);
  command.add_option("--record-routing", options->record_routing,
                     "Safetensors file to write: topk_ids, topk_weights");
  command.add_option("--replay-routing", options->replay_routing,
                     "Take ids and weights from such a file instead of the router");
  command.add_flag("--load", options->load, "Print the load of the experts as a table");
  command.add_flag("--load-chart", options->load_chart, "Print the tokens per expert as bars");
  command.add_flag("--heat-map", options->heat_map, "Print the tokens per expert as shades");
  command.add_flag("--json", options->json, "Print one JSON object instead of text");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
