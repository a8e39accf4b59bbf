// The experts on CUDA.
#pragma once

#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

/// It answers without a GPU too, where the configuration names a compute capability.
const ExpertsDescriptor& descriptor();

}  // namespace fusedmoe::cuda
