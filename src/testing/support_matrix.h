// What every implementation of this build serves: the registry asked about every named scheme.
#pragma once

#include <string>
#include <vector>

#include "fusedmoe/selection.h"
#include "testing/cases.h"

namespace fusedmoe::testing {

/// One implementation, in its activation format, and one scheme.
struct SupportRow {
  std::string scheme;
  Case spec;  ///< a small problem of that scheme, of sizes that every block divides
  Candidate candidate;
};

/// Implementations on the CPU in order of preference, each with all schemes; what a build or a
/// machine has besides does not show.
std::vector<SupportRow> support_matrix();

/// docs/support-matrix.md
std::string support_matrix_markdown();

}  // namespace fusedmoe::testing
