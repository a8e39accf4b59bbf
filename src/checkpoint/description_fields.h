// Reads the objects of a family's JSON description.
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "checkpoint/family_row.h"
#include "core/check.h"

namespace fusedmoe::checkpoint {

/// One object of a description. Errors name the place; every field must be read.
class Fields {
 public:
  Fields(const nlohmann::json& object, std::string path) : object_(object), path_(std::move(path)) {
    FUSEDMOE_CHECK_FILE(object.is_object(), path_, object.type_name(), "an object");
  }

  const nlohmann::json* find(const std::string& key) {
    read_.push_back(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  void read(const std::string& key, std::string& value) {
    if (const nlohmann::json* json = find(key)) value = text(*json, label(key));
  }
  void read(const std::string& key, bool& value) {
    const nlohmann::json* json = find(key);
    if (!json) return;
    FUSEDMOE_CHECK_FILE(json->is_boolean(), label(key), json->dump(), "true or false");
    value = json->get<bool>();
  }
  void read(const std::string& key, double& value) {
    const nlohmann::json* json = find(key);
    if (!json) return;
    FUSEDMOE_CHECK_FILE(json->is_number(), label(key), json->dump(), "a number");
    value = json->get<double>();
  }
  /// One text, or a list of them.
  void read(const std::string& key, std::vector<std::string>& value) {
    const nlohmann::json* json = find(key);
    if (!json) return;
    value.clear();
    if (!json->is_array()) return value.push_back(text(*json, label(key)));
    for (const nlohmann::json& element : *json) value.push_back(text(element, label(key)));
  }
  /// Under one of two names, not under both.
  void read_either(const std::string& first, const std::string& second, std::string& value) {
    const nlohmann::json *one = find(first), *other = find(second);
    FUSEDMOE_CHECK_IO(!one || !other, path_,
                      core::format("{}: {} cannot be used with {}", path_, first, second));
    if (one || other) value = text(one ? *one : *other, label(one ? first : second));
  }
  /// A constant, or {"key": name or names, "default": value, "values": {text: value}}.
  template <typename T>
  void read(const std::string& key, Setting<T>& setting) {
    const nlohmann::json* json = find(key);
    if (!json) return;
    setting = {};
    if (!json->is_object()) {
      setting.otherwise = constant<T>(*json, label(key));
      return;
    }
    Fields fields(*json, label(key));
    fields.read("key", setting.keys);
    if (const nlohmann::json* otherwise = fields.find("default")) {
      setting.otherwise = constant<T>(*otherwise, fields.label("default"));
    }
    if (const nlohmann::json* values = fields.find("values")) {
      FUSEDMOE_CHECK_FILE(values->is_object(), fields.label("values"), values->dump(), "an object");
      for (const auto& [from, to] : values->items()) {
        setting.values.emplace_back(from, constant<T>(to, fields.label("values")));
      }
    }
    FUSEDMOE_CHECK_FILE(!setting.keys.empty(), label(key), "an object without \"key\"",
                        "a constant, or an object with \"key\"");
    fields.finish();
  }

  Fields object(const std::string& key) {
    static const nlohmann::json kEmpty = nlohmann::json::object();
    const nlohmann::json* json = find(key);
    return {json ? *json : kEmpty, label(key)};
  }

  std::string label(const std::string& key) const { return path_ + "." + key; }

  static std::string text(const nlohmann::json& json, const std::string& label) {
    FUSEDMOE_CHECK_FILE(json.is_string(), label, json.dump(), "a text");
    return json.get<std::string>();
  }

  void finish() const {
    for (const auto& [key, value] : object_.items()) {
      FUSEDMOE_CHECK_IO(
          std::find(read_.begin(), read_.end(), key) != read_.end(), label(key),
          core::format("{}: no such field; there are: {}", label(key), core::join(read_, ", ")));
    }
  }

 private:
  template <typename T>
  static T constant(const nlohmann::json& json, const std::string& label) {
    if constexpr (std::is_same_v<T, std::string>) {
      return text(json, label);
    } else if constexpr (std::is_same_v<T, bool>) {
      FUSEDMOE_CHECK_FILE(json.is_boolean(), label, json.dump(), "true or false");
    } else if constexpr (std::is_same_v<T, std::int64_t>) {
      FUSEDMOE_CHECK_FILE(json.is_number_integer(), label, json.dump(), "an integer");
    } else {
      FUSEDMOE_CHECK_FILE(json.is_number(), label, json.dump(), "a number");
    }
    return json.get<T>();
  }

  const nlohmann::json& object_;
  const std::string path_;
  std::vector<std::string> read_;
};

}  // namespace fusedmoe::checkpoint
