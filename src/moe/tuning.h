// Which tile plan experts are asked to run. Experts that have tile plans look here before they
// choose by themselves; src/io/tuned_plans.cpp answers.
#pragma once

#include <optional>
#include <string_view>

#include "tools/tune.h"

namespace fusedmoe::core {

/// Name that the innermost PinnedTilePlan of the calling thread holds.
std::optional<std::string_view> pinned_tile_plan();

/// The pinned name, else that of tuned_plans() for the problem, else empty. Allocates nothing.
std::string_view preferred_tile_plan(std::string_view device, std::string_view experts,
                                     const ProblemSize& problem);

}  // namespace fusedmoe::core
