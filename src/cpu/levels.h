// The instruction-set levels of this machine.
#pragma once

#include <span>

#include "cpu/kernels.h"

namespace fusedmoe::cpu {

/// The tables of the levels that this machine has, the best first.
std::span<const Kernels* const> levels();

/// Whether this processor brings more cache lines by itself, where a core reads several tiles side
/// by side, than by prefetching the next tile: AMD's Zen 4. Zen 5 does not.
bool prefers_side_by_side();

}  // namespace fusedmoe::cpu
