// The router on a CUDA device: the interface of fusedmoe/router.h for device memory.
#pragma once

#include "fusedmoe/router.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// As fusedmoe::route() on device memory, asynchronous on `stream`: `out` from logits (num_tokens,
/// num_choices) f32, bf16 or f16; `correction_bias` (num_choices) f32 may be undefined.
/// To `expert_load` (num_choices) i32, if defined, the histogram of the ids is added: how many
/// tokens chose each expert. Ids are the CPU's, but for scores that agree to fp32 rounding (see
/// scores.cuh). Throws Error before any work on what does not fit, on a custom routing, and on more
/// than 2048 experts or topk above 64.
void route(const RouterConfig& config, const TensorView& logits, const TensorView& correction_bias,
           const Routing& out, const TensorView& expert_load, Stream stream);

/// As fusedmoe::router_logits() on device memory, asynchronous on `stream`: logits (num_tokens,
/// num_experts) f32 = x (num_tokens, hidden) weight^T (num_experts, hidden) + bias (num_experts),
/// which may be undefined. Inputs are f32, bf16 or f16, each of its own dtype; rows of x may have a
/// stride. A row's bits do not depend on num_tokens. Throws Error before any work on what does not
/// fit.
void router_logits(const TensorView& weight, const TensorView& bias, const TensorView& x,
                   const TensorView& logits, Stream stream);

}  // namespace fusedmoe::cuda
