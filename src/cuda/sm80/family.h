// The kernels of every NVIDIA GPU since compute capability 8.0: mma.sync and cp.async.
#pragma once

#include "cuda/mlp/kernel_family.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

const KernelFamily& sm80_family();
/// Of the experts in the registry that run them.
const ExpertsDescriptor& sm80_descriptor();

/// Of the generated files (cmake/FusedmoeKernels.cmake); none in a build without CUDA.
std::span<const FormatLaunches> sm80_launches();
/// A kernel that does nothing; null in a build without CUDA.
const void* sm80_probe();

}  // namespace fusedmoe::cuda
