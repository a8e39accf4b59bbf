// The compute capability of a device.
#pragma once

#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// Of a device that has no device_problem(), as major * 10 + minor; 0 of another.
int compute_capability(Device device);

}  // namespace fusedmoe::cuda
