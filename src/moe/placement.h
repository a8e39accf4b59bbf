// Which rank has which experts, where a caller may leave it to the default.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

/// Throws Error unless each rank has as many experts as before: then they can move in place.
inline void check_same_counts(const ExpertPlacement& before, const ExpertPlacement& now) {
  placement_of(now, before.num_experts(), before.num_ranks());
  const auto counts_of = [](const ExpertPlacement& placement) {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(placement.num_ranks()));
    for (const std::int32_t rank : placement.rank_of()) ++counts[static_cast<std::size_t>(rank)];
    return counts;
  };
  const auto had = counts_of(before), has = counts_of(now);
  for (std::size_t r = 0; r < had.size(); ++r) {
    FUSEDMOE_CHECK(has[r] == had[r], "placement", format("{} experts on rank {}", has[r], r),
                   format("{}, as many as the rank has", had[r]));
  }
}

}  // namespace fusedmoe::core
