// How far results of two implementations may lie apart.
#pragma once

#include <cstdint>

#include "fusedmoe/quant.h"

namespace fusedmoe::testing {

/// From a code to the next, at most, relative to the number; of integers, to the largest one.
double code_step(const QuantKey& key);

/// Largest Difference::max_norm_relative of a layer in `dtype` whose experts have `intermediate`
/// features: the bound of the golden tests for bf16, and likewise for the sums of f32 and the
/// rounding of f16; more where activations are quantized.
double error_bound(DType dtype, const QuantScheme& scheme, std::int64_t intermediate);

}  // namespace fusedmoe::testing
