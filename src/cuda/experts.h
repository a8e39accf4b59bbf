// The experts on CUDA.
#pragma once

#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

/// It answers without a GPU too, where the configuration names a compute capability.
const ExpertsDescriptor& descriptor();

/// Those of a configuration that the descriptor supports.
std::shared_ptr<const Experts> make_experts(const ExpertsDescriptor& descriptor,
                                            const MoeConfig& config, const Context& context);

}  // namespace fusedmoe::cuda
