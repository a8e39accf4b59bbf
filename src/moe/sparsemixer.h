// PhiMoE's router.
#pragma once

#include "fusedmoe/router.h"

namespace fusedmoe {

/// Chooses the expert of the largest logit m, then that of the largest of the rest. The weight of
/// each is its softmax over the experts that were not chosen before and whose logit x is near m:
/// (m - x) / max(|x|, m) <= 2 * jitter. Ties go to the lowest index; a logit that is not finite
/// counts as -infinity, and with none left the weight is 0. Source: arXiv 2409.12136.
CustomRouting sparsemixer(float jitter);

}  // namespace fusedmoe
