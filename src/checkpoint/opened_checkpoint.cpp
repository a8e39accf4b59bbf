// Finds the MoE blocks of a checkpoint by the whole path segments of its tensor names.
#include "checkpoint/opened_checkpoint.h"

#include <algorithm>
#include <array>
#include <optional>

#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

// Before the layer number; the last one is that of a model without its language-model head.
constexpr std::array<std::string_view, 4> kPrefixes{"model.layers.", "language_model.model.layers.",
                                                    "model.language_model.layers.", "layers."};

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

bool has_experts_segment(std::string_view name) {
  while (!name.empty()) {
    const std::string_view segment = first_segment(name);
    if (segment == "experts") return true;
    name.remove_prefix(std::min(segment.size() + 1, name.size()));
  }
  return false;
}

bool in_family_block(std::string_view local, const FamilyRow& row) {
  const std::string_view segment = first_segment(local);
  return segment.size() < local.size() &&
         std::find(row.blocks.begin(), row.blocks.end(), segment) != row.blocks.end();
}

// A layer's experts outside the family's block belong to the layer too, where nothing claims them.
std::optional<ParsedName> parse_name(std::string_view name, const FamilyRow& row) {
  ParsedName parsed{0, {}, name};
  for (std::string_view prefix : kPrefixes) {
    if (!name.starts_with(prefix)) continue;
    const auto number = leading_number(name.substr(prefix.size()));
    if (!number) return std::nullopt;
    const std::size_t length = prefix.size() + number->second;
    parsed = {number->first, name.substr(0, length), name.substr(length)};
    break;
  }
  const bool stray = !parsed.prefix.empty() && has_experts_segment(parsed.local);
  if (!stray && !in_family_block(parsed.local, row)) return std::nullopt;
  return parsed;
}

// A dense layer has the same block name (mlp.gate_proj.weight), but nothing under `experts`.
bool holds_experts(const Block& block, const FamilyRow& row) {
  for (const auto& [name, entry] : block.tensors) {
    if (!in_family_block(name, row)) continue;
    const std::string_view inside = std::string_view(name).substr(first_segment(name).size() + 1);
    for (const ExpertLayout& layout : row.layouts) {
      const std::string_view segment = first_segment(inside);
      if (segment == first_segment(layout.w1) || segment == first_segment(layout.w2)) return true;
    }
  }
  return false;
}

std::map<std::int64_t, Block> collect_layers(const CheckpointFiles& files, const FamilyRow& row,
                                             const std::string& label) {
  std::map<std::int64_t, Block> layers;
  for (std::size_t file = 0; file < files.files.size(); ++file) {
    for (const auto& [name, tensor] : files.files[file].contents.tensors()) {
      const auto mapped = files.weight_map.find(name);
      if (mapped != files.weight_map.end() && mapped->second != file) continue;
      const std::optional<ParsedName> parsed = parse_name(name, row);
      if (!parsed) continue;
      Block& block = layers[parsed->layer];
      if (block.tensors.empty()) block.prefix = parsed->prefix;
      FUSEDMOE_CHECK_FILE(block.prefix == parsed->prefix, label + ": " + files::quote(name),
                          core::format("layer {} under the prefix \"{}\" and \"{}\"", parsed->layer,
                                       block.prefix, parsed->prefix),
                          "under one prefix");
      const auto [other, is_new] =
          block.tensors.emplace(std::string(parsed->local), BlockTensor{tensor, file});
      FUSEDMOE_CHECK_FILE(is_new, label + ": " + files::quote(name),
                          core::format("in {} and in {}", files.files[other->second.file].path,
                                       files.files[file].path),
                          "in one file");
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

OpenedCheckpoint open_checkpoint(CheckpointFiles files, std::string label) {
  OpenedCheckpoint result;
  result.label = std::move(label);
  result.files = std::move(files);
  try {
    result.config = parse_model_config(result.files.config_json);
  } catch (const Error& error) {
    throw error.within(result.label);
  }
  result.layers = collect_layers(result.files, family_row(result.config.family), result.label);
  if (!result.layers.empty()) {
    result.config.scheme = stored_scheme(result.config, result.layers.begin()->second);
  }
  return result;
}

}  // namespace fusedmoe::checkpoint
