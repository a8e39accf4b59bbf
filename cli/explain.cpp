// fusedmoe explain: every implementation, whether it can serve a model, and the one that would run.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "commands.h"
#include "fusedmoe/layer.h"
#include "support.h"
#include "testing/support_matrix.h"

namespace fusedmoe::cli {
namespace {

struct Options {
  std::string checkpoint, model;
  std::string device = "cpu";
  std::string dtype = "bf16";
  std::int64_t num_tokens = 64;
  std::string scheme, experts, save_plan;
  bool hooks = false, batch_invariant = false;
  bool json = false, matrix = false;
};

/// Scratch that one forward needs beside weights, input and output.
std::size_t workspace_bytes(const Selection& selection, const MoeConfig& config,
                            std::int64_t num_tokens) {
  const ModularKernel kernel(selection.prepare_finalize, selection.experts);
  return kernel.workspace_bytes(ProblemSize::of(config, num_tokens),
                                config.apply_router_weight_on_input);
}

/// Of the experts, for these tokens; empty where they have one way to run.
std::string tile_plan(const Selection& selection, std::int64_t num_tokens) {
  const ProblemSize size =
      selection.prepare_finalize->problem_size(ProblemSize::of(selection.config, num_tokens));
  const auto plans = selection.experts->tile_plans(size, selection.config.device);
  return plans.empty() ? "" : plans.front();
}

/// With the shared experts that a layer of the model would have besides.
std::string plan_json(const Options& options, const ModelConfig& model,
                      const Selection& selection) {
  Plan plan = selection.plan();
  if (model.shared_intermediate > 0) {
    MoeConfig shared = selection.config;
    if (!options.checkpoint.empty()) {
      const Checkpoint checkpoint = Checkpoint::open(options.checkpoint);
      const auto experts = checkpoint.load_layer(checkpoint.moe_layers().front()).shared_experts;
      if (experts) shared.scheme = experts->weights.scheme;
    }
    shared.num_experts = shared.num_local_experts = shared.topk = 1;
    shared.intermediate = model.shared_intermediate;
    shared.routing_method = RoutingMethod::kUnspecified;
    shared.apply_router_weight_on_input = shared.hooks = shared.has_bias = false;
    shared.activation_format = ActivationFormat::kStandard;
    const Plan pair = select(shared).plan();
    plan.shared_experts = fmt::format("{}+{}", pair.experts, pair.prepare_finalize);
    plan.shared_scheme = pair.scheme;
  }
  return plan.json() + "\n";
}

void run(const Options& options) {
  if (options.matrix) {
    fmt::print("{}", testing::support_matrix_markdown());
    return;
  }
  const Device device = parse_device(options.device);
  const ModelConfig model = options.model.empty() ? Checkpoint::open(options.checkpoint).config()
                                                  : parse_model_config(model_preset(options.model));
  MoeConfig config = moe_config(model, parse_float_dtype(options.dtype), device);
  if (!options.scheme.empty()) config.scheme = parse_scheme(options.scheme);
  config.hooks = options.hooks;
  config.batch_invariant = options.batch_invariant;
  const Selection selection =
      options.experts.empty() ? explain(config) : select(config, options.experts);
  if (selection && !options.save_plan.empty()) {
    write_text(options.save_plan, plan_json(options, model, selection));
  }
  const std::size_t workspace =
      selection ? workspace_bytes(selection, config, options.num_tokens) : 0;
  const std::string tiles = selection ? tile_plan(selection, options.num_tokens) : "";
  if (options.json) {
    fmt::print("{}\n", nlohmann::json{{"family", name(model.family)},
                                      {"scheme", name(config.scheme)},
                                      {"dtype", name(config.dtype)},
                                      {"device", to_string(device)},
                                      {"num_tokens", options.num_tokens},
                                      {"workspace_bytes", workspace},
                                      {"tile_plan", tiles},
                                      {"candidates", nlohmann::json::parse(selection.json())}}
                           .dump());
  } else {
    fmt::print("{}: {} experts, top-{}, {} x {}, {}, {}, {} on {}\n\n{}", name(model.family),
               config.num_experts, config.topk, config.hidden, config.intermediate,
               name(config.scheme), name(config.activation), name(config.dtype), to_string(device),
               selection.table());
    if (selection) {
      fmt::print("\nworkspace for {} tokens: {}\n", options.num_tokens,
                 format_bytes(static_cast<std::int64_t>(workspace)));
      if (!tiles.empty()) fmt::print("tile plan for {} tokens: {}\n", options.num_tokens, tiles);
    }
  }
  if (!selection) {
    throw Error("configuration", "served by no implementation", "one that a row above supports");
  }
}

}  // namespace

void add_explain(Command& program) {
  auto options = std::make_shared<Options>();
  Command command = program.add_command(
      "explain", "Show which implementation would run a model, and why not the others");
  Command source = command.add_group("model");
  source.add_option("--checkpoint", options->checkpoint, "Checkpoint directory or file");
  source.add_option("--model", options->model, "A model that synth knows");
  const Option matrix =
      source.add_flag("--matrix", options->matrix,
                      "Print docs/support-matrix.md: every implementation, every scheme");
  source.require(1, 1);
  command.add_option("--scheme", options->scheme, "Of the experts; default: as published")
      .excludes(matrix);
  command
      .add_option("--experts", options->experts, "Implementation that must run; default: the best")
      .excludes(matrix);
  command.add_flag("--hooks", options->hooks, "Ask for injection points").excludes(matrix);
  command.add_flag("--batch-invariant", options->batch_invariant,
                   "Ask for rows that do not depend on their batch");
  command
      .add_option("--save-plan", options->save_plan,
                  "File to write: what would run, as JSON that run --plan pins")
      .excludes(matrix);
  command.add_option("--device", options->device, "cpu, cuda or cuda:<index>").show_default();
  command.add_option("--dtype", options->dtype, "Of hidden states and output: bf16, f32 or f16")
      .show_default();
  command
      .add_option("--tokens", options->num_tokens, "Tokens the workspace and the tile plan are for")
      .not_negative()
      .show_default();
  command.add_flag("--json", options->json, "Print one JSON object instead of text")
      .excludes(matrix);
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
