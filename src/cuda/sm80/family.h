// The families of kernels of mma.sync and cp.async: sm80 of every NVIDIA GPU since compute
// capability 8.0, and sm89 of those whose mma.sync multiplies FP8, for the formats with FP8 rows
// alone.
#pragma once

#include "cuda/mlp/kernel_family.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

const KernelFamily& sm80_family();
const KernelFamily& sm89_family();
/// Of the experts in the registry that run them.
const ExpertsDescriptor& sm80_descriptor();
const ExpertsDescriptor& sm89_descriptor();

/// Of the generated files (cmake/FusedmoeKernels.cmake); none in a build without CUDA.
std::span<const FormatLaunches> sm80_launches();
std::span<const FormatLaunches> sm89_launches();
/// A kernel that does nothing; null in a build without CUDA.
const void* sm80_probe();
const void* sm89_probe();

}  // namespace fusedmoe::cuda
