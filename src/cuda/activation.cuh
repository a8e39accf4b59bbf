// The activations of fusedmoe/activation.h in fp32, for one gate and up pair.
#pragma once

#include "fusedmoe/activation.h"

namespace fusedmoe::cuda {

/// 1 / (1 + exp(-x)), to a few units in the last place: far less than bf16 shows.
__device__ inline float fast_sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

// fminf and fmaxf drop a NaN; these pass that of the first argument through.
__device__ inline float min_or_nan(float x, float limit) {
  return x > limit ? limit : x;
}
__device__ inline float clamp_or_nan(float x, float limit) {
  return x > limit ? limit : x < -limit ? -limit : x;
}

/// As fusedmoe::is_gated().
__device__ inline bool is_gated_kind(Activation kind) {
  return kind != Activation::kSiluNoMul && kind != Activation::kGeluNoMul &&
         kind != Activation::kGeluTanhNoMul && kind != Activation::kRelu2NoMul;
}

/// The gate half: everything that does not depend on `up`; all of a non-gated activation.
__device__ inline float activate_gate(const ResolvedActivation& a, float g) {
  switch (a.kind) {
    case Activation::kSilu:
    case Activation::kSiluNoMul:
      g = min_or_nan(g, a.limit);
      return g * fast_sigmoid(g);
    case Activation::kSwigluOai:
    case Activation::kSwigluOaiUninterleave:
      g = min_or_nan(g, a.limit);
      return g * fast_sigmoid(a.alpha * g);
    case Activation::kGelu:
    case Activation::kGeluNoMul:
      return 0.5f * g * (1.0f + erff(g * 0.707106781f));
    case Activation::kGeluTanh:
    case Activation::kGeluTanhNoMul: {
      // (1 + tanh(y)) / 2 = sigmoid(2 y)
      const float y = 0.797884561f * (g + 0.044715f * g * g * g);
      return g * fast_sigmoid(y + y);
    }
    case Activation::kSwigluStep:
      return min_or_nan(g * fast_sigmoid(g), a.limit);
    case Activation::kSitu:
      return a.situ_beta * tanhf(g / a.situ_beta) * fast_sigmoid(g);
    case Activation::kRelu2NoMul:
      g = g < 0.0f ? 0.0f : g;
      return g * g;
  }
  return g;
}

__device__ inline float activate(const ResolvedActivation& a, float gate, float up) {
  const float g = activate_gate(a, gate);
  switch (a.kind) {
    case Activation::kSilu:
    case Activation::kSwigluStep:
      return g * clamp_or_nan(up, a.limit);
    case Activation::kSwigluOai:
    case Activation::kSwigluOaiUninterleave:
      return g * (clamp_or_nan(up, a.limit) + a.beta);
    case Activation::kSitu:
      return g *
             (a.situ_linear_beta > 0 ? a.situ_linear_beta * tanhf(up / a.situ_linear_beta) : up);
    default:
      return g * up;
  }
}

}  // namespace fusedmoe::cuda
