// The two halves of the router on the threads of an executor; see fusedmoe/router.h.
#pragma once

#include "fusedmoe/router.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::cpu {

void router_logits(Executor& executor, const RouterWeights& weights, const TensorView& x,
                   const TensorView& logits);
void route(Executor& executor, const RouterConfig& config, const TensorView& logits,
           const TensorView& correction_bias, const Routing& out);

}  // namespace fusedmoe::cpu
