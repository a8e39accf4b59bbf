// Source: how compressed-tensors matches targets with modules: names first, then patterns, then
// classes.
#include "checkpoint/quant_targets.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string_view>

#include "checkpoint/block_tensors.h"
#include "core/check.h"
#include "core/format.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::string_view kPattern = "re:";

// A search over a pattern may take time that grows with a power of its repetitions, and without
// bound where one repeats another.
bool is_harmless(std::string_view pattern) {
  constexpr std::size_t kMaxLength = 512, kMaxRepetitions = 5;
  std::size_t repetitions = 0;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '*' && pattern[i] != '+' && pattern[i] != '{') continue;
    ++repetitions;
    if (i > 0 && pattern[i - 1] == ')') return false;
  }
  return pattern.size() <= kMaxLength && repetitions <= kMaxRepetitions;
}

bool matches_pattern(const std::string& module, const std::string& target,
                     const std::string& label) {
  const std::string pattern = target.substr(kPattern.size());
  FUSEDMOE_CHECK_SUPPORTED(is_harmless(pattern), kQuantScheme, label, files::quote(target),
                           "a pattern of at most five repetitions, none of them of a group");
  try {
    return std::regex_search(module, std::regex(pattern), std::regex_constants::match_continuous);
  } catch (const std::regex_error& error) {
    throw Error::malformed(label, files::quote(target), "a regular expression");
  }
}

/// 0: not at all; 3: by its name, 2: by a pattern, 1: by its class.
int strength(const nlohmann::json& targets, const std::string& module, const std::string& label) {
  int best = 0;
  for (const nlohmann::json& element : targets) {
    if (!element.is_string()) continue;
    const auto& target = element.get_ref<const std::string&>();
    if (target == module) return 3;
    if (target.starts_with(kPattern)) {
      if (matches_pattern(module, target, label)) best = std::max(best, 2);
    } else if (target == "Linear" || target == "FusedMoE") {
      best = std::max(best, 1);
    }
  }
  return best;
}

/// The groups that hold some modules, and how surely.
struct Match {
  int strength = 0;
  std::set<std::string> groups;
};

Match match(const nlohmann::json& groups, const nlohmann::json* ignore,
            const std::vector<std::string>& modules, const std::string& label) {
  Match result;
  for (const std::string& module : modules) {
    if (ignore && ignore->is_array() && strength(*ignore, module, label) > 1) continue;
    int best = 0;
    std::string best_group;
    for (const auto& [name, group] : groups.items()) {
      const auto targets = group.find("targets");
      const bool listed = targets != group.end() && targets->is_array();
      const int now = listed ? strength(*targets, module, label) : 1;
      if (now <= best) continue;
      best = now;
      best_group = name;
    }
    result.strength += best;
    if (best > 0) result.groups.insert(best_group);
  }
  return result;
}

}  // namespace

ExpertModules expert_modules(const FamilyRow& row, std::int64_t num_layers) {
  ExpertModules result;
  const std::set<std::int64_t> layers{0, num_layers / 2, num_layers - 1};
  for (const std::string& prefix : {row.prefix, std::string("model.layers.")}) {
    for (const std::string& block : row.blocks) {
      for (const ExpertLayout& layout : row.layouts) {
        if (layout.storage != ExpertStorage::kPerExpert) continue;
        std::vector<std::string>& names = result.emplace_back();
        for (const std::int64_t layer : layers) {
          for (const std::string& part : {layout.w1, layout.w3, layout.w2}) {
            if (part.empty()) continue;
            names.push_back(core::format("{}{}.{}", prefix, layer, tensor_name(block, part)));
          }
        }
      }
    }
  }
  return result;
}

std::optional<std::string> group_of_modules(const nlohmann::json& groups,
                                            const nlohmann::json* ignore,
                                            const ExpertModules& modules,
                                            const std::string& label) {
  FUSEDMOE_CHECK_FILE(!groups.empty(), label, "empty", "at least one group");
  for (const auto& [name, group] : groups.items()) {
    FUSEDMOE_CHECK_FILE(group.is_object(), core::format("{}.{}", label, name), group.type_name(),
                        "an object");
  }
  Match best;
  for (const std::vector<std::string>& names : modules) {
    Match now = match(groups, ignore, names, label);
    if (now.strength > best.strength) best = std::move(now);
  }
  FUSEDMOE_CHECK_SUPPORTED(best.groups.size() <= 1, kQuantScheme, label,
                           "experts in the groups " + core::join(best.groups, ", "),
                           "all experts in one group");
  if (best.groups.empty()) return std::nullopt;
  return *best.groups.begin();
}

}  // namespace fusedmoe::checkpoint
