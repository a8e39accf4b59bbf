#include "fusedmoe/weights.h"

#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "core/check.h"

namespace fusedmoe {
namespace {

// Parameters that an activation's formula has.
enum Parameter : unsigned {
  kAlpha = 1,
  kBeta = 2,
  kLimit = 4,
  kSituBeta = 8,
  kSituLinearBeta = 16
};

struct Row {
  Activation activation;
  std::string_view name;
  unsigned parameters;
};

constexpr std::array<Row, 11> kTable{{
    {Activation::kSilu, "silu", kLimit},
    {Activation::kGelu, "gelu", 0},
    {Activation::kGeluTanh, "gelu_tanh", 0},
    {Activation::kSwigluOai, "swigluoai", kAlpha | kBeta | kLimit},
    {Activation::kSwigluOaiUninterleave, "swigluoai_uninterleave", kAlpha | kBeta | kLimit},
    {Activation::kSwigluStep, "swiglustep", kLimit},
    {Activation::kSitu, "situ", kSituBeta | kSituLinearBeta},
    {Activation::kSiluNoMul, "silu_no_mul", 0},
    {Activation::kGeluNoMul, "gelu_no_mul", 0},
    {Activation::kGeluTanhNoMul, "gelu_tanh_no_mul", 0},
    {Activation::kRelu2NoMul, "relu2_no_mul", 0},
}};

const Row& row(Activation activation) {
  return kTable[static_cast<std::size_t>(activation)];
}

/// The given value of a parameter, or its default; a value for a formula without it is an Error.
struct Values {
  const Row& activation;

  float operator()(Parameter parameter, const char* argument, const std::optional<float>& given,
                   float otherwise) const {
    if (!given) return otherwise;
    FUSEDMOE_CHECK(activation.parameters & parameter, argument, core::to_string(*given),
                   core::format("unset: {} has no such parameter", activation.name));
    FUSEDMOE_CHECK(std::isfinite(*given), argument, core::to_string(*given), "finite");
    return *given;
  }
};

void check_positive(float value, const char* argument) {
  FUSEDMOE_CHECK(value > 0, argument, core::to_string(value), "positive");
}

}  // namespace

ResolvedActivation resolve(Activation kind, const ActivationParams& params) {
  const bool oai = kind == Activation::kSwigluOai;
  const bool limited = oai || kind == Activation::kSwigluStep;
  ResolvedActivation result{};
  result.kind = kind;
  const Values value{row(kind)};
  result.alpha = value(kAlpha, "activation.alpha", params.alpha, oai ? 1.702F : 1.0F);
  result.beta = value(kBeta, "activation.beta", params.beta, oai ? 1.0F : 0.0F);
  result.limit = value(kLimit, "activation.limit", params.limit,
                       limited ? 7.0F : std::numeric_limits<float>::infinity());
  check_positive(result.limit, "activation.limit");
  FUSEDMOE_CHECK(!oai || result.beta == 1, "activation.beta", core::to_string(result.beta),
                 "1 or unset for swigluoai; swigluoai_uninterleave takes any");
  result.situ_beta = value(kSituBeta, "activation.situ_beta", params.situ_beta, 1.0F);
  result.situ_linear_beta =
      value(kSituLinearBeta, "activation.situ_linear_beta", params.situ_linear_beta, 0.0F);
  if (kind == Activation::kSitu) {
    FUSEDMOE_CHECK(params.situ_beta, "activation.situ_beta", "absent",
                   "a positive number for situ");
    check_positive(result.situ_beta, "activation.situ_beta");
  }
  return result;
}

bool is_gated(Activation activation) {
  return !name(activation).ends_with("_no_mul");
}

std::string_view name(Activation activation) {
  return row(activation).name;
}

Activation parse_activation(std::string_view text) {
  std::string names;
  for (const Row& entry : kTable) {
    if (entry.name == text) return entry.activation;
    names += names.empty() ? "" : ", ";
    names += entry.name;
  }
  if (text == "gelu_pytorch_tanh") return Activation::kGeluTanh;
  throw Error::unknown_name("activation", text, names + ", gelu_pytorch_tanh");
}

}  // namespace fusedmoe
