#include "reference/activation.h"

#include <cmath>
#include <limits>
#include <numbers>

namespace fusedmoe::reference {
namespace {

double gelu(double x) {
  return x * (1 + std::erf(x / std::numbers::sqrt2)) / 2;
}

double gelu_tanh(double x) {
  const double inner = std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
  return x * (1 + std::tanh(inner)) / 2;
}

// Unlike std::min and std::max these keep a NaN.
double at_most(double x, double limit) {
  return x > limit ? limit : x;
}

double clamp(double x, double limit) {
  return x < -limit ? -limit : at_most(x, limit);
}

}  // namespace

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

double activate(const ResolvedActivation& a, double g, double u) {
  switch (a.kind) {
    case Activation::kSilu:
      g = at_most(g, a.limit);
      return g * sigmoid(g) * clamp(u, a.limit);
    case Activation::kGelu:
      return gelu(g) * u;
    case Activation::kGeluTanh:
      return gelu_tanh(g) * u;
    case Activation::kSwigluOai:
      g = at_most(g, a.limit);
      return (clamp(u, a.limit) + 1) * g * sigmoid(a.alpha * g);
    case Activation::kSwigluOaiUninterleave:
      g = at_most(g, a.limit);
      return (clamp(u, a.limit) + a.beta) * g * sigmoid(a.alpha * g);
    case Activation::kSwigluStep:
      return at_most(g * sigmoid(g), a.limit) * clamp(u, a.limit);
    case Activation::kSitu: {
      const double b = a.situ_beta, linear = a.situ_linear_beta;
      const double up = linear > 0 ? linear * std::tanh(u / linear) : u;
      return b * std::tanh(g / b) * sigmoid(g) * up;
    }
    case Activation::kSiluNoMul:
      return g * sigmoid(g);
    case Activation::kGeluNoMul:
      return gelu(g);
    case Activation::kGeluTanhNoMul:
      return gelu_tanh(g);
    case Activation::kRelu2NoMul:
      return g < 0 ? 0 : g * g;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace fusedmoe::reference
