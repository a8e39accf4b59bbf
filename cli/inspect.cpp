// fusedmoe inspect: what a checkpoint holds, from its config and its files' headers.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "commands.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/tensor.h"
#include "sources.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

struct InspectOptions {
  std::string family;
  std::string path;
  std::int64_t layer = -1;
  bool json = false;
};

/// Tensors that differ in the expert's number only.
struct TensorGroup {
  Checkpoint::TensorInfo tensor;  // of one of them
  std::int64_t first = -1, last = -1;
  std::int64_t nbytes = 0;  // of all
};

/// "block.experts.12.w1.weight" as "block.experts.", 12 and ".w1.weight".
struct ExpertName {
  std::string_view before, after;
  std::int64_t expert = -1;  // -1: not the name of one expert's tensor
};

ExpertName split_name(std::string_view name) {
  constexpr std::string_view kExperts = "experts.";
  const std::size_t found = name.rfind(kExperts);
  if (found == std::string_view::npos) return {name, {}};
  const std::size_t first = found + kExperts.size();
  // "experts.12.w1.weight", or "experts.w1.12.weight".
  for (const std::size_t at : {first, std::max(name.find('.', first) + 1, first)}) {
    const char *begin = name.data() + at, *end = name.data() + name.size();
    std::int64_t expert = 0;
    const auto [stop, error] = std::from_chars(begin, end, expert);
    if (error != std::errc() || stop == end || *stop != '.') continue;
    return {{name.data(), begin}, {stop, end}, expert};
  }
  return {name, {}};
}

std::vector<TensorGroup> group_experts(const std::vector<Checkpoint::TensorInfo>& tensors) {
  std::map<std::string, std::size_t> position;
  std::vector<TensorGroup> groups;
  for (const Checkpoint::TensorInfo& tensor : tensors) {
    const ExpertName parts = split_name(tensor.name);
    // Experts whose tensors differ in dtype or shape stay apart.
    const std::string key = fmt::format("{}{}{} {} {}", parts.before, parts.expert < 0 ? "" : "*",
                                        parts.after, tensor.format, to_string(tensor.shape));
    const auto [entry, added] = position.try_emplace(key, groups.size());
    if (added) groups.push_back({.tensor = tensor, .first = parts.expert, .last = parts.expert});
    TensorGroup& group = groups[entry->second];
    group.first = std::min(group.first, parts.expert);
    group.last = std::max(group.last, parts.expert);
    group.nbytes += tensor.nbytes;
  }
  return groups;
}

/// With {first..last} in place of the expert's number.
std::string group_name(const TensorGroup& group) {
  if (group.first == group.last) return group.tensor.name;
  const ExpertName parts = split_name(group.tensor.name);
  return fmt::format("{}{{{}..{}}}{}", parts.before, group.first, group.last, parts.after);
}

/// Of the routed experts, and of the shared ones where theirs is another.
std::string activation_text(const ModelConfig& model) {
  const auto one = [](Activation kind, const ActivationParams& params) {
    const float limit = resolve(kind, params).limit;
    return std::isinf(limit) ? std::string(name(kind))
                             : fmt::format("{}, limit {}", name(kind), limit);
  };
  std::string routed = one(model.activation, model.activation_params);
  const std::string shared = one(model.shared_activation, model.shared_activation_params);
  if (model.shared_intermediate == 0 || shared == routed) return routed;
  return fmt::format("{}; shared experts {}", routed, shared);
}

/// Uncalibrated experts: "experts 3, 7: down_proj.input_scale is 0, takes 0.02".
std::vector<std::string> uncalibrated_texts(const Checkpoint& checkpoint, std::int64_t layer) {
  std::map<std::string, std::vector<std::int64_t>> experts;
  for (const UncalibratedScale& scale : checkpoint.uncalibrated(layer)) {
    const ExpertName parts = split_name(scale.tensor);
    const std::string_view tensor =
        parts.expert < 0 ? std::string_view(scale.tensor) : parts.after.substr(1);
    experts[fmt::format("{} is {}, takes {}", tensor, scale.value, scale.used)].push_back(
        parts.expert);
  }
  std::vector<std::string> texts;
  for (const auto& [text, numbers] : experts) {
    const std::string_view head = numbers.size() == 1 ? "expert" : "experts";
    texts.push_back(numbers.front() < 0
                        ? text
                        : fmt::format("{} {}: {}", head, fmt::join(numbers, ", "), text));
  }
  return texts;
}

std::int64_t total_bytes(const std::vector<Checkpoint::TensorInfo>& tensors) {
  std::int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.nbytes;
  return bytes;
}

std::string describe(const Checkpoint::LayerSchemes& schemes) {
  const bool apart = schemes.shared_experts && *schemes.shared_experts != schemes.experts;
  return name(schemes.experts) +
         (apart ? fmt::format("; shared experts {}", name(*schemes.shared_experts)) : "");
}

/// Layers and what they have: those that follow each other with the same in one entry.
struct LayerRange {
  std::int64_t first, last;
  std::string scheme;

  std::string text() const {
    return first == last ? fmt::format("layer {}: {}", first, scheme)
                         : fmt::format("layers {} to {}: {}", first, last, scheme);
  }
};
using LayerRanges = std::vector<LayerRange>;

