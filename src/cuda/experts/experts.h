// The experts on CUDA.
#pragma once

#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

/// It answers without a GPU too, where the configuration names a compute capability.
const ExpertsDescriptor& descriptor();

/// Those of a configuration that the descriptor supports. Where it names a compute capability, they
/// plan for the multiprocessors of an H200, whatever device is here.
std::shared_ptr<const Experts> make_experts(const ExpertsDescriptor& descriptor,
                                            const MoeConfig& config, const Context& context);

/// Whether those of this configuration run on a GPU with so many multiprocessors: what a named
/// compute capability stands for may have another number.
bool plans_for(const MoeConfig& config, int multiprocessors);

/// Throws Error unless the device is here and can run the experts.
void check_device(const Experts& experts);

}  // namespace fusedmoe::cuda
