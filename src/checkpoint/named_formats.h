// The formats of weights that files hold, and the sentence for a config that names another one than
// the tensors have.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/quant_rules.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

/// A format of weights, and the scheme that is known by it.
struct NamedFormat {
  CheckpointLayout layout;
  QuantScheme scheme;
};

/// Every one of each layout; those that resemble this one most come first.
std::vector<NamedFormat> formats_like(const NamedFormat& like);

/// "config.quantization_config says that the experts are int8_g32, but their tensors are int4_g32
/// (4 bits)". `said`, of a config with this layout, without a scheme: it quantizes no such module.
std::string contradiction(std::string_view modules, const ModuleFormat& said,
                          CheckpointLayout layout, const NamedFormat& found);

}  // namespace fusedmoe::checkpoint
