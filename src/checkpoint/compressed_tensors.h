// `config_groups` of compressed-tensors <-> number formats.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "checkpoint/config_keys.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {

/// The scheme of the experts: of the group whose targets name them, else of the one for every
/// linear layer.
QuantScheme parse_compressed_tensors(const ConfigKeys& config);

/// `config_groups` and `format` for a quantized scheme.
void write_compressed_tensors(const QuantScheme& scheme, nlohmann::json& config);

}  // namespace fusedmoe::checkpoint
