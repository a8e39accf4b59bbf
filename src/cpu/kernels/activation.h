// The activations of fusedmoe/weights.h on fp32 vectors, for an instruction-set policy S (see
// cpu/kernels/simd_vector.h). Included by isa_*.cpp only.
#pragma once

#include <cmath>

#include "cpu/kernels.h"

namespace fusedmoe::cpu {
namespace {

// S::min and S::max return the second operand when one is NaN, so constants come first and NaN
// passes through.

/// exp with a relative error below 2e-7; infinity from about 88.4 on, 1.6e-38 below -87.
template <class S>
inline typename S::F exp_approx(typename S::F x) {
  using F = typename S::F;
  x = S::max(S::set1(-87.0f), S::min(S::set1(89.0f), x));
  // x = n ln 2 + f with |f| <= ln(2) / 2; ln 2 split so that n * high is exact.
  const F n = S::round(x * S::set1(1.44269504f));
  const F f = S::fma(n, S::set1(2.12194440e-4f), S::fma(n, S::set1(-0.693359375f), x));
  F p = S::set1(1.0f / 5040);
  p = S::fma(p, f, S::set1(1.0f / 720));
  p = S::fma(p, f, S::set1(1.0f / 120));
  p = S::fma(p, f, S::set1(1.0f / 24));
  p = S::fma(p, f, S::set1(1.0f / 6));
  p = S::fma(p, f, S::set1(0.5f));
  p = S::fma(p, f, S::set1(1.0f));
  p = S::fma(p, f, S::set1(1.0f));
  return S::scale_by_power_of_two(p, n);
}

/// 1 / (1 + exp(-x))
template <class S>
inline typename S::F sigmoid(typename S::F x) {
  const auto one = S::set1(1.0f);
  return one / (one + exp_approx<S>(-x));
}

template <class S, class Function>
inline typename S::F per_lane(typename S::F x, Function function) {
  alignas(64) float lanes[S::kWidth];
  S::store(lanes, x);
  for (float& lane : lanes) lane = function(lane);
  return S::load(lanes);
}

template <class S>
inline typename S::F clamp(typename S::F x, float limit) {
  return S::max(S::set1(-limit), S::min(S::set1(limit), x));
}

/// The gate half: everything that does not depend on `up`.
template <class S>
inline typename S::F activate_gate(typename S::F g, const Epilogue& e) {
  using Kind = Epilogue::Kind;
  switch (e.kind) {
    case Kind::kSilu:
    case Kind::kSiluNoMul:
      g = S::min(S::set1(e.limit), g);
      return g * sigmoid<S>(g);
    case Kind::kGelu:
    case Kind::kGeluNoMul:
      return per_lane<S>(g, [](float x) { return 0.5f * x * (1 + erff(x * 0.707106781f)); });
    case Kind::kGeluTanh:
    case Kind::kGeluTanhNoMul: {
      // (1 + tanh(y)) / 2 = sigmoid(2 y)
      const auto y = S::set1(0.797884561f) * S::fma(S::set1(0.044715f) * g * g, g, g);
      return g * sigmoid<S>(y + y);
    }
    case Kind::kSwigluOai:
    case Kind::kSwigluOaiUninterleave:
      g = S::min(S::set1(e.limit), g);
      return g * sigmoid<S>(S::set1(e.alpha) * g);
    case Kind::kSwigluStep:
      return S::min(S::set1(e.limit), g * sigmoid<S>(g));
    case Kind::kSitu: {
      const float b = e.situ_beta;
      return per_lane<S>(g, [b](float x) { return b * tanhf(x / b); }) * sigmoid<S>(g);
    }
    case Kind::kRelu2NoMul:
      g = S::max(S::set1(0.0f), g);
      return g * g;
    case Kind::kNone:
      break;
  }
  return g;
}

template <class S>
inline typename S::F activate(typename S::F gate, typename S::F up, const Epilogue& e) {
  using Kind = Epilogue::Kind;
  const auto a = activate_gate<S>(gate, e);
  switch (e.kind) {
    case Kind::kSilu:
    case Kind::kSwigluStep:
      return a * clamp<S>(up, e.limit);
    case Kind::kSwigluOai:
    case Kind::kSwigluOaiUninterleave:
      return a * (clamp<S>(up, e.limit) + S::set1(e.beta));
    case Kind::kSitu: {
      const float b = e.situ_linear_beta;
      return a * (b > 0 ? per_lane<S>(up, [b](float x) { return b * tanhf(x / b); }) : up);
    }
    default:
      return a * up;
  }
}

template <class S>
void activate_rows(const Epilogue& e, const float* gate, const float* up, std::int64_t count,
                   float* output) {
  for (std::int64_t i = 0; i < count; i += S::kWidth) {
    const auto value = e.gated ? activate<S>(S::load(gate + i), S::load(up + i), e)
                               : activate_gate<S>(S::load(gate + i), e);
    S::store(output + i, value);
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
