// Calibration: how large the activations of a layer become, for static scales.
#pragma once

#include <vector>

#include "fusedmoe/layer.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// Largest magnitudes of one layer's activations on some hidden states. A static scale is such a
/// number divided by 448 (E4M3) or 2688 (the global scale of NVFP4).
struct ActivationRange {
  float hidden = 0;                 ///< of all tokens, before GEMM 1
  std::vector<float> intermediate;  ///< before GEMM 2, of each expert's tokens; 0: it had none
};

/// Routes hidden_states (num_tokens, hidden) f32, f16 or bf16 as the layer does and computes every
/// expert's activated rows in fp32 on its decoded weights. Memory: two matrices of one expert.
/// Throws Error for values that are not finite and for what does not fit.
ActivationRange activation_range(const LayerWeights& layer, const TensorView& hidden_states);

}  // namespace fusedmoe
