// What a family's settings amount to in one config.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/config_keys.h"
#include "checkpoint/family.h"

namespace fusedmoe::checkpoint {

/// Each throws Error naming the key, the value and what it must be. A list holds one value for each
/// layer: that of `layer` counts; without a layer the last one, and sizes must be equal in all.
class Settings {
 public:
  explicit Settings(ConfigKeys keys, std::optional<std::int64_t> layer = {})
      : keys_(std::move(keys)), layer_(layer) {}

  const ConfigKeys& keys() const { return keys_; }

  /// `otherwise` if neither the config nor the family's description has a value; Error if that is
  /// not given either. Reads false as 0 where 0 is allowed.
  std::int64_t integer(const Setting<std::int64_t>& setting, std::int64_t low, std::int64_t high,
                       std::optional<std::int64_t> otherwise = {}) const;
  bool boolean(const Setting<bool>& setting, bool otherwise = false) const;
  float number(const Setting<float>& setting, float otherwise) const;
  std::string string(const Setting<std::string>& setting) const;
  /// A positive limit, or none: null, a list that ends before the layer, and 0 unless the family
  /// has a limit of its own.
  std::optional<float> limit(const Setting<float>& setting) const;

  /// Whether the config or the description has a value.
  template <typename T>
  bool given(const Setting<T>& setting) const {
    return setting.otherwise || entry_of(setting.keys);
  }
  /// "config.topk": the key that counts.
  template <typename T>
  std::string label(const Setting<T>& setting) const {
    return label_of(setting.keys);
  }
  std::string label_of(const std::vector<std::string>& keys) const;

 private:
  /// A key that is given, and its value for the layer.
  struct Entry {
    const std::string* key;
    const nlohmann::json* value;
    bool differs;  ///< from that of another layer
  };
  /// Of the first key that is given. `may_end`: a list that ends before the layer has none for it.
  std::optional<Entry> entry_of(const std::vector<std::string>& keys, bool may_end = false) const;
  Entry entry_in(const nlohmann::json& list, const std::string& key) const;
  template <typename T>
  std::optional<T> translated(const Setting<T>& setting, const Entry& entry) const;

  ConfigKeys keys_;
  std::optional<std::int64_t> layer_;
};

/// Throws Error for a value that the family cannot serve.
void check_requirements(const FamilyRow& row, const Settings& settings);

}  // namespace fusedmoe::checkpoint
