// The CUDA device that the calling thread's launches and allocations go to.
#pragma once

#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

Device current_device();

}  // namespace fusedmoe::cuda
