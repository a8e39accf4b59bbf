// The instruction-set levels of this machine.
#pragma once

#include <span>

#include "cpu/kernels.h"

namespace fusedmoe::cpu {

/// The tables of the levels that this machine has, the best first.
std::span<const Kernels* const> levels();

}  // namespace fusedmoe::cpu
