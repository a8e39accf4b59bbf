// The weights of a case; see cases.h.
#pragma once

#include <cstdint>

#include "testing/case.h"
#include "testing/random.h"

namespace fusedmoe::testing {

/// Whether this rank has the expert of that global id.
bool is_local(const Case& spec, std::int64_t expert);
std::int64_t num_local_experts(const Case& spec);

ExpertWeights make_weights(const Case& spec, Random& random);

}  // namespace fusedmoe::testing
