// The compiled instances: one file each, so that they build side by side.
#pragma once

#include "cuda/gemm/grouped_gemm.h"

namespace fusedmoe::cuda {

// Policies of gemm/weights.cuh.
struct Bf16Weights;
struct F16Weights;
struct Mxfp4Weights;

template <typename Weights, int kConfig>
void launch_instance(const GroupedGemm& problem, void* stream);

}  // namespace fusedmoe::cuda
