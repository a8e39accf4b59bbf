// The specification of Experts in code: plain loops, accumulation in double, any strides.
//
//   x: hidden states, or what their codes stand for: code * scale, not rounded
//   h = act(x gate^T + b, x up^T + b), rounded once to the dtype of the layer; then, where the
//   scheme quantizes activations, quantized and decoded as x was y = h down^T + b standard:
//   out[token] = sum of w y over the token's slots, rounded once batched:  out[expert, i] = y,
//   rounded once; weights are left to finalize
#pragma once

#include "fusedmoe/experts.h"

namespace fusedmoe::reference {

/// The outputs of both GEMMs are rounded to the layer's dtype too where the configuration has
/// hooks: every step's output then passes the ExpertsHooks.
const ExpertsDescriptor& descriptor();

}  // namespace fusedmoe::reference
