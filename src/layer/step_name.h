// What an exchange of a layer is called: in errors, and in what ranks tell each other of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/format.h"

namespace fusedmoe::layer {

struct StepName {
  std::uint64_t step = 0, layer = 0;
  bool recorded = false;  // by a graph, which replays it in any step
  /// "dispatch of step 12 of layer 3"
  std::string of(std::string_view phase) const {
    if (recorded) return core::format("{} of layer {}", phase, layer);
    return core::format("{} of step {} of layer {}", phase, step, layer);
  }
};

}  // namespace fusedmoe::layer
