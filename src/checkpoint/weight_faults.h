// Faults of weights that were read from a checkpoint, under the names of their tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/block_tensors.h"

namespace fusedmoe::checkpoint {

/// How experts lie in the block that they were read from.
struct ExpertNames {
  const BlockLayout& layout;
  std::function<std::vector<LinearLayer>(std::int64_t expert)> layers_of;
  const LinearStorage &first, &down;
};

/// weights.validate(), but an Error about the contents of a matrix names the tensor that holds
/// them, behind `prefix`. `experts`: the number of each one.
void validate_stored(const ExpertWeights& weights, const std::vector<std::int32_t>& experts,
                     const ExpertNames& names, const std::string& prefix);

}  // namespace fusedmoe::checkpoint
