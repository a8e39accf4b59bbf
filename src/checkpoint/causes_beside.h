// The same for the linear layers beside the routed experts: shared experts, their gate,
// projections. Whether another format explains their tensors shows in these few alone.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "checkpoint/find_layout.h"

namespace fusedmoe::checkpoint {

struct BesideCause {
  std::string text;         ///< sentences with the keys of the config
  std::size_t misfits = 0;  ///< tensors that they explain
};

/// What the config says otherwise of such layers than their tensors tell; none: it says the truth,
/// or no format that is known fits them.
std::optional<BesideCause> cause_beside_experts(const ModelConfig& model, const Block& block);

}  // namespace fusedmoe::checkpoint
