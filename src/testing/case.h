// What a case of the generator is; cases.h makes its tensors.
#pragma once

#include <cstdint>
#include <string>

#include "fusedmoe/quant.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::testing {

/// How tokens spread over experts.
enum class RoutingSkew {
  kBalanced,   ///< every token draws topk distinct experts uniformly
  kZipf,       ///< expert e with weight 1 / (e + 1)
  kOneExpert,  ///< all tokens on the same topk experts
  kSparse,     ///< half of the experts get no token
};

/// One MoE problem, as a named value.
struct Case {
  std::string name = {};
  std::int64_t num_tokens = 7;
  std::int64_t num_experts = 8;
  std::int64_t topk = 2;
  std::int64_t hidden = 64;
  std::int64_t intermediate = 48;
  QuantScheme scheme = schemes::unquantized(DType::kBF16);
  Activation activation = Activation::kSilu;
  ActivationParams activation_params = {};
  bool bias = false;
  RoutingSkew skew = RoutingSkew::kBalanced;
  bool negative_ids = false;     ///< every fifth slot is -1
  bool expert_map = false;       ///< every third expert is remote, local ids run backwards
  bool weight_on_input = false;  ///< topk = 1
  GateUpLayout gate_up_layout = GateUpLayout::kGateUp;
  bool transposed = false;  ///< (E, in, out) instead of (E, out, in); not for packed values
  DType scale_dtype = DType::kBF16;  ///< of int4 and int8 groups, as published checkpoints have it
  std::uint64_t seed = 0;
};

}  // namespace fusedmoe::testing
