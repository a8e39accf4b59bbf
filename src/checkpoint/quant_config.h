// `quantization_config` of a config.json <-> rules for modules.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/config_keys.h"
#include "checkpoint/quant_rules.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

struct StoredQuantization {
  CheckpointLayout layout = CheckpointLayout::kPlain;
  QuantScheme scheme;
};

/// Those of a config.json in which order matters.
KeyOrder key_order(std::string_view config_json);

/// What the object says about each module. Throws Error naming the key for anything that may change
/// the arithmetic and that nothing here knows; formats of single modules throw when an expert has
/// them. `expert_dtype`: of DeepSeek-V4's routed experts, "fp4" or "fp8", which the model's config
/// names.
QuantRules parse_quantization(const ConfigKeys& config, const KeyOrder& order = {},
                              std::string_view expert_dtype = {});

/// The object that says so, with the modules that are not quantized; nothing when the layout has no
/// words for the scheme.
std::optional<nlohmann::json> quantization_config(const StoredQuantization& quantization,
                                                  std::span<const std::string> plain_modules);

/// The layout in which models of this family and scheme are usually published.
CheckpointLayout usual_layout(const Family& family, const QuantScheme& scheme);

}  // namespace fusedmoe::checkpoint
