// The choice of tiles of mma.sync: a pure function of the problem's sizes.
#pragma once

#include "cuda/mlp/kernel_choice.h"

namespace fusedmoe::cuda::sm80 {

/// KernelFamily::choose() of sm80.
KernelConfig choose_tiles(const MlpShape& shape);

}  // namespace fusedmoe::cuda::sm80
