// fusedmoe explain: every implementation, whether it can serve a model, and the one that would run.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/problems.h"
#include "commands.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/simulation.h"
#include "layer/row_choice.h"
#include "outputs.h"
#include "ranks.h"
#include "sources.h"
#include "support.h"
#include "testing/support_matrix.h"

namespace fusedmoe::cli {
namespace {

struct ExplainOptions {
  LayerSource source;
  std::string device;  // empty: cpu, or with a compute capability cuda
  std::string dtype = "bf16";
  std::int64_t num_tokens = 64;
  std::string compute_capability;  // empty: that of the device
  std::string scheme, experts, save_plan;
  bool hooks = false, monolithic = false, batch_invariant = false;
  bool json = false, matrix = false;
  RankOptionsOf ranks;
  std::string combine;  // empty: as a layer chooses
};

/// What the instances say.
struct Resources {
  std::int64_t packed_bytes = 0;
  std::size_t workspace_bytes = 0;  // scratch of one forward beside weights, input and output
  std::string kernel_config;        // empty where the experts have only one

  Resources(const Selection& selection, std::int64_t num_tokens)
      : packed_bytes(selection.packed_bytes()) {
    const ModularKernel kernel = selection.create(make_context());
    workspace_bytes = kernel.workspace_bytes(num_tokens);
    const ProblemSize size = ProblemSize::of(kernel.experts().config(), num_tokens);
    const auto configs = kernel.experts().kernel_configs(kernel.sizes(size).transport.experts);
    if (!configs.empty()) kernel_config = configs.front();
  }
};

/// What rank 0, which has the most, holds of the layer.
void place_on_ranks(const ExplainOptions& options, MoeConfig& config) {
  if (options.ranks.num_ranks() == 1) return;
  config.parallel = ParallelConfig::of(options.ranks.deployment(0));
  const ParallelConfig& parallel = config.parallel;
  if (parallel.tp_size > 1) {
    config.intermediate =
        slice_of(config.intermediate, slice_unit(config.scheme), parallel.tp_size, 0).size();
  }
  if (parallel.ep_size == 1) return;
  const auto placement = ExpertPlacement::linear(config.num_experts, parallel.ep_size);
  config.num_local_experts = static_cast<std::int64_t>(placement.local_experts(0).size());
  config.has_expert_map = true;
}

constexpr int kHopper = 90;

/// "9.0" as 90.
int parse_compute_capability(const std::string& text) {
  int major = 0, minor = 0;
  const char* const end = text.data() + text.size();
  const auto [point, error] = std::from_chars(text.data(), end, major);
  const bool right = error == std::errc() && major > 0 && major < 100 && end - point == 2 &&
                     *point == '.' && std::from_chars(point + 1, end, minor).ptr == end;
  if (right) return 10 * major + minor;
  throw Error("--compute-capability", text, "a compute capability, as 9.0");
}

MoeConfig make_config(const ExplainOptions& options, const ModelConfig& model) {
  const bool named = !options.compute_capability.empty();
  const Device device = parse_device(!options.device.empty() ? options.device
                                     : named                 ? "cuda"
                                                             : "cpu");
  if (named && device.is_cpu()) {
    throw Error::conflict("--compute-capability", "--device cpu", "a GPU has one");
  }
  MoeConfig config = moe_config(model, parse_float_dtype(options.dtype), device);
  if (named) {
    config.compute_capability = parse_compute_capability(options.compute_capability);
  } else if (const std::string problem = device_problem(device); !problem.empty()) {
    // Who asks about `cuda` where there is no GPU asks about the one that the kernels are for.
    if (cuda_device_count() > 0 || device.index > 0) {
      throw Error::unsupported(Reason::kDevice, "--device",
                               fmt::format("{}: {}", to_string(device), problem));
    }
    config.compute_capability = kHopper;
    fmt::print(stderr, "{}: {}; this is for compute capability {:.1f}\n", to_string(device),
               problem, kHopper / 10.0);
  }
  if (!options.scheme.empty()) config.scheme = parse_scheme(options.scheme);
  config.hooks = options.hooks;
  config.monolithic = options.monolithic;
  config.batch_invariant = options.batch_invariant;
  config.dispatch_dtype = options.ranks.dispatched();
  place_on_ranks(options, config);
  if (!options.combine.empty()) {
    config.combine = parse_combine_mode(options.combine);
  } else if (config.batch_invariant && config.parallel.needs_dispatch()) {
    config.combine = CombineMode::kPerSlot;
  }
  return config;
}

/// Layers whose experts have one scheme, and so have the shared ones.
struct LayerGroup {
  std::vector<std::int64_t> layers;  // of a checkpoint
  ModelConfig model;                 // of the first of them
  std::optional<QuantScheme> shared_experts{};

