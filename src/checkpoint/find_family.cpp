#include "checkpoint/find_family.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "checkpoint/config_keys.h"
#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

/// "Qwen3_5MoeForCausalLM" and "qwen3_5_moe" -> "qwen35moe".
std::string stem(std::string_view text) {
  text = text.substr(0, text.find("For"));
  if (text.ends_with("Model")) text.remove_suffix(5);
  std::string result;
  for (const char c : text) {
    if (std::isalnum(static_cast<unsigned char>(c))) {
      result += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  return result;
}

bool has_stem(const FamilyRow& row, const std::string& wanted) {
  const auto same = [&](const std::string& text) { return stem(text) == wanted; };
  return same(row.name) || std::any_of(row.types.begin(), row.types.end(), same) ||
         std::any_of(row.architectures.begin(), row.architectures.end(), same);
}

// A config whose model_type was changed still says what the model is.
void check_architecture(const nlohmann::json& root, const FamilyRow& row) {
  // A multimodal model may hold a language model of another family.
  const auto own_type = root.find("model_type");
  const bool nested = root.contains("text_config") && own_type != root.end();
  const auto list = root.find("architectures");
  if (list == root.end() || !list->is_array()) return;
  for (const nlohmann::json& element : *list) {
    if (!element.is_string()) continue;
    const std::string wanted = stem(element.get<std::string>());
    if (has_stem(row, wanted)) return;
    if (nested && own_type->is_string() && stem(own_type->get<std::string>()) == wanted) return;
    for (const auto& other : family_table()) {
      if (!has_stem(*other, wanted)) continue;
      throw Error::unsupported(
          Reason::kModel, "config.architectures",
          core::format("config.architectures says {}, a model of the family {}, and "
                       "config.model_type says {}: one of the two is wrong",
                       files::quote(element.get<std::string>()), other->name, row.name));
    }
  }
}

FoundFamily served(std::shared_ptr<const FamilyRow> row, const nlohmann::json& node) {
  if (!row->refused.empty()) {
    throw Error::unsupported(
        Reason::kModel, "config.model_type",
        core::format("models of the family {} are not served: {}", row->name, row->refused));
  }
  return {std::move(row), &node};
}

/// The object at the description's path, else text_config, else the root.
const nlohmann::json& node_of(const nlohmann::json& root, const FamilyRow& row) {
  const ConfigKeys keys(root);
  if (!row.config.empty()) {
    const nlohmann::json* node = keys.find(row.config);
    if (node && node->is_object()) return *node;
  }
  const nlohmann::json* nested = keys.find("text_config");
  return nested ? *nested : root;
}

}  // namespace

FoundFamily find_family_of(const nlohmann::json& root, std::shared_ptr<const FamilyRow> given) {
  const ConfigKeys keys(root);
  const nlohmann::json* nested = keys.find("text_config");
  FUSEDMOE_CHECK_FILE(!nested || nested->is_object(), "config.text_config",
                      ConfigKeys::text(*nested), "an object");
  if (given) {
    const nlohmann::json& node = node_of(root, *given);
    return served(std::move(given), node);
  }
  std::string types = keys.string("model_type", "");
  if (nested) {
    // Multimodal models keep the language model's keys in `text_config`.
    const std::string nested_type = ConfigKeys(*nested).string("model_type", "");
    if (auto row = find_family(nested_type)) {
      check_architecture(root, *row);
      return served(std::move(row), *nested);
    }
    types += " with text_config of " + nested_type;
  }
  if (auto row = find_family(keys.string("model_type", ""))) {
    check_architecture(root, *row);
    const nlohmann::json& node = node_of(root, *row);
    return served(std::move(row), node);
  }
  const bool has_type = keys.find("model_type");
  throw Error::unsupported(Reason::kModel, "config.model_type",
                           has_type || nested ? files::quote(types) : keys.missing("model_type"),
                           "a family that is described: fusedmoe families lists them, and "
                           "--family gives another");
}

}  // namespace fusedmoe::checkpoint
