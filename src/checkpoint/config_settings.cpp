#include "checkpoint/config_settings.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/embedded.h"
#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

std::string plain_text(const nlohmann::json& value) {
  if (value.is_string()) return value.get<std::string>();
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Every key that the family reads.
std::set<std::string> known_keys(const FamilyRow& row) {
  std::set<std::string> known(row.ignores.begin(), row.ignores.end());
  const auto add = [&](const auto&... settings) {
    (known.insert(settings.keys.begin(), settings.keys.end()), ...);
  };
  add(row.num_layers, row.latent_width, row.hidden, row.intermediate, row.num_experts, row.topk,
      row.scoring, row.renormalize, row.scaling, row.num_groups, row.topk_group, row.zero_experts,
      row.sparsemixer, row.has_correction_bias, row.shared_count, row.shared_width,
      row.average_with_shared, row.activation, row.alpha, row.beta, row.limit, row.shared_limit);
  if (row.topk_method) add(*row.topk_method);
  for (const Requirement& required : row.required) known.insert(required.key);
  return known;
}

/// Every entry of a list with one for each layer; else the value itself.
template <typename Predicate>
bool all_values(const nlohmann::json& value, const Predicate& predicate) {
  if (!value.is_array()) return predicate(value);
  return std::all_of(value.begin(), value.end(), predicate);
}

/// Keys that say what the family does anyway.
bool says_the_same(const FamilyRow& row, const std::string& key, const nlohmann::json& value) {
  if (key == "scoring_func" || key == "score_function" || key == "score_func") {
    return value.is_string() && row.scoring.otherwise == value.get<std::string>();
  }
  // GGUF: 1 is softmax, 2 sigmoid, 3 softmax of the chosen.
  if (key == "expert_gating_func") {
    const std::string scoring = row.scoring.otherwise.value_or("");
    return value == (scoring == "softmax" ? 1 : scoring == "sigmoid" ? 2 : 3);
  }
  if (key == "norm_topk_prob" || key == "moe_renormalize" || key == "route_norm" ||
      key == "expert_weights_norm") {
    // Dividing the weights of topk_softmax by their sum, which is 1, changes nothing.
    return row.scoring.otherwise == "topk_softmax" ||
           (value.is_boolean() && row.renormalize.otherwise == value.get<bool>());
  }
  return false;
}

}  // namespace

Settings::Entry Settings::entry_in(const nlohmann::json& list, const std::string& key) const {
  const std::int64_t size = std::ssize(list), at = layer_.value_or(size - 1);
  if (at >= size || at < 0) return {&key, nullptr, false};
  const nlohmann::json& value = list[static_cast<std::size_t>(at)];
  const bool differs =
      std::any_of(list.begin(), list.end(), [&](const auto& other) { return other != value; });
  return {&key, &value, differs};
}

std::optional<Settings::Entry> Settings::entry_of(const std::vector<std::string>& keys,
                                                  bool may_end) const {
  for (const std::string& key : keys) {
    const nlohmann::json* value = keys_.find(key);
    if (!value) continue;
    const Entry entry = value->is_array() ? entry_in(*value, key) : Entry{&key, value, false};
    FUSEDMOE_CHECK_FILE(entry.value || may_end || !layer_, keys_.label(key),
                        core::format("a list of {} entries", value->size()),
                        core::format("a list with an entry for layer {}", *layer_));
    if (entry.value && !entry.value->is_null()) return entry;
  }
  return std::nullopt;
}

std::string Settings::label_of(const std::vector<std::string>& keys) const {
  const auto found = std::find_if(keys.begin(), keys.end(),
                                  [&](const std::string& key) { return keys_.find(key); });
  if (found != keys.end()) return keys_.label(*found);
  return keys.empty() ? "the family" : keys_.label(keys.front());
}

template <typename T>
std::optional<T> Settings::translated(const Setting<T>& setting, const Entry& entry) const {
  if (setting.values.empty()) return std::nullopt;
  const std::string text = plain_text(*entry.value);
  std::string known;
  for (const auto& [from, to] : setting.values) {
    if (from == text) return to;
    known += (known.empty() ? "" : ", ") + from;
  }
  throw Error::unsupported(Reason::kModel, keys_.label(*entry.key), files::quote(text),
                           "one of " + known);
}

