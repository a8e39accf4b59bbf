// What the implementations serve: every descriptor of the registry asked about every named scheme.
// It needs no device.
#pragma once

#include <string>

#include "testing/cases.h"

namespace fusedmoe::testing {

/// A small problem of the scheme, of sizes that every block divides.
Case support_case(const NamedScheme& scheme);
/// The configuration that `experts` are asked about: hidden states in f16 for f16 weights, else in
/// bf16; for those that do not run on the CPU a device of compute capability 9.0, or 8.9 if they
/// refuse that.
MoeConfig support_config(const NamedScheme& scheme, const ExpertsDescriptor& experts);

/// docs/support-matrix.md
std::string support_matrix_markdown();

}  // namespace fusedmoe::testing