  /// "layers {0-2,5}"
  std::string name() const {
    return fmt::format("{} {}", layers.size() == 1 ? "layer" : "layers",
                       checkpoint::number_ranges(layers));
  }
};

/// How rows may travel between ranks on GPUs of one host, and how long for as many tokens.
class RowTimes {
 public:
  RowTimes(const ExplainOptions& options, const Selection& selection)
      : tokens_(options.num_tokens) {
    const MoeConfig& config = selection.config;
    const PrepareFinalizeDescriptor* const transport = selection.prepare_finalize;
    const bool gathers = transport == &allgather_reducescatter();
    if (config.device.is_cpu() || (transport != &all2all() && !gathers)) return;
    const auto messages = gathers ? RowPath::kAllgather : RowPath::kAll2all;
    RankOptions ranks;
    ranks.max_tokens_per_rank = tokens_;
    if (!options.combine.empty()) ranks.combine = config.combine;
    if (!layer::without_peer_memory(config, ranks, messages).empty()) return;
    const auto placement = ExpertPlacement::linear(config.num_experts, config.parallel.ep_size);
    chosen_ = layer::choose_rows(rank_costs(), config, ranks, placement, messages);
    const auto add = [&](RowPath path, CombineMode combine) {
      rows_.push_back(
          layer::predict_rows(rank_costs(), config, ranks, placement, path, combine, tokens_));
    };
    if (selection.experts->reads_row_sources()) {
      saved_us_ = layer::saved_beside_experts(rank_costs(), config, ranks, placement, tokens_);
      beside_ = layer::least_beside_experts(rank_costs(), config, ranks, placement) > 0;
    }
    add(RowPath::kPeerMemory, CombineMode::kPerRank);
    add(RowPath::kPeerMemory, CombineMode::kPerSlot);
    add(messages, CombineMode::kPerRank);
  }

  void print() const {
    if (rows_.empty()) return;
    fmt::print("\nrows of {} tokens a rank on GPUs of one host, as predicted:\n", tokens_);
    for (const layer::PredictedRows& each : rows_) {
      fmt::print("{:1} {:<24} {:<8} dispatch {:.1f} us{}, combine {:.1f} us\n",
                 is_chosen(each) ? "*" : "", name(each.path), name(each.combine), each.dispatch_us,
                 each.quantize_us > 0
                     ? fmt::format(" (rows quantized in {:.1f} us)", each.quantize_us)
                     : "",
                 each.combine_us);
    }
    if (saved_us_) {
      fmt::print("peer_memory, per_rank: rows come {} the experts (beside them {:.1f} us {})\n",
                 beside_ ? "beside" : "before", std::abs(*saved_us_),
                 *saved_us_ < 0 ? "more" : "less");
    }
    const std::string& peers = rank_costs().peer_memory.dispatch.source;
    const std::string& messages = rank_costs().of(rows_.back().path).dispatch.source;
    fmt::print("({})\n", peers == messages ? peers : fmt::format("{}; {}", peers, messages));
  }
  nlohmann::json json() const {
    nlohmann::json list = nlohmann::json::array();
    for (const layer::PredictedRows& each : rows_) {
      list.push_back({{"path", name(each.path)},
                      {"combine", name(each.combine)},
                      {"dispatch_us", each.dispatch_us},
                      {"quantized", each.quantize_us > 0},
                      {"quantize_us", each.quantize_us},
                      {"combine_us", each.combine_us},
                      {"chosen", is_chosen(each)}});
    }
    if (saved_us_) {
      list[0]["beside_experts"] = beside_;
      list[0]["saved_beside_experts_us"] = *saved_us_;
    }
    return list;
  }

 private:
  bool is_chosen(const layer::PredictedRows& rows) const {
    const bool by_peers = tokens_ <= chosen_.peer_tokens;
    return rows.combine == chosen_.combine && by_peers == (rows.path == RowPath::kPeerMemory);
  }

