// The compiled instances: one file each, so that they build side by side.
#pragma once

#include "cuda/gemm/grouped_gemm.h"

namespace fusedmoe::cuda {

template <typename Weights, int kConfig>
void launch_instance(const GroupedGemm& problem, int num_blocks, void* stream);

}  // namespace fusedmoe::cuda
