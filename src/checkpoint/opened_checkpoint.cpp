// Finds the MoE blocks of a checkpoint by the whole path segments of its tensor names.
#include "checkpoint/opened_checkpoint.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <vector>

#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

// Before the layer number; "layers." is that of a model without its language-model head, "block."
// that of gpt-oss's original files.
constexpr std::array<std::string_view, 5> kPrefixes{"model.layers.", "language_model.model.layers.",
                                                    "model.language_model.layers.", "layers.",
                                                    "block."};

struct ParsedName {
  std::int64_t layer;
  std::string_view prefix;  ///< including the layer number and its dot
  std::string_view local;
};

// "12.mlp.gate.weight" -> 12 and the length of "12."; nothing for another form.
std::optional<std::pair<std::int64_t, std::size_t>> leading_number(std::string_view text) {
  constexpr std::size_t kMaxDigits = 9;
  const std::size_t digits = text.find_first_not_of("0123456789");
  if (digits == std::string_view::npos || digits == 0 || digits > kMaxDigits ||
      text[digits] != '.' || (text[0] == '0' && digits > 1)) {
    return std::nullopt;
  }
  std::int64_t number = 0;
  for (const char c : text.substr(0, digits)) number = number * 10 + (c - '0');
  return std::pair{number, digits + 1};
}

std::string_view first_segment(std::string_view name) {
  return name.substr(0, name.find('.'));
}

/// "experts", shared ones, the router's correction; of llama.cpp's names "ffn_up_exps",
/// "ffn_gate_inp_shexp" and "exp_probs_b". Norms lie before the block.
bool is_of_experts(std::string_view segment) {
  const auto has = [&](std::string_view text) { return segment.find(text) != segment.npos; };
  return segment == "experts" || segment.starts_with("shared_expert") || segment == "shared_mlp" ||
         segment == "e_score_correction_bias" || segment.starts_with("exp_probs_") ||
         (segment.starts_with("ffn_") && !has("norm") &&
          (has("_exps") || has("_shexp") || has("_chexps")));
}

bool has_experts_segment(std::string_view name) {
  while (!name.empty()) {
    const std::string_view segment = first_segment(name);
    if (is_of_experts(segment)) return true;
    name.remove_prefix(std::min(segment.size() + 1, name.size()));
  }
  return false;
}

/// The first segments of the names of an MoE block's tensors, from the layer on.
std::set<std::string, std::less<>> segments_of(const FamilyRow& row) {
  std::vector<std::string> patterns;
  const auto add = [&](const std::vector<std::string>& names) {
    patterns.insert(patterns.end(), names.begin(), names.end());
  };
  add(row.router);
  add(row.router_bias);
  add(row.correction_bias);
  add(row.shared_gate);
  add(row.latent_down);
  add(row.latent_up);
  for (const SharedNames& names : row.shared) add({names.gate, names.up, names.down});
  for (const ExpertLayout& layout : row.layouts) add({layout.w1, layout.w3, layout.w2});
  std::set<std::string, std::less<>> segments;
  for (const std::string& block : row.blocks) {
    for (const std::string& pattern : patterns) {
      if (!pattern.empty()) segments.emplace(first_segment(tensor_name(block, pattern)));
    }
  }
  return segments;
}

/// What of the family decides where tensors belong.
struct NameRules {
  const FamilyRow& row;
  const std::set<std::string, std::less<>> segments = segments_of(row);

  bool in_block(std::string_view local) const {
    const std::string_view segment = first_segment(local);
    return segment.size() < local.size() && segments.contains(segment);
  }
};

// A layer's experts outside the family's block belong to the layer too, where nothing claims them.
std::optional<ParsedName> parse_name(std::string_view name, const NameRules& rules) {
  ParsedName parsed{0, {}, name};
  std::vector<std::string_view> prefixes{rules.row.prefix};
  prefixes.insert(prefixes.end(), kPrefixes.begin(), kPrefixes.end());
  for (std::string_view prefix : prefixes) {
    if (!name.starts_with(prefix)) continue;
    const auto number = leading_number(name.substr(prefix.size()));
    if (!number) return std::nullopt;
    const std::size_t length = prefix.size() + number->second;
    parsed = {number->first, name.substr(0, length), name.substr(length)};
    break;
  }
  const bool stray = !parsed.prefix.empty() && has_experts_segment(parsed.local);
  if (!stray && !rules.in_block(parsed.local)) return std::nullopt;
  return parsed;
}

