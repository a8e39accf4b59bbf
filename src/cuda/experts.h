// The experts on CUDA.
#pragma once

#include <memory>
#include <vector>

#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

/// Best first; none in a build without CUDA. They are there without a GPU too, and then answer a
/// configuration with Reason::kDevice.
std::vector<std::shared_ptr<const Experts>> make_all_experts();

}  // namespace fusedmoe::cuda
