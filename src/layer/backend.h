// The backend of a device.
#pragma once

#include "fusedmoe/experts.h"
#include "moe/backend.h"

namespace fusedmoe::layer {

/// The one that belongs to these experts; for experts that the registry does not know, that of the
/// device. Throws Error for a CUDA device in a build without CUDA.
const core::Backend& backend_of(const ExpertsDescriptor& experts, Device device);
const core::Backend& backend_of(Device device);

}  // namespace fusedmoe::layer
