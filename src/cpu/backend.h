// core::Backend on the CPU.
#pragma once

#include "moe/backend.h"

namespace fusedmoe::cpu {

const core::Backend& backend();

}  // namespace fusedmoe::cpu