  const std::int64_t tokens_;
  layer::RowChoice chosen_;
  std::optional<double> saved_us_;  // if rows through peer memory come beside the experts
  bool beside_ = false;             // whether they do
  std::vector<layer::PredictedRows> rows_;
};

/// With the shared experts that a layer of the model would have besides.
std::string plan_json(const ExplainOptions& options, const LayerGroup& group,
                      const Selection& selection) {
  const ModelConfig& model = group.model;
  Plan plan = selection.plan();
  if (model.shared_intermediate > 0) {
    MoeConfig shared = selection.config;
    if (group.shared_experts) shared.scheme = *group.shared_experts;
    shared.num_experts = shared.num_local_experts = shared.topk = 1;
    shared.hidden = model.hidden;
    shared.intermediate = model.shared_intermediate;
    shared.activation = model.shared_activation;
    shared.activation_params = model.shared_activation_params;
    shared.routing_method = RoutingMethod::kNone;
    shared.apply_router_weight_on_input = shared.hooks = shared.monolithic = shared.has_bias =
        false;
    shared.activation_format = ActivationFormat::kStandard;
    shared.dispatch_dtype.reset();
    const Selection chosen = select(
        shared, options.experts.empty() ? "" : fmt::format("{}+no_ep", selection.experts->name()));
    plan.shared_experts = chosen.pair();
    plan.shared_scheme = name(shared.scheme);
  }
  return plan.json() + "\n";
}

void print_json(const ExplainOptions& options, const LayerGroup& group, const Selection& selection,
                const std::optional<Resources>& resources) {
  const MoeConfig& config = selection.config;
  nlohmann::json object{{"family", name(group.model.family)},
                        {"scheme", name(config.scheme)},
                        {"dtype", name(config.dtype)},
                        {"device", to_string(config.device)},
                        {"num_tokens", options.num_tokens},
                        {"candidates", nlohmann::json::parse(selection.json())}};
  if (!group.layers.empty()) object["layers"] = group.layers;
  if (config.compute_capability) object["compute_capability"] = *config.compute_capability / 10.0;
  if (resources) {
    object["packed_bytes"] = resources->packed_bytes;
    object["workspace_bytes"] = resources->workspace_bytes;
    object["kernel_config"] = resources->kernel_config;
  }
  const nlohmann::json rows = RowTimes(options, selection).json();
  if (!rows.empty()) object["rows"] = rows;
  fmt::print("{}\n", object.dump());
}

void print_text(const ExplainOptions& options, const LayerGroup& group, const Selection& selection,
                const std::optional<Resources>& resources) {
  const MoeConfig& config = selection.config;
  if (!group.layers.empty()) fmt::print("{}\n", group.name());
  const ParallelConfig& parallel = config.parallel;
  if (parallel.num_ranks() > 1) {
    fmt::print("{} ranks: tp {}, dp {}, ep {}; rank 0 has {} experts of {} x {}; {}\n",
               parallel.num_ranks(), parallel.tp_size, parallel.dp_size, parallel.ep_size,
               config.num_local_experts, config.hidden, config.intermediate, name(config.combine));
  }
  fmt::print("{}: {} experts, top-{}, {} x {}, {}, {}, {} on {}{}\n\n{}", name(group.model.family),
             config.num_experts, config.topk, config.hidden, config.intermediate,
             name(config.scheme), name(config.activation), name(config.dtype),
             to_string(config.device),
             config.compute_capability
                 ? fmt::format(" of compute capability {:.1f}", *config.compute_capability / 10.0)
                 : "",
             selection.table());
  RowTimes(options, selection).print();
  if (!resources) return;
  fmt::print("\npacked weights: {}\n", format_bytes(resources->packed_bytes));
  fmt::print("workspace for {} tokens: {}\n", options.num_tokens,
             format_bytes(static_cast<std::int64_t>(resources->workspace_bytes)));
  if (!resources->kernel_config.empty()) {
    fmt::print("kernel configuration for {} tokens: {}\n", options.num_tokens,
               resources->kernel_config);
  }
}

/// Of the layers of a checkpoint, all of which must pass the checks of loading, or of one of them.
std::vector<LayerGroup> group_layers(const ExplainOptions& options) {
  const LayerSource& source = options.source;
  const Checkpoint checkpoint = open_checkpoint(source.checkpoint, source.family);
  std::vector<FileRead> read = files_of(checkpoint);
  read.push_back({source.family, "the file of --family"});
  check_output("--save-plan", options.save_plan, read);
  const std::vector<std::int64_t> layers = moe_layers_of(checkpoint, source.checkpoint);
  chosen_layer(source.layer, layers);  // an Error if it is not there
  std::vector<LayerGroup> groups;
  for (const std::int64_t layer : layers) {
    const Checkpoint::LayerSchemes schemes = checkpoint.check_layer(layer);
    if (source.layer >= 0 && layer != source.layer) continue;
    const QuantScheme scheme =
        options.scheme.empty() ? schemes.experts : parse_scheme(options.scheme);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const LayerGroup& each) {
      return each.model.scheme == scheme && each.shared_experts == schemes.shared_experts;
    });
    if (group == groups.end()) {
      group = groups.insert(group, {{}, checkpoint.config(layer), schemes.shared_experts});
      group->model.scheme = scheme;
    }
    group->layers.push_back(layer);
  }
  return groups;
}

