// `quantization_config` of a config.json <-> layout and scheme.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>

#include "checkpoint/config_keys.h"
#include "checkpoint/quant_targets.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

struct StoredQuantization {
  CheckpointLayout layout = CheckpointLayout::kPlain;
  QuantScheme scheme;
};

/// What the object says about the experts, whose modules have these names: kPlain if they are not
/// quantized. Throws Error naming the key for anything unknown.
StoredQuantization parse_quantization(const ConfigKeys& config, const ExpertModules& experts);

/// The object that says so, with the modules that are not quantized; nothing when the layout has no
/// words for the scheme.
std::optional<nlohmann::json> quantization_config(const StoredQuantization& quantization,
                                                  std::span<const std::string> plain_modules);

/// The layout in which models of this family and scheme are usually published.
CheckpointLayout usual_layout(const Family& family, const QuantScheme& scheme);

}  // namespace fusedmoe::checkpoint
