// The experts on CUDA.
#pragma once

#include "cuda/mlp/kernel_family.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

/// Those of a configuration that the descriptor supports, by the kernels of its family. Where it
/// names a compute capability, they plan for the multiprocessors that this stands for, whatever
/// device is here.
std::shared_ptr<const Experts> make_experts(const ExpertsDescriptor& descriptor,
                                            const KernelFamily& family, const MoeConfig& config,
                                            const Context& context);

/// Whether those of this configuration run on a GPU with so many multiprocessors: what a named
/// compute capability stands for may have another number.
bool plans_for(const MoeConfig& config, int multiprocessors);

/// Throws Error unless the device is here and can run the experts.
void check_device(const Experts& experts);

}  // namespace fusedmoe::cuda
