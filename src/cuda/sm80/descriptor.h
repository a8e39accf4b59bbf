// The experts of NVIDIA GPUs since Ampere.
#pragma once

#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

const ExpertsDescriptor& sm80_descriptor();

}  // namespace fusedmoe::cuda
