// core::Backend on CUDA.
#pragma once

#include "moe/backend.h"

namespace fusedmoe::cuda {

/// Throws Error in a build without CUDA.
const core::Backend& backend();

}  // namespace fusedmoe::cuda
