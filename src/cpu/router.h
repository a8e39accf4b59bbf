// fusedmoe::router_logits() on the threads of an executor.
#pragma once

#include "fusedmoe/router.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::cpu {

void router_logits(Executor& executor, const RouterWeights& weights, const TensorView& x,
                   const TensorView& logits);

}  // namespace fusedmoe::cpu
