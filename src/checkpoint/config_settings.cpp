#include "checkpoint/config_settings.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

std::string plain_text(const nlohmann::json& value) {
  if (value.is_string()) return value.get<std::string>();
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
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
  const ConfigKeys& keys = settings.keys();
  for (const Requirement& required : row.required) {
    const nlohmann::json* value = keys.find(required.key);
    const auto served = [&](const nlohmann::json& each) {
      return std::find(required.values.begin(), required.values.end(), each.dump()) !=
             required.values.end();
    };
    const bool list = value && value->is_array();
    if (list ? std::all_of(value->begin(), value->end(), served)
             : served(value ? *value : nlohmann::json())) {
      continue;
    }
    throw Error::unsupported(
        Reason::kModel, keys.label(required.key),
        core::format("{} of {}: {} is not served: {}", keys.label(required.key), row.name,
                     value ? ConfigKeys::text(*value) : "absent", required.because));
  }
}

}  // namespace fusedmoe::checkpoint
