// How ranks that wait for each other notice that one has given up.
#pragma once

#include <cstdint>
#include <string_view>

#include "fusedmoe/comm.h"
#include "fusedmoe/wait_hook.h"

namespace fusedmoe::comm {

/// How often a wait checks whether another rank has given up.
inline constexpr std::chrono::milliseconds kPollInterval{20};

/// Bytes of the longest text that a rank may gather.
inline constexpr std::uint64_t kMostGathered = std::uint64_t{1} << 26;

/// Tells all who wait at this control plane why `rank` gives up. Without the plane nobody hears it.
void post_failure(ControlPlane& control, int rank, std::string_view reason) noexcept;

}  // namespace fusedmoe::comm
