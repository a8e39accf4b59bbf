// The choice of tiles on Hopper: a pure function of the problem's sizes.
#pragma once

#include "cuda/mlp/kernel_choice.h"

namespace fusedmoe::cuda::sm90 {

/// KernelFamily::choose() of sm90.
KernelConfig choose_tiles(const MlpShape& shape);

}  // namespace fusedmoe::cuda::sm90
