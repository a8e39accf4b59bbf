// The CUDA device that the calling thread's launches and allocations go to, and how large one is.
#pragma once

#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

Device current_device();

/// Multiprocessors of a device; asked of the driver once.
int multiprocessor_count(Device device);

}  // namespace fusedmoe::cuda
