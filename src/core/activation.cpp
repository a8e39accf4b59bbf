#include "fusedmoe/activation.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "core/check.h"

namespace fusedmoe {
namespace {

struct Row {
  Activation activation;
  std::string_view name;
};

constexpr std::array<Row, 11> kTable{{
    {Activation::kSilu, "silu"},
    {Activation::kGelu, "gelu"},
    {Activation::kGeluTanh, "gelu_tanh"},
    {Activation::kSwigluOai, "swigluoai"},
    {Activation::kSwigluOaiUninterleave, "swigluoai_uninterleave"},
    {Activation::kSwigluStep, "swiglustep"},
    {Activation::kSitu, "situ"},
    {Activation::kSiluNoMul, "silu_no_mul"},
    {Activation::kGeluNoMul, "gelu_no_mul"},
    {Activation::kGeluTanhNoMul, "gelu_tanh_no_mul"},
    {Activation::kRelu2NoMul, "relu2_no_mul"},
}};

float value_or(const std::optional<float>& given, const char* argument, float otherwise) {
  if (!given) return otherwise;
  FUSEDMOE_CHECK(std::isfinite(*given), argument, fmt::to_string(*given), "finite");
  return *given;
}

void check_positive(float value, const char* argument) {
  FUSEDMOE_CHECK(value > 0, argument, fmt::to_string(value), "positive");
}

}  // namespace

ResolvedActivation resolve(Activation kind, const ActivationParams& params) {
  const bool oai = kind == Activation::kSwigluOai;
  const bool limited = oai || kind == Activation::kSwigluStep;
  ResolvedActivation result{};
  result.kind = kind;
  result.alpha = value_or(params.alpha, "activation.alpha", oai ? 1.702F : 1.0F);
  result.beta = value_or(params.beta, "activation.beta", oai ? 1.0F : 0.0F);
  result.limit = value_or(params.limit, "activation.limit",
                          limited ? 7.0F : std::numeric_limits<float>::infinity());
  check_positive(result.limit, "activation.limit");
  FUSEDMOE_CHECK(!oai || result.beta == 1, "activation.beta", fmt::to_string(result.beta),
                 "1 or unset for swigluoai; swigluoai_uninterleave takes any");
  result.situ_beta = value_or(params.situ_beta, "activation.situ_beta", 1.0F);
  result.situ_linear_beta = value_or(params.situ_linear_beta, "activation.situ_linear_beta", 0.0F);
  if (kind == Activation::kSitu) {
    FUSEDMOE_CHECK(params.situ_beta, "activation.situ_beta", "not given", "given for situ");
    check_positive(result.situ_beta, "activation.situ_beta");
  }
  return result;
}

bool is_gated(Activation activation) {
  return !name(activation).ends_with("_no_mul");
}

std::string_view name(Activation activation) {
  return kTable[static_cast<std::size_t>(activation)].name;
}

Activation parse_activation(std::string_view text) {
  std::string names;
  for (const Row& row : kTable) {
    if (row.name == text) return row.activation;
    names += names.empty() ? "" : ", ";
    names += row.name;
  }
  if (text == "gelu_pytorch_tanh") return Activation::kGeluTanh;
  throw Error("activation", fmt::format("\"{}\"", text),
              fmt::format("one of {}, gelu_pytorch_tanh", names));
}

}  // namespace fusedmoe
