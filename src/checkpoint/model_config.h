// config.json -> what it says of one layer.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

/// `family`, or without one that of the model_type. Throws Error naming the key.
Family family_of(std::string_view config_json, const Family& family);

/// parse_model_config() of one layer: of lists with one value for each, the layer's counts.
ModelConfig read_model_config(std::string_view config_json, const Family& family,
                              std::optional<std::int64_t> layer);

}  // namespace fusedmoe::checkpoint
