// The instruction-set levels of this machine.
#pragma once

#include <span>

#include "cpu/kernels.h"

namespace fusedmoe::cpu {

/// The tables of the levels that this machine has, the best first.
std::span<const Kernels* const> levels();

/// Whether this processor is faster if a core reads several tiles of MXFP4 side by side than if it
/// reads one and prefetches the next. As measured: Zen 4 is, Zen 5 is not.
bool prefers_side_by_side();

}  // namespace fusedmoe::cpu
