// A config.json, parsed once, and what it says of each layer.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/family.h"
#include "checkpoint/quant_rules.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

class ParsedConfig {
 public:
  /// `family`: instead of that of the model_type. Throws Error naming the key.
  ParsedConfig(std::string_view config_json, const Family& family);

  const FamilyRow& row() const { return *row_; }
  /// Of lists with one value for each layer, this one's counts. With the scheme of plain weights:
  /// the tensors and `quantization` say what the layer has.
  ModelConfig read(std::optional<std::int64_t> layer) const;
  /// "config.hidden_size": the first of these keys that is given.
  std::string label(const std::vector<std::string>& keys) const;
  /// parse_model_config().
  ModelConfig read_all() const;

 private:
  std::shared_ptr<nlohmann::json> root_;  ///< without quantization_config, which may be large
  std::shared_ptr<const FamilyRow> row_;
  const nlohmann::json* node_ = nullptr;  ///< in it: the object with the model's keys
  std::shared_ptr<const QuantRules> quantization_;
  QuantScheme plain_;  ///< of weights that are not quantized, by the dtype
};

}  // namespace fusedmoe::checkpoint
