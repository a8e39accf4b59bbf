// How far results of two implementations may lie apart.
#pragma once

#include <cstdint>

#include "fusedmoe/quant.h"

namespace fusedmoe::testing {

/// Largest Difference::max_norm_relative of a layer in `dtype` whose experts have `intermediate`
/// features: the bound of the golden tests for bf16, and likewise for the sums of f32 and the
/// rounding of f16; more where activations are quantized.
double error_bound(DType dtype, const QuantScheme& scheme, std::int64_t intermediate);

}  // namespace fusedmoe::testing