std::int64_t Settings::integer(const Setting<std::int64_t>& setting, std::int64_t low,
                               std::int64_t high, std::optional<std::int64_t> otherwise) const {
  const auto entry = entry_of(setting.keys);
  const auto in_range = [&](std::int64_t value) {
    FUSEDMOE_CHECK_FILE(value >= low && value <= high, label(setting),
                        core::to_string(value) + " by the family's description",
                        core::format("an integer from {} to {}", low, high));
    return value;
  };
  if (!entry) {
    if (setting.otherwise) return in_range(*setting.otherwise);
    if (otherwise) return *otherwise;
    return keys_.integer(setting.keys.empty() ? "" : setting.keys.front(), low, high);
  }
  if (const auto value = translated(setting, *entry)) return in_range(*value);
  const std::string label = keys_.label(*entry->key);
  FUSEDMOE_CHECK_SUPPORTED(layer_ || !entry->differs, kModel, label, "a list of different values",
                           "the same value for every layer");
  if (low <= 0 && *entry->value == false) return 0;
  return ConfigKeys::integer_of(*entry->value, label, low, high);
}

bool Settings::boolean(const Setting<bool>& setting, bool otherwise) const {
  const auto entry = entry_of(setting.keys);
  if (!entry) return setting.otherwise.value_or(otherwise);
  if (const auto value = translated(setting, *entry)) return *value;
  return ConfigKeys::boolean_of(*entry->value, keys_.label(*entry->key));
}

float Settings::number(const Setting<float>& setting, float otherwise) const {
  const auto entry = entry_of(setting.keys);
  if (!entry) return setting.otherwise.value_or(otherwise);
  if (const auto value = translated(setting, *entry)) return *value;
  return ConfigKeys::number_of(*entry->value, keys_.label(*entry->key));
}

std::optional<float> Settings::limit(const Setting<float>& setting) const {
  const auto entry = entry_of(setting.keys, true);
  if (!entry) return setting.otherwise;
  const float value = ConfigKeys::number_of(*entry->value, keys_.label(*entry->key));
  if (value == 0 && !setting.otherwise) return std::nullopt;
  FUSEDMOE_CHECK_FILE(value > 0, label(setting), core::to_string(value), "positive");
  return value;
}

std::string Settings::string(const Setting<std::string>& setting) const {
  const auto entry = entry_of(setting.keys);
  if (!entry) return setting.otherwise.value_or("");
  if (const auto value = translated(setting, *entry)) return *value;
  return ConfigKeys::string_of(*entry->value, keys_.label(*entry->key));
}

void check_requirements(const FamilyRow& row, const Settings& settings) {
  static const nlohmann::json kShared = nlohmann::json::parse(embedded_text("shared.json"));
  const ConfigKeys& keys = settings.keys();
  for (const Requirement& required : row.required) {
    const nlohmann::json* value = keys.find(required.key);
    const auto served = [&](const nlohmann::json& each) {
      return std::find(required.values.begin(), required.values.end(), each.dump()) !=
             required.values.end();
    };
    if (value ? all_values(*value, served) : served(nullptr)) continue;
    throw Error::unsupported(
        Reason::kModel, keys.label(required.key),
        core::format("{} of {}: {} is not served: {}", keys.label(required.key), row.name,
                     value ? ConfigKeys::text(*value) : "absent", required.because));
  }
  const std::set<std::string> known = known_keys(row);
  const auto check = [&](const std::string& key, const nlohmann::json& neutral) {
    const nlohmann::json* value = keys.find(key);
    if (!value || known.contains(key) || says_the_same(row, key, *value)) return;
    const bool changes_nothing = all_values(*value, [&](const nlohmann::json& each) {
      return std::find(neutral.begin(), neutral.end(), each) != neutral.end();
    });
    if (changes_nothing) return;
    throw Error::unsupported(
        Reason::kModel, keys.label(key),
        core::format("{} is {}, which models of the family {} do not have: this is another model "
                     "than its model_type says",
                     keys.label(key), ConfigKeys::text(*value), row.name));
  };
  for (const auto& [key, neutral] : kShared["meaning"].items()) check(key, neutral);
  // Names that no family has yet.
  for (const auto& [word, neutral] : kShared["meaning_of_words"].items()) {
    for (const std::string& key : keys.names()) {
      if (key.find(word) != key.npos && !kShared["meaning"].contains(key)) check(key, neutral);
    }
  }
}

}  // namespace fusedmoe::checkpoint
