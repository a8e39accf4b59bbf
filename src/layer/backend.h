// The backend of a device.
#pragma once

#include "moe/backend.h"

namespace fusedmoe::layer {

/// Throws Error for a CUDA device in a build without CUDA.
const core::Backend& backend_of(Device device);

}  // namespace fusedmoe::layer
