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
      row.average_with_shared, row.activation, row.alpha, row.beta, row.limit);
  if (row.topk_method) add(*row.topk_method);
  for (const Requirement& required : row.required) known.insert(required.key);
  return known;
}

/// Keys that say what the family does anyway.
bool says_the_same(const FamilyRow& row, const std::string& key, const nlohmann::json& value) {
  if (key == "scoring_func") {
    return value.is_string() && row.scoring.otherwise == value.get<std::string>();
  }
  // GGUF: 1 is softmax, 2 sigmoid, 3 softmax of the chosen.
  if (key == "expert_gating_func") {
    const std::string scoring = row.scoring.otherwise.value_or("");
    return value == (scoring == "softmax" ? 1 : scoring == "sigmoid" ? 2 : 3);
  }
  if (key == "norm_topk_prob" || key == "moe_renormalize" || key == "expert_weights_norm") {
    // Dividing the weights of topk_softmax by their sum, which is 1, changes nothing.
    return row.scoring.otherwise == "topk_softmax" ||
           (value.is_boolean() && row.renormalize.otherwise == value.get<bool>());
  }
  return false;
}

}  // namespace

const std::string* Settings::key_of(const std::vector<std::string>& keys) const {
  const auto found = std::find_if(keys.begin(), keys.end(),
                                  [&](const std::string& key) { return keys_.find(key); });
  return found == keys.end() ? nullptr : &*found;
}

std::string Settings::label_of(const std::vector<std::string>& keys) const {
  const std::string* key = key_of(keys);
  if (key) return keys_.label(*key);
  return keys.empty() ? "the family" : keys_.label(keys.front());
}

template <typename T>
std::optional<T> Settings::translated(const Setting<T>& setting, const std::string& key) const {
  if (setting.values.empty()) return std::nullopt;
  const std::string text = plain_text(*keys_.find(key));
  std::string known;
  for (const auto& [from, to] : setting.values) {
    if (from == text) return to;
    known += (known.empty() ? "" : ", ") + from;
  }
  throw Error::unsupported(Reason::kModel, keys_.label(key), files::quote(text), "one of " + known);
}

std::int64_t Settings::integer(const Setting<std::int64_t>& setting, std::int64_t low,
                               std::int64_t high, std::optional<std::int64_t> otherwise) const {
  const std::string* key = key_of(setting.keys);
  const auto in_range = [&](std::int64_t value) {
    FUSEDMOE_CHECK_FILE(value >= low && value <= high, label(setting),
                        core::to_string(value) + " by the family's description",
                        core::format("an integer from {} to {}", low, high));
    return value;
  };
  if (!key) {
    if (setting.otherwise) return in_range(*setting.otherwise);
    if (otherwise) return *otherwise;
    return keys_.integer(setting.keys.empty() ? "" : setting.keys.front(), low, high);
  }
  if (const auto value = translated(setting, *key)) return in_range(*value);
  const nlohmann::json& value = *keys_.find(*key);
  if (!value.is_array()) return keys_.integer(*key, low, high);
  FUSEDMOE_CHECK_SUPPORTED(
      !value.empty() &&
          std::all_of(value.begin(), value.end(), [&](const auto& v) { return v == value[0]; }),
      kModel, keys_.label(*key), "a list of different values", "the same value for every layer");
  return ConfigKeys::integer_of(value[0], keys_.label(*key), low, high);
}

bool Settings::boolean(const Setting<bool>& setting, bool otherwise) const {
  const std::string* key = key_of(setting.keys);
  if (!key) return setting.otherwise.value_or(otherwise);
  if (const auto value = translated(setting, *key)) return *value;
  return keys_.boolean(*key, otherwise);
}

float Settings::number(const Setting<float>& setting, float otherwise) const {
  const std::string* key = key_of(setting.keys);
  if (!key) return setting.otherwise.value_or(otherwise);
  if (const auto value = translated(setting, *key)) return *value;
  return keys_.number(*key, otherwise);
}

std::string Settings::string(const Setting<std::string>& setting) const {
  const std::string* key = key_of(setting.keys);
  if (!key) return setting.otherwise.value_or("");
  if (const auto value = translated(setting, *key)) return *value;
  return keys_.string(*key, "");
}

void check_requirements(const FamilyRow& row, const Settings& settings) {
  static const nlohmann::json kMeaning =
      nlohmann::json::parse(embedded_text("shared.json"))["meaning"];
  const ConfigKeys& keys = settings.keys();
  for (const Requirement& required : row.required) {
    const nlohmann::json* value = keys.find(required.key);
    const std::string text = value ? value->dump() : "null";
    const bool served =
        std::find(required.values.begin(), required.values.end(), text) != required.values.end();
    if (served) continue;
    throw Error::unsupported(
        Reason::kModel, keys.label(required.key),
        core::format("{} of {}: {} is not served: {}", keys.label(required.key), row.name,
                     value ? ConfigKeys::text(*value) : "absent", required.because));
  }
  const std::set<std::string> known = known_keys(row);
  for (const auto& [key, neutral] : kMeaning.items()) {
    const nlohmann::json* value = keys.find(key);
    if (!value || known.contains(key) || says_the_same(row, key, *value)) continue;
    if (std::find(neutral.begin(), neutral.end(), *value) != neutral.end()) continue;
    throw Error::unsupported(
        Reason::kModel, keys.label(key),
        core::format("{} is {}, which models of the family {} do not have: this is another model "
                     "than its model_type says",
                     keys.label(key), ConfigKeys::text(*value), row.name));
  }
}

}  // namespace fusedmoe::checkpoint
