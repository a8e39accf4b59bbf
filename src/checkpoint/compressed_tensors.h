// `config_groups` of compressed-tensors <-> number formats.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "checkpoint/config_keys.h"
#include "checkpoint/quant_targets.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {

/// The scheme of the experts, whose modules have these names; nothing if they are not quantized.
std::optional<QuantScheme> parse_compressed_tensors(const ConfigKeys& config,
                                                    const ExpertModules& experts);

/// `config_groups` and `format` for a quantized scheme.
void write_compressed_tensors(const QuantScheme& scheme, nlohmann::json& config);

}  // namespace fusedmoe::checkpoint
