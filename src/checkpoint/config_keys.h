// Typed access to the keys of one JSON object of a config.json.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fusedmoe::checkpoint {

/// A key that is absent or null counts as not given. Errors name `<path>.<key>`, the value and what
/// it must be.
class ConfigKeys {
 public:
  explicit ConfigKeys(const nlohmann::json& node, std::string path = "config")
      : node_(&node), path_(std::move(path)) {}

  /// A key is a name, or a path of names: "ffn_config.moe_top_k".
  const nlohmann::json* find(std::string_view key) const;
  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high,
                       std::optional<std::int64_t> otherwise = {}) const;
  bool boolean(std::string_view key, bool otherwise) const;
  float number(std::string_view key, float otherwise) const;
  std::string string(std::string_view key, std::string_view otherwise) const;
  /// The object under the key; nothing if it is not given.
  std::optional<ConfigKeys> object(std::string_view key) const;

  /// Of the keys themselves.
  std::vector<std::string> names() const;

  /// Throws Error for a key that is not null and in none of the lists: it may change what the model
  /// computes. `of`: "a compressed-tensors config".
  void check_known(std::string_view of,
                   std::initializer_list<std::span<const std::string_view>> known) const;
  /// The strings under the key: a list, or one alone; none if it is not given.
  std::vector<std::string> strings(std::string_view key) const;

  const nlohmann::json& node() const { return *node_; }
  const std::string& path() const { return path_; }
  std::string label(std::string_view key) const;
  /// Of a key that nobody listed: in quotes unless it is a word.
  std::string label_of_unknown(const std::string& key) const;
  static std::int64_t integer_of(const nlohmann::json& value, const std::string& label,
                                 std::int64_t low, std::int64_t high);
  static bool boolean_of(const nlohmann::json& value, const std::string& label);
  static float number_of(const nlohmann::json& value, const std::string& label);
  static std::string string_of(const nlohmann::json& value, const std::string& label);
  /// A value for a message.
  static std::string text(const nlohmann::json& value);

  /// "null" for a key whose value is null, else "absent".
  std::string missing(std::string_view key) const;

 private:
  const nlohmann::json* node_;
  std::string path_;
};

/// The keys of objects in the order of the text, which JSON objects do not keep: of each object by
/// its own key. One that is not there is in the order of its names.
using KeyOrder = std::map<std::string, std::vector<std::string>>;

}  // namespace fusedmoe::checkpoint
