// Number formats -> `config_groups` of compressed-tensors.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {

/// `config_groups` and `format` for a quantized scheme.
void write_compressed_tensors(const QuantScheme& scheme, nlohmann::json& config);

}  // namespace fusedmoe::checkpoint