/// Whether a name belongs to the experts that a pattern names: by its first segment, or, where the
/// pattern ends with the expert's number ("ffn_gate.*"), by two, as the linear layers of a dense
/// layer begin alike.
bool of_experts(std::string_view name, std::string_view pattern) {
  const std::string_view segment = first_segment(pattern);
  if (first_segment(name) != segment) return false;
  if (pattern.substr(segment.size()) != ".*") return true;
  return name.size() > segment.size() && leading_number(name.substr(segment.size() + 1));
}

// A dense layer has the same block name (mlp.gate_proj.weight), but nothing under `experts`.
bool holds_experts(const Block& block, const FamilyRow& row) {
  for (const auto& [name, entry] : block.tensors) {
    for (const std::string& segment : row.blocks) {
      std::string_view inside = name;
      if (!segment.empty()) {
        if (first_segment(name) != segment || name.size() == segment.size()) continue;
        inside.remove_prefix(segment.size() + 1);
      }
      for (const ExpertLayout& layout : row.layouts) {
        if (of_experts(inside, layout.w1) || of_experts(inside, layout.w2)) return true;
      }
    }
  }
  return false;
}

std::map<std::int64_t, Block> collect_layers(const CheckpointFiles& files, const FamilyRow& row) {
  std::map<std::int64_t, Block> layers;
  const NameRules rules{row};
  for (std::size_t file = 0; file < files.files.size(); ++file) {
    for (const auto& [name, tensor] : files.files[file].tensors()) {
      const auto mapped = files.weight_map.find(name);
      if (mapped != files.weight_map.end() && mapped->second != file) continue;
      const std::optional<ParsedName> parsed = parse_name(name, rules);
      if (!parsed) continue;
      Block& block = layers[parsed->layer];
      if (block.tensors.empty()) block.prefix = parsed->prefix;
      FUSEDMOE_CHECK_IO(block.prefix == parsed->prefix, files::quote(name),
                        core::format("{} lies beside other tensors of layer {} whose names begin "
                                     "with {}: a layer has one prefix",
                                     files::quote(name), parsed->layer, block.prefix));
      const auto [other, is_new] = block.tensors.emplace(std::string(parsed->local), tensor);
      if (is_new) other->second.file = file;
      FUSEDMOE_CHECK_IO(is_new, files::quote(name),
                        core::format("{} is in two files, {} and {}", files::quote(name),
                                     files.files[other->second.file].path, files.files[file].path));
    }
  }
  std::erase_if(layers, [&](const auto& layer) { return !holds_experts(layer.second, row); });
  return layers;
}

}  // namespace

const Block& OpenedCheckpoint::layer(std::int64_t number) const {
  const auto found = layers.find(number);
  if (found != layers.end()) return found->second;
  std::vector<std::int64_t> known;
  for (const auto& [other, block] : layers) known.push_back(other);
  throw Error(label + ": layer", core::to_string(number),
              core::format("a layer with experts, which are: {}",
                           known.empty() ? "none" : core::format("{}", core::join(known, ", "))));
}

ModelConfig OpenedCheckpoint::layer_config(std::int64_t number) const {
  const Block& block = layer(number);
  try {
    ModelConfig model = parsed->read(number);
    model.scheme = stored_scheme(model, block);
    return model;
  } catch (const Error& error) {
    throw error.within(label);
  }
}

OpenedCheckpoint open_checkpoint(CheckpointFiles files, std::string label, const Family& family) {
  OpenedCheckpoint result;
  result.label = std::move(label);
  result.files = std::move(files);
  try {
    result.parsed = std::make_shared<ParsedConfig>(result.files.config_json, family);
    result.layers = collect_layers(result.files, result.parsed->row());
    for (auto& [number, block] : result.layers) block.config = result.parsed;
    if (result.layers.empty()) result.config = result.parsed->read_all();
  } catch (const Error& error) {
    throw error.within(result.label);
  }
  // Of the first layer whose format is read: others may still be asked for by their numbers.
  std::optional<Error> problem;
  for (const auto& [number, block] : result.layers) {
    try {
      result.config = result.layer_config(number);
      return result;
    } catch (const Error& error) {
      if (!problem) problem = error;
    }
  }
  if (problem) throw Error(*problem);
  return result;
}

}  // namespace fusedmoe::checkpoint
