#include "checkpoint/quant_parsers.h"

#include <nlohmann/json.hpp>
#include <set>

#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

/// A name of a module has none of these.
bool is_pattern(std::string_view text) {
  return text.starts_with("re:") || text.find_first_of("*?[]()|^$\\+") != std::string_view::npos;
}

}  // namespace

ModuleFormat read_format(std::string source,
                         const std::function<std::optional<QuantScheme>()>& read) {
  ModuleFormat format{{}, std::move(source), {}};
  try {
    format.scheme = read();
  } catch (const Error& error) {
    format.refusal = error;
  }
  return format;
}

void add_plain_modules(const ConfigKeys& config, std::string_view key, ListPatterns patterns,
                       ModuleRules& rules) {
  const std::string source = config.label(key);
  std::optional<std::size_t> plain;
  for (std::string text : config.strings(key)) {
    if (!is_pattern(text)) {
      if (!plain) plain = rules.add_format({{}, source, {}});
      rules.add_name(ModuleRules::Names::kAnywhere, std::move(text), *plain);
      continue;
    }
    const std::size_t format =
        rules.add_format({{}, core::format("{} ({})", source, files::quote(text)), {}});
    const bool marked = text.starts_with("re:");
    if (marked) text.erase(0, 3);
    const bool glob = !marked && (patterns == ListPatterns::kGlob ||
                                  (text.find_first_of("[]()|^$\\+") == std::string::npos &&
                                   text.find(".*") == std::string::npos));
    rules.add_pattern(
        {glob ? ModulePattern::Kind::kGlob : ModulePattern::Kind::kMatch, text, source}, format);
  }
}

std::vector<std::string> keys_in_order(const ConfigKeys& object, const std::string& key,
                                       const KeyOrder& order) {
  const std::optional<ConfigKeys> child = object.object(key);
  std::vector<std::string> keys;
  if (!child) return keys;
  const auto& node = child->node();
  std::set<std::string_view> listed;
  if (const auto known = order.find(key); known != order.end()) {
    for (const std::string& name : known->second) {
      if (node.contains(name) && listed.insert(name).second) keys.push_back(name);
    }
  }
  for (const auto& [name, value] : node.items()) {
    if (!listed.contains(name)) keys.push_back(name);
  }
  return keys;
}

}  // namespace fusedmoe::checkpoint
