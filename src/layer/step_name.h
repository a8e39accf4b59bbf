// What an exchange of a layer is called: in errors, and in what ranks tell each other of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/format.h"

namespace fusedmoe::layer {

struct StepName {
  std::uint64_t step = 0, layer = 0;
  bool recorded = false;    // by a graph, which replays it in any step
  std::uint64_t moves = 0;  // of experts, before this step
  /// "dispatch of step 12 of layer 3", or, when experts have moved, "... with placement 2"
  std::string of(std::string_view phase) const {
    const std::string in_step = recorded ? "" : core::format(" of step {}", step);
    const std::string moved = moves > 0 ? core::format(" with placement {}", moves) : "";
    return core::format("{}{} of layer {}{}", phase, in_step, layer, moved);
  }
};

}  // namespace fusedmoe::layer
