// Both GEMMs of all experts and the activation between, in one launch.
#pragma once

#include "cuda/mlp/kernel_family.h"

namespace fusedmoe::cuda {

/// Enqueues them. Throws Error for a tile shape that does not compute them: a fault of its caller.
void fused_mlp(const FusedMlpParams& params, const KernelFamily& family, const WeightFormat& format,
               const TileShape& tile, const Stream& stream);

}  // namespace fusedmoe::cuda
