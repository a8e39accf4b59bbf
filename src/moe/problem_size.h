// The sizes of a forward: as its caller gives them, and as the experts see them behind prepare. A
// configuration and a number of tokens make the same (ProblemSize::of).
#pragma once

#include <algorithm>

#include "fusedmoe/experts.h"

namespace fusedmoe::core {

/// Of the caller, from the arguments that prepare gets; without scheme and intermediate size, which
/// no transport reads.
ProblemSize callers_problem(const ForwardArgs& args);

/// Of the experts, from the arguments that they get.
ProblemSize experts_problem(const Experts& experts, const ForwardArgs& args);

/// Rows of all local experts in the standard format, at most.
inline std::int64_t most_expert_rows(const ProblemSize& problem) {
  const std::int64_t slots = problem.num_tokens * problem.topk;
  return problem.max_rows > 0 ? std::min(problem.max_rows, slots) : slots;
}

}  // namespace fusedmoe::core
