// Which rank has which experts, where a caller may leave it to the default.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/check.h"
#include "fusedmoe/parallel.h"

namespace fusedmoe::core {

/// What is given, or the linear one. Throws Error naming `argument` for one of another layer or of
/// other ranks.
inline ExpertPlacement placement_of(const std::optional<ExpertPlacement>& given,
                                    std::int64_t num_experts, int num_ranks,
                                    const std::string& argument = "placement") {
  if (!given) return ExpertPlacement::linear(num_experts, num_ranks);
  FUSEDMOE_CHECK(given->num_experts() == num_experts && given->num_ranks() == num_ranks, argument,
                 format("{} experts on {} ranks", given->num_experts(), given->num_ranks()),
                 format("{} experts on {} ranks", num_experts, num_ranks));
  return *given;
}

}  // namespace fusedmoe::core
