// Activation functions between the two grouped GEMMs.
//
// g is the gate, u the up projection, s(x) = 1 / (1 + exp(-x)). Everything is computed in fp32 on
// the unrounded GEMM accumulator (plus bias) and rounded once. Where gate and up columns lie in a
// weight tensor (halves or interleaved) is a matter of the weights, not of the activation.
// Source: vLLM's MoEActivation and its kernels; docs/architecture.md, "Activations".
#pragma once

#include <optional>
#include <string_view>

#include "fusedmoe/export.h"

namespace fusedmoe {

enum class Activation {
  kSilu,                   ///< g s(g) u; with a limit: g = min(g, limit), u = clamp(u, +-limit)
  kGelu,                   ///< g (1 + erf(g / sqrt 2)) / 2 u
  kGeluTanh,               ///< tanh form of kGelu
  kSwigluOai,              ///< gpt-oss: g = min(g, L), u = clamp(u, +-L): (u + 1) g s(alpha g)
  kSwigluOaiUninterleave,  ///< g = min(g, L), u = clamp(u, +-L): (u + beta) g s(alpha g)
  kSwigluStep,             ///< min(g s(g), L) clamp(u, +-L)
  kSitu,                   ///< b tanh(g / b) s(g) up, up = lb tanh(u / lb) if lb > 0, else u
  kSiluNoMul,              ///< non-gated: g s(g)
  kGeluNoMul,
  kGeluTanhNoMul,
  kRelu2NoMul,  ///< non-gated: max(g, 0)^2
};

/// Parameters; unset ones take the activation's own default (kSwigluOai: alpha 1.702, beta 1,
/// limit 7; kSwigluStep: limit 7; alpha 1, beta 0 and no limit otherwise).
struct ActivationParams {
  std::optional<float> alpha = std::nullopt;
  std::optional<float> beta = std::nullopt;
  std::optional<float> limit = std::nullopt;
  std::optional<float> situ_beta = std::nullopt;         ///< required by kSitu
  std::optional<float> situ_linear_beta = std::nullopt;  ///< optional for kSitu

  bool operator==(const ActivationParams&) const = default;
};

/// An activation with every default filled in. `limit` is infinity when there is none.
struct ResolvedActivation {
  Activation kind;
  float alpha, beta, limit, situ_beta, situ_linear_beta;
  bool operator==(const ResolvedActivation&) const = default;
};

/// Throws Error when a required parameter is missing, one is not finite, or one is set that the
/// activation does not have.
FUSEDMOE_API ResolvedActivation resolve(Activation kind, const ActivationParams& params);

/// True if GEMM 1 yields a gate and an up half, that is, if the name does not end in `_no_mul`.
FUSEDMOE_API bool is_gated(Activation activation);

/// vLLM's names: "silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave",
/// "swiglustep", "situ", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul".
FUSEDMOE_API std::string_view name(Activation activation);

/// Inverse of `name`; also "gelu_pytorch_tanh". Throws Error listing the valid names.
FUSEDMOE_API Activation parse_activation(std::string_view text);

}  // namespace fusedmoe
