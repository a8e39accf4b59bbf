// What the implementations serve: every descriptor of the registry asked about every named scheme.
// Needs no device, so every build gives the same page.
#pragma once

#include <string>
#include <string_view>

#include "testing/cases.h"

namespace fusedmoe::testing {

/// A small problem of the scheme, of sizes that every block divides.
Case support_case(const NamedScheme& scheme);
/// The configuration that the page asks about: hidden states in f16 for f16 weights, else in bf16;
/// for experts of a GPU compute capability 9.0.
MoeConfig support_config(const NamedScheme& scheme, std::string_view experts);

/// docs/support-matrix.md
std::string support_matrix_markdown();

}  // namespace fusedmoe::testing
