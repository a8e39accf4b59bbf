// The router on CUDA.
#pragma once

#include "fusedmoe/router.h"

namespace fusedmoe::cuda {

/// As fusedmoe::route() on device memory: views of cuda memory, asynchronous on `stream`.
/// expert_num_tokens: (num_experts) i32 histogram of ids, or undefined.
void route(const RouterConfig& config, const TensorView& logits, const TensorView& correction_bias,
           const Routing& out, const TensorView& expert_num_tokens, Stream stream);

/// As fusedmoe::router_logits() on device memory.
void router_logits(const TensorView& weight, const TensorView& bias, const TensorView& x,
                   const TensorView& logits, Stream stream);

}  // namespace fusedmoe::cuda
