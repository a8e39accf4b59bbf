// The kernels of Hopper: wgmma, TMA, clusters.
#pragma once

#include "cuda/mlp/kernel_family.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

const KernelFamily& sm90_family();
/// Of the experts in the registry that run them.
const ExpertsDescriptor& sm90_descriptor();

/// Of the generated files (cmake/FusedmoeKernels.cmake); none in a build without CUDA.
std::span<const FormatLaunches> sm90_launches();
/// A kernel that does nothing; null in a build without CUDA.
const void* sm90_probe();

}  // namespace fusedmoe::cuda
