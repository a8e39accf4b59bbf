// The experts of Hopper GPUs.
#pragma once

#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

const ExpertsDescriptor& sm90_descriptor();

}  // namespace fusedmoe::cuda
