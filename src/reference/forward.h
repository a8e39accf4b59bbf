// One forward of the reference experts.
#pragma once

#include <cstddef>

#include "fusedmoe/experts.h"

namespace fusedmoe::reference {

struct ScratchBytes {
  std::size_t workspace13, workspace2;
};
ScratchBytes scratch_bytes(const Experts& experts, const ProblemSize& problem);

/// hidden_states -> fused_output, with ids and weights.
void run_forward(const Experts& experts, const ForwardArgs& args);

}  // namespace fusedmoe::reference
