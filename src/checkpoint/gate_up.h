// Gate and up in the rows of one matrix.
#pragma once

#include <utility>

#include "fusedmoe/weights.h"

namespace fusedmoe::checkpoint {

/// Views of the rows of gate and of those of up, with what belongs to them. Throws Error where
/// scales span rows of both.
std::pair<WeightMatrix, WeightMatrix> split_gate_up(const WeightMatrix& both, const QuantKey& key,
                                                    GateUpLayout layout);

}  // namespace fusedmoe::checkpoint
