// The activations of fusedmoe/weights.h in fp32, for one gate and up pair.
#pragma once

#include "fusedmoe/weights.h"

namespace fusedmoe::cuda {

/// 1 / (1 + exp(-x)), to a few units in the last place: far less than bf16 shows.
__device__ inline float fast_sigmoid(float x) {
  constexpr float kLog2e = 1.44269504f;
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -kLog2e));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}

/// To a relative 2^-11.
__device__ inline float fast_tanh(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// fminf and fmaxf drop a NaN; these pass it through.
__device__ inline float min_or_nan(float x, float limit) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(limit));
  return result;
}
__device__ inline float clamp_or_nan(float x, float limit) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(min_or_nan(x, limit)), "f"(-limit));
  return result;
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
      return a.situ_beta * fast_tanh(__fdividef(g, a.situ_beta)) * fast_sigmoid(g);
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
      return g * (a.situ_linear_beta > 0
                      ? a.situ_linear_beta * fast_tanh(__fdividef(up, a.situ_linear_beta))
                      : up);
    default:
      return g * up;
  }
}

/// function(activation), in whose code for each kind of the list the kind is a constant: the choice
/// is made once instead of for every number. `||` stops at the kind that applies: testing the rest
/// would jump over their code, and each jump waits for an instruction fetch.
template <Activation... kKinds, typename Function>
__device__ __forceinline__ void call_for_kind(const ResolvedActivation& activation,
                                              const Function& function) {
  const auto call_if = [&](Activation kind) {
    if (activation.kind != kind) return false;
    ResolvedActivation known = activation;
    known.kind = kind;
    function(known);
    return true;
  };
  static_cast<void>((call_if(kKinds) || ...));
}

template <typename Function>
__device__ __forceinline__ void call_for_gated(const ResolvedActivation& activation,
                                               const Function& function) {
  using enum Activation;
  call_for_kind<kSilu, kGelu, kGeluTanh, kSwigluOai, kSwigluOaiUninterleave, kSwigluStep, kSitu>(
      activation, function);
}
template <typename Function>
__device__ __forceinline__ void call_for_not_gated(const ResolvedActivation& activation,
                                                   const Function& function) {
  using enum Activation;
  call_for_kind<kSiluNoMul, kGeluNoMul, kGeluTanhNoMul, kRelu2NoMul>(activation, function);
}

}  // namespace fusedmoe::cuda
