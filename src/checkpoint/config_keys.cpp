#include "checkpoint/config_keys.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

bool in_range(const nlohmann::json& value, std::int64_t low, std::int64_t high) {
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(high)) {
    return false;
  }
  const auto number = value.get<std::int64_t>();
  return number >= low && number <= high;
}

}  // namespace

const nlohmann::json* ConfigKeys::find(std::string_view key) const {
  const nlohmann::json* node = node_;
  while (node->is_object()) {
    const std::size_t dot = key.find('.');
    const auto found = node->find(key.substr(0, dot));
    if (found == node->end() || found->is_null()) return nullptr;
    node = &*found;
    if (dot == std::string_view::npos) return node;
    key.remove_prefix(dot + 1);
  }
  return nullptr;
}

std::int64_t ConfigKeys::integer_of(const nlohmann::json& value, const std::string& label,
                                    std::int64_t low, std::int64_t high) {
  FUSEDMOE_CHECK_FILE(value.is_number_integer() && in_range(value, low, high), label, text(value),
                      core::format("an integer from {} to {}", low, high));
  return value.get<std::int64_t>();
}

std::int64_t ConfigKeys::integer(std::string_view key, std::int64_t low, std::int64_t high,
                                 std::optional<std::int64_t> otherwise) const {
  const nlohmann::json* value = find(key);
  if (!value && otherwise) return *otherwise;
  FUSEDMOE_CHECK_FILE(value, label(key), missing(key),
                      core::format("an integer from {} to {}", low, high));
  return integer_of(*value, label(key), low, high);
}

bool ConfigKeys::boolean_of(const nlohmann::json& value, const std::string& label) {
  FUSEDMOE_CHECK_FILE(value.is_boolean(), label, text(value), "true or false");
  return value.get<bool>();
}

float ConfigKeys::number_of(const nlohmann::json& value, const std::string& label) {
  FUSEDMOE_CHECK_FILE(value.is_number() && std::isfinite(value.get<float>()), label, text(value),
                      "a finite number");
  return value.get<float>();
}

std::string ConfigKeys::string_of(const nlohmann::json& value, const std::string& label) {
  FUSEDMOE_CHECK_FILE(value.is_string(), label, text(value), "a string");
  return value.get<std::string>();
}

bool ConfigKeys::boolean(std::string_view key, bool otherwise) const {
  const nlohmann::json* value = find(key);
  return value ? boolean_of(*value, label(key)) : otherwise;
}

float ConfigKeys::number(std::string_view key, float otherwise) const {
  const nlohmann::json* value = find(key);
  return value ? number_of(*value, label(key)) : otherwise;
}

std::string ConfigKeys::string(std::string_view key, std::string_view otherwise) const {
  const nlohmann::json* value = find(key);
  return value ? string_of(*value, label(key)) : std::string(otherwise);
}

std::optional<ConfigKeys> ConfigKeys::object(std::string_view key) const {
  const nlohmann::json* value = find(key);
  if (!value) return std::nullopt;
  FUSEDMOE_CHECK_FILE(value->is_object(), label(key), text(*value), "an object");
  return ConfigKeys(*value, label(key));
}

std::vector<std::string> ConfigKeys::names() const {
  std::vector<std::string> names;
  for (const auto& [key, value] : node_->items()) names.push_back(key);
  return names;
}

void ConfigKeys::check_known(std::string_view of,
                             std::initializer_list<std::span<const std::string_view>> known) const {
  for (const auto& [key, value] : node_->items()) {
    const bool listed = std::any_of(known.begin(), known.end(), [&, &key = key](const auto& list) {
      return std::find(list.begin(), list.end(), key) != list.end();
    });
    if (listed || value.is_null()) continue;
    const std::string name = label_of_unknown(key);
    throw Error::unsupported(
        Reason::kQuantScheme, name,
        core::format("{} is {}: nothing here knows that key of {}, and it may change what the "
                     "layers compute",
                     name, text(value), of));
  }
}

std::vector<std::string> ConfigKeys::strings(std::string_view key) const {
  const nlohmann::json* value = find(key);
  if (!value) return {};
  if (value->is_string()) return {value->get<std::string>()};
  FUSEDMOE_CHECK_FILE(value->is_array(), label(key), text(*value), "a list of strings");
  std::vector<std::string> result;
  for (const nlohmann::json& element : *value) {
    FUSEDMOE_CHECK_FILE(element.is_string(), label(key), "a list with " + text(element),
                        "a list of strings");
    result.push_back(element.get<std::string>());
  }
  return result;
}

std::string ConfigKeys::missing(std::string_view key) const {
  const auto found = node_->find(key);
  return found != node_->end() && found->is_null() ? "null" : "absent";
}

std::string ConfigKeys::label(std::string_view key) const {
  return core::format("{}.{}", path_, key);
}

std::string ConfigKeys::label_of_unknown(const std::string& key) const {
  constexpr std::size_t kLongest = 100;
  const bool word = std::all_of(key.begin(), key.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-';
  });
  return label(word && key.size() <= kLongest ? key : files::quote(key));
}

std::string ConfigKeys::text(const nlohmann::json& value) {
  if (value.is_structured()) return value.type_name();
  constexpr std::size_t kLongest = 200;
  std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() > kLongest) text.replace(kLongest, text.npos, "...");
  return text;
}

}  // namespace fusedmoe::checkpoint
