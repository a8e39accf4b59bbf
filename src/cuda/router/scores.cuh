// Scores of the router on the device, and keys that order them.
//
// Scores equal the CPU's as bits, so that choosing by them gives equal ids: the same fp32
// operations in the same order, on exp and log1p that are computed in fp64 and rounded once. What
// remains: the C library's fp32 exp and log1p are off by one unit in the last place in about 0.1 %
// and 5 % of all calls, and the sum of a softmax is added in another order, though in fp64. So ids
// may differ, and only by changing places, where two choice scores lie within about one such unit
// of each other, in that share of cases. Logits that are equal give scores that are equal, here as
// there.
#pragma once

#include <cstdint>
#include <limits>

#include "fusedmoe/router.h"

namespace fusedmoe::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarpSize = 32;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::uint32_t kTaken = 0;  // a key below that of every score

/// exp(x), correctly rounded but for about one argument in a million: Taylor's series in fp64 of
/// the fraction left by multiples of ln 2, to 2^-46. No branches, so that several run side by side.
__device__ inline float exp_rounded(float x) {
  const double clamped = x < -110.0f ? -110.0 : x > 100.0f ? 100.0 : static_cast<double>(x);
  const double multiple = rint(clamped * 1.4426950408889634);
  double r = fma(multiple, -0.6931471805599453, clamped);
  r = fma(multiple, -2.3190468138462996e-17, r);  // ln 2 minus its double
  double sum = 1.0 / 39916800;                    // 1 / 11!
  sum = fma(sum, r, 1.0 / 3628800);
  sum = fma(sum, r, 1.0 / 362880);
  sum = fma(sum, r, 1.0 / 40320);
  sum = fma(sum, r, 1.0 / 5040);
  sum = fma(sum, r, 1.0 / 720);
  sum = fma(sum, r, 1.0 / 120);
  sum = fma(sum, r, 1.0 / 24);
  sum = fma(sum, r, 1.0 / 6);
  sum = fma(sum, r, 0.5);
  sum = fma(sum, r, 1.0);
  sum = fma(sum, r, 1.0);
  // Times 2^multiple, through the exponent; a NaN stays one.
  const int exponent = __double2int_rn(multiple);
  return static_cast<float>(
      __hiloint2double(__double2hiint(sum) + (exponent << 20), __double2loint(sum)));
}

__device__ inline float sigmoid(float x) {
  return 1.0f / (1.0f + exp_rounded(-x));
}

__device__ inline float finite_or(float score, float substitute) {
  return isfinite(score) ? score : substitute;
}

/// Larger for a larger score, never kTaken. -0 counts as 0, NaN as -infinity.
__device__ inline std::uint32_t sort_key(float score) {
  const std::uint32_t bits = __float_as_uint(isnan(score) ? -kInfinity : score + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ inline float score_of_key(std::uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

__device__ inline double warp_sum(double value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

/// The largest logit of a row and the sum of exp(logit - largest).
struct Softmax {
  float largest;
  float sum;
};

/// Score of one expert from its logit.
__device__ inline float score(ScoringFunc scoring, float logit, const Softmax& softmax) {
  switch (scoring) {
    case ScoringFunc::kSoftmax:
      return finite_or(exp_rounded(logit - softmax.largest) / softmax.sum, 0);
    case ScoringFunc::kSigmoid:
      return finite_or(sigmoid(logit), 0);
    case ScoringFunc::kSqrtSoftplus: {
      const float tail = static_cast<float>(log1p(static_cast<double>(exp_rounded(-fabsf(logit)))));
      return finite_or(sqrtf(fmaxf(logit, 0.0f) + tail), 0);
    }
    default:
      return finite_or(logit, -kInfinity);
  }
}

}  // namespace fusedmoe::cuda
