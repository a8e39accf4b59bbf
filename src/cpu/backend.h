// core::Backend on the CPU.
#pragma once

#include "core/backend.h"

namespace fusedmoe::cpu {

const core::Backend& backend();

}  // namespace fusedmoe::cpu
