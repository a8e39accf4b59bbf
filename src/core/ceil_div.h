// Division and rounding that go up, of numbers that are not negative.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fusedmoe::core {

FUSEDMOE_HD constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// To the next multiple of `unit`.
FUSEDMOE_HD constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return ceil_div(value, unit) * unit;
}

}  // namespace fusedmoe::core
