// What a family's settings amount to in one config.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/config_keys.h"
#include "checkpoint/family.h"

namespace fusedmoe::checkpoint {

/// Each throws Error naming the key, the value and what it must be. A list of equal values, one for
/// each layer, counts as that value.
class Settings {
 public:
  explicit Settings(ConfigKeys keys) : keys_(std::move(keys)) {}

  const ConfigKeys& keys() const { return keys_; }

  /// Without a key in the config and a value in the description: `otherwise`, else Error.
  std::int64_t integer(const Setting<std::int64_t>& setting, std::int64_t low, std::int64_t high,
                       std::optional<std::int64_t> otherwise = {}) const;
  bool boolean(const Setting<bool>& setting, bool otherwise = false) const;
  float number(const Setting<float>& setting, float otherwise) const;
  std::string string(const Setting<std::string>& setting) const;

  /// Whether the config or the description has a value.
  template <typename T>
  bool given(const Setting<T>& setting) const {
    return setting.otherwise || key_of(setting.keys);
  }
  /// "config.topk": the key that counts.
  template <typename T>
  std::string label(const Setting<T>& setting) const {
    return label_of(setting.keys);
  }

 private:
  const std::string* key_of(const std::vector<std::string>& keys) const;
  std::string label_of(const std::vector<std::string>& keys) const;
  template <typename T>
  std::optional<T> translated(const Setting<T>& setting, const std::string& key) const;

  ConfigKeys keys_;
};

/// Throws Error for a value that the family cannot serve, and for a key that means something in
/// other families and nothing in this one: the model is then not what its model_type says.
void check_requirements(const FamilyRow& row, const Settings& settings);

}  // namespace fusedmoe::checkpoint
