// fusedmoe inspect: what a checkpoint holds, from its config and its files' headers.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "commands.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/error.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

struct Options {
  std::string path;
  std::int64_t layer = -1;
  bool json = false;
};

/// Tensors that differ in the expert's number only.
struct TensorGroup {
  std::string name;  // with {first..last} in place of the number
  Checkpoint::TensorInfo first;
  std::int64_t count = 0;
  std::int64_t nbytes = 0;
};

std::vector<TensorGroup> group_experts(const std::vector<Checkpoint::TensorInfo>& tensors) {
  static const std::regex kExpert("(.*experts\\.)([0-9]+)(\\..*)");
  struct Span {
    std::int64_t first, last;
  };
  std::map<std::string, std::size_t> position;
  std::vector<TensorGroup> groups;
  std::vector<Span> spans;
  for (const Checkpoint::TensorInfo& tensor : tensors) {
    std::smatch match;
    const bool numbered = std::regex_match(tensor.name, match, kExpert);
    const std::string key = numbered ? match.str(1) + "{}" + match.str(3) : tensor.name;
    // Experts whose tensors differ in dtype or shape stay apart.
    const std::string full_key =
        fmt::format("{} {} {}", key, name(tensor.dtype), to_string(tensor.shape));
    const std::int64_t expert = numbered ? std::stoll(match.str(2)) : 0;
    const auto [entry, added] = position.try_emplace(full_key, groups.size());
    if (added) {
      groups.push_back({.name = key, .first = tensor});
      spans.push_back({expert, expert});
    }
    TensorGroup& group = groups[entry->second];
    Span& span = spans[entry->second];
    span = {std::min(span.first, expert), std::max(span.last, expert)};
    ++group.count;
    group.nbytes += tensor.nbytes;
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const std::size_t braces = groups[i].name.find("{}");
    if (braces == std::string::npos) continue;
    const std::string range = groups[i].count == 1
                                  ? fmt::to_string(spans[i].first)
                                  : fmt::format("{{{}..{}}}", spans[i].first, spans[i].last);
    groups[i].name.replace(braces, 2, range);
  }
  return groups;
}

std::int64_t total_bytes(const std::vector<Checkpoint::TensorInfo>& tensors) {
  std::int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.nbytes;
  return bytes;
}

void print_text(const Checkpoint& checkpoint, const std::vector<std::int64_t>& layers,
                std::int64_t layer) {
  const ModelConfig& model = checkpoint.config();
  const auto row = [](const char* what, const std::string& value) {
    fmt::print("{:<18}{}\n", what, value);
  };
  row("family", std::string(name(model.family)));
  row("layers", fmt::format("{} in the model; here with experts: {}", model.num_layers,
                            fmt::join(layers, ", ")));
  row("experts", fmt::format("{} of {} x {}{}", model.router.num_experts, model.hidden,
                             model.intermediate, model.has_bias ? ", with biases" : ""));
  if (model.shared_intermediate > 0) {
    row("shared experts", fmt::format("{} x {}{}", model.hidden, model.shared_intermediate,
                                      model.shared_expert_gate ? ", gated" : ""));
  }
  row("router",
      describe_router(model.router) + (model.has_correction_bias ? ", with correction bias" : ""));
  row("activation", std::string(name(model.activation)));
  row("scheme", name(model.scheme));
  const auto tensors = checkpoint.layer_tensors(layer);
  row("bytes", fmt::format("{} in layer {}", format_bytes(total_bytes(tensors)), layer));
  fmt::print("\n");
  const auto groups = group_experts(tensors);
  std::size_t width = 0;
  for (const TensorGroup& group : groups) width = std::max(width, group.name.size());
  for (const TensorGroup& group : groups) {
    fmt::print("{:<{}}  {:<5} {:<18} {:>10}\n", group.name, width, name(group.first.dtype),
               to_string(group.first.shape), format_bytes(group.nbytes));
  }
}

void print_json(const Checkpoint& checkpoint, const std::vector<std::int64_t>& layers,
                std::int64_t layer) {
  const ModelConfig& model = checkpoint.config();
  const auto tensors = checkpoint.layer_tensors(layer);
  nlohmann::json object{{"family", name(model.family)},
                        {"num_layers", model.num_layers},
                        {"moe_layers", layers},
                        {"num_experts", model.router.num_experts},
                        {"topk", model.router.topk},
                        {"hidden", model.hidden},
                        {"intermediate", model.intermediate},
                        {"shared_intermediate", model.shared_intermediate},
                        {"router", describe_router(model.router)},
                        {"activation", name(model.activation)},
                        {"scheme", name(model.scheme)},
                        {"layer", layer},
                        {"layer_bytes", total_bytes(tensors)},
                        {"tensors", nlohmann::json::array()}};
  for (const auto& tensor : tensors) {
    object["tensors"].push_back({{"name", tensor.name},
                                 {"dtype", name(tensor.dtype)},
                                 {"shape", std::vector(tensor.shape.begin(), tensor.shape.end())},
                                 {"bytes", tensor.nbytes},
                                 {"file", tensor.file}});
  }
  fmt::print("{}\n", object.dump());
}

void run(const Options& options) {
  const Checkpoint checkpoint = Checkpoint::open(options.path);
  const std::vector<std::int64_t> layers = checkpoint.moe_layers();
  if (layers.empty()) throw Error(options.path, "without MoE layers", "at least one");
  const std::int64_t layer = options.layer < 0 ? layers.front() : options.layer;
  if (std::find(layers.begin(), layers.end(), layer) == layers.end()) {
    throw Error("--layer", fmt::to_string(layer),
                fmt::format("one of {}", fmt::join(layers, ", ")));
  }
  options.json ? print_json(checkpoint, layers, layer) : print_text(checkpoint, layers, layer);
}

}  // namespace

void add_inspect(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "inspect", "Show a checkpoint's family, layers, experts, shapes, scheme and bytes");
  command->add_option("path", options->path, "Checkpoint directory or safetensors file")
      ->required();
  command->add_option("--layer", options->layer, "Layer whose tensors are listed; default: first")
      ->check(CLI::NonNegativeNumber);
  command->add_flag("--json", options->json, "Print one JSON object instead of text");
  command->callback([options] { run(*options); });
}

}  // namespace fusedmoe::cli
