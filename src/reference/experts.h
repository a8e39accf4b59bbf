// The specification of Experts in code: plain loops, accumulation in double, any strides.
//
//   x: hidden states, or what their codes stand for: code * scale, not rounded
//   h = act(x gate^T + b, x up^T + b), rounded once to the dtype of the layer; then, where the
//   scheme quantizes activations, quantized and decoded as x was y = h down^T + b standard:
//   out[token] = sum of w y over the token's slots, rounded once batched:  out[expert, i] = y,
//   rounded once; weights are left to finalize
#pragma once

#include <memory>

#include "fusedmoe/experts.h"

namespace fusedmoe::reference {

/// "reference" or "reference_batched".
std::shared_ptr<const ModularExperts> make_experts(ActivationFormat format);

/// "reference_unfused": the outputs of both GEMMs are rounded to the layer's dtype too, and every
/// step's output passes the ExpertsHooks. Standard format. Uses the same packed weights.
std::shared_ptr<const ModularExperts> make_unfused_experts();

}  // namespace fusedmoe::reference
