// fusedmoe::route() on the threads of an executor.
#pragma once

#include "fusedmoe/router.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::core {

void route(Executor& executor, const RouterConfig& config, const TensorView& logits,
           const TensorView& correction_bias, const Routing& out);

}  // namespace fusedmoe::core
