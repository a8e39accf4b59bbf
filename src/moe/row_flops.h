// What a row costs in an expert.
#pragma once

#include <cstdint>

#include "fusedmoe/weights.h"

namespace fusedmoe::core {

/// Floating-point operations: a multiplication and an addition for each weight.
inline double row_flops(Activation activation, std::int64_t hidden, std::int64_t intermediate) {
  return 2.0 * (is_gated(activation) ? 3 : 2) * static_cast<double>(hidden) *
         static_cast<double>(intermediate);
}

}  // namespace fusedmoe::core
