// How ranks that wait for each other notice that one has given up.
#pragma once

#include <string_view>

#include "fusedmoe/comm.h"

namespace fusedmoe::comm {

/// How often a wait looks at what else may have happened.
inline constexpr std::chrono::milliseconds kLook{20};

/// Tells all who wait at this control plane why `rank` gives up. Without the plane nobody hears it.
void tell_failure(ControlPlane& control, int rank, std::string_view reason) noexcept;

}  // namespace fusedmoe::comm