/// Prints what would run the layers. False: nothing does.
bool explain_group(const ExplainOptions& options, const LayerGroup& group) {
  const MoeConfig config = make_config(options, group.model);
  const Selection selection =
      options.experts.empty() ? explain(config) : select(config, options.experts);
  if (selection && !options.save_plan.empty()) {
    write_text(options.save_plan, plan_json(options, group, selection));
  }
  std::optional<Resources> resources;
  const bool alone = config.parallel.num_ranks() == 1;  // else it takes a communicator
  if (selection && alone) resources.emplace(selection, options.num_tokens);
  (options.json ? print_json : print_text)(options, group, selection, resources);
  return static_cast<bool>(selection);
}

void run(const ExplainOptions& options) {
  if (options.matrix) {
    fmt::print("{}", testing::support_matrix_markdown());
    return;
  }
  check_experts_name(options.experts);
  const std::vector<LayerGroup> groups =
      options.source.model.empty()
          ? group_layers(options)
          : std::vector<LayerGroup>{{{}, parse_model_config(model_preset(options.source.model))}};
  if (groups.size() > 1 && !options.save_plan.empty()) {
    throw Error::invalid("--save-plan",
                         "--save-plan needs --layer, as the layers of this checkpoint have "
                         "different schemes: fusedmoe inspect lists them");
  }
  std::string refused;
  for (const LayerGroup& group : groups) {
    if (&group != &groups.front() && !options.json) fmt::print("\n");
    if (explain_group(options, group)) continue;
    refused += (refused.empty() ? "" : " and ") +
               (groups.size() == 1 ? std::string("this model") : group.name());
  }
  if (refused.empty()) return;
  throw Error::unsupported(Reason::kModel, "model",
                           fmt::format("nothing here runs {}: the rows above say why", refused));
}

}  // namespace

void add_explain(Program& program) {
  auto options = std::make_shared<ExplainOptions>();
  Command command = program.add_command(
      "explain", "Show which implementation would run a model, and why not the others");
  Command source =
      options->source.add_to(command, "A model by name",
                             "Layer of the checkpoint; default: all, those of one scheme together");
  source
      .add_flag("--matrix", options->matrix,
                "Print every scheme on every implementation, as Markdown tables")
      .alone();
  command.add_option("--scheme", options->scheme, "SCHEME",
                     "Of the experts; default: as published");
  command.add_option("--experts", options->experts, "EXPERTS",
                     "Implementation that must run; default: the best");
  command.add_flag("--hooks", options->hooks,
                   "Ask for experts that can call hooks between their steps");
  command.add_flag("--monolithic", options->monolithic,
                   "Ask for experts that choose each token's experts themselves");
  command.add_flag("--batch-invariant", options->batch_invariant,
                   "Ask for rows that do not depend on their batch");
  command.add_option("--save-plan", options->save_plan, "PATH",
                     "File to write: what would run, as JSON that run --plan pins");
  command.add_option("--device", options->device, "DEVICE",
                     "Where it would run; default: cpu, with --compute-capability cuda");
  command.add_option("--compute-capability", options->compute_capability, "CAPABILITY",
                     "Answer for a CUDA device that need not be here: 9.0 is Hopper");
  command.add_option("--dtype", options->dtype, "DTYPE", "Of hidden states and output")
      .one_of({"bf16", "f16", "f32"})
      .show_default();
  options->ranks.add_to(command);
  command
      .add_option("--combine", options->combine, "NAME",
                  "What comes back from ranks; default: what a layer chooses")
      .one_of({"per_rank", "per_slot"});
  command
      .add_option(
          "--tokens", options->num_tokens, "N",
          "Tokens that the workspace, the kernel configuration and the times of rows are for")
      .between(0, 1 << 20)
      .show_default();
  command.add_flag("--json", options->json,
                   "Print a JSON object instead of text, on a line for each scheme of layers");
  command.example("fusedmoe explain --model gpt-oss-20b --device cuda --tokens 64");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