/// Of every layer, which must pass the checks of loading.
LayerRanges group_layers(const Checkpoint& checkpoint, const std::vector<std::int64_t>& layers) {
  LayerRanges groups;
  for (const std::int64_t layer : layers) {
    const std::string scheme = describe(checkpoint.check_layer(layer));
    if (groups.empty() || groups.back().scheme != scheme) groups.push_back({layer, layer, scheme});
    groups.back().last = layer;
  }
  return groups;
}

void print_text(const Checkpoint& checkpoint, const std::vector<std::int64_t>& layers,
                std::int64_t layer, const LayerRanges& groups_of_layers) {
  const ModelConfig model = checkpoint.config(layer);
  const auto row = [](const char* what, const std::string& value) {
    fmt::print("{:<18}{}\n", what, value);
  };
  row("family", std::string(name(model.family)));
  row("layers", fmt::format("{} in the model; here with experts: {}", model.num_layers,
                            fmt::join(layers, ", ")));
  row("experts", fmt::format("{} of {} x {}{}", model.router.num_experts, model.experts_hidden(),
                             model.intermediate, model.has_bias ? ", with biases" : ""));
  if (model.latent > 0) {
    row("projections", fmt::format("{} to {} and back", model.hidden, model.latent));
  }
  if (model.shared_intermediate > 0) {
    row("shared experts", fmt::format("{} x {}{}", model.hidden, model.shared_intermediate,
                                      model.shared_expert_gate ? ", gated" : ""));
  }
  row("router",
      describe_router(model.router) + (model.has_correction_bias ? ", with correction bias" : ""));
  row("activation", activation_text(model));
  if (groups_of_layers.size() == 1) {
    row("scheme", groups_of_layers.front().scheme);
  } else {
    const char* what = "scheme";
    for (const LayerRange& group : groups_of_layers) {
      row(what, group.text());
      what = "";
    }
  }
  for (const std::string& text : uncalibrated_texts(checkpoint, layer)) row("uncalibrated", text);
  const auto tensors = checkpoint.layer_tensors(layer);
  row("bytes", fmt::format("{} in layer {}", format_bytes(total_bytes(tensors)), layer));
  fmt::print("\n");
  const auto groups = group_experts(tensors);
  std::size_t width = 0;
  for (const TensorGroup& group : groups) width = std::max(width, group_name(group).size());
  for (const TensorGroup& group : groups) {
    fmt::print("{:<{}}  {:<5} {:<18} {:>10}\n", group_name(group), width, group.tensor.format,
               to_string(group.tensor.shape), format_bytes(group.nbytes));
  }
}

void print_json(const Checkpoint& checkpoint, const std::vector<std::int64_t>& layers,
                std::int64_t layer, const LayerRanges& groups_of_layers) {
  const ModelConfig model = checkpoint.config(layer);
  const auto tensors = checkpoint.layer_tensors(layer);
  nlohmann::json object{{"family", name(model.family)},
                        {"num_layers", model.num_layers},
                        {"moe_layers", layers},
                        {"num_experts", model.router.num_experts},
                        {"topk", model.router.topk},
                        {"hidden", model.hidden},
                        {"latent", model.latent},
                        {"intermediate", model.intermediate},
                        {"shared_intermediate", model.shared_intermediate},
                        {"router", describe_router(model.router)},
                        {"activation", name(model.activation)},
                        {"scheme", name(checkpoint.config(layer).scheme)},
                        {"schemes", nlohmann::json::array()},
                        {"layer", layer},
                        {"layer_bytes", total_bytes(tensors)},
                        {"uncalibrated", uncalibrated_texts(checkpoint, layer)},
                        {"tensors", nlohmann::json::array()}};
  for (const LayerRange& group : groups_of_layers) {
    object["schemes"].push_back(
        {{"first", group.first}, {"last", group.last}, {"scheme", group.scheme}});
  }
  for (const auto& tensor : tensors) {
    object["tensors"].push_back({{"name", tensor.name},
                                 {"dtype", name(tensor.dtype)},
                                 {"format", tensor.format},
                                 {"shape", std::vector(tensor.shape.begin(), tensor.shape.end())},
                                 {"bytes", tensor.nbytes},
                                 {"file", tensor.file}});
  }
  fmt::print("{}\n", object.dump());
}

void run(const InspectOptions& options) {
  const Checkpoint checkpoint = open_checkpoint(options.path, options.family);
  const std::vector<std::int64_t> layers = moe_layers_of(checkpoint, options.path);
  const std::int64_t layer = chosen_layer(options.layer, layers);
  const LayerRanges all = group_layers(checkpoint, layers);
  const LayerRanges shown = options.layer < 0 ? all : group_layers(checkpoint, {layer});
  options.json ? print_json(checkpoint, layers, layer, all)
               : print_text(checkpoint, layers, layer, shown);
}

}  // namespace

void add_inspect(Program& program) {
  auto options = std::make_shared<InspectOptions>();
  Command command = program.add_command(
      "inspect", "Show a checkpoint's family, layers, experts, shapes, scheme and bytes");
  command
      .add_option("path", options->path, "PATH", "Checkpoint directory, safetensors or GGUF file")
      .required();
  add_family_option(command, options->family);
  add_layer_option(command, options->layer,
                   "Layer whose scheme and tensors are shown; default: the schemes of all, the "
                   "tensors of the first");
  command.add_flag("--json", options->json, "Print one JSON object instead of text");
  command.example("fusedmoe inspect gpt-oss-20b");
  command.runs([options] { run(*options); });
}

}  // namespace fusedmoe::cli
