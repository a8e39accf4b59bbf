// What every way to join asks of its arguments.
#pragma once

#include <chrono>

#include "core/check.h"

namespace fusedmoe::comm {

/// Throws Error for a rank that is none, and for a timeout whose deadline no clock can tell.
inline void check_ranks(int rank, int size, std::chrono::milliseconds timeout) {
  constexpr std::chrono::hours kYear(24 * 365);
  FUSEDMOE_CHECK(size >= 1 && rank >= 0 && rank < size, "rank",
                 core::format("{} of {}", rank, size), "at least 0 and below the number of ranks");
  FUSEDMOE_CHECK(timeout.count() > 0 && timeout <= kYear, "timeout",
                 core::format("{} ms", timeout.count()), "positive, at most a year");
}

}  // namespace fusedmoe::comm
