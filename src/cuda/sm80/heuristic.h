// The choice of tiles of mma.sync: a pure function of the problem's sizes.
#pragma once

#include "cuda/mlp/kernel_choice.h"
#include "cuda/sm80/tiles.h"

namespace fusedmoe::cuda::sm80 {

/// KernelFamily::choose() of sm80 and sm89; `set` are their kernels of the shape's format.
KernelConfig choose_tiles(const MlpShape& shape, const KernelSet& set);

}  // namespace fusedmoe::cuda::sm80
