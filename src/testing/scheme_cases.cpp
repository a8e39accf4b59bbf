// The cases of every quantization scheme; see cases.h.
#include <array>

#include "testing/cases.h"

namespace fusedmoe::testing {
namespace {

struct ActivationChoice {
  Activation kind;
  ActivationParams params;
};

const std::array<ActivationChoice, 11> kActivations{{
    {Activation::kSilu, {}},
    {Activation::kSwigluOai, {}},
    {Activation::kRelu2NoMul, {}},
    {Activation::kGelu, {}},
    {Activation::kSwigluOaiUninterleave, {.alpha = 1.5F, .beta = 0.5F, .limit = 1.0F}},
    {Activation::kSiluNoMul, {}},
    {Activation::kGeluTanh, {}},
    {Activation::kSwigluStep, {.limit = 0.5F}},
    {Activation::kGeluNoMul, {}},
    {Activation::kSitu, {.situ_beta = 1.5F}},
    {Activation::kGeluTanhNoMul, {}},
}};

}  // namespace

std::vector<Case> scheme_cases(const NamedScheme& scheme) {
  const QuantKey& key = scheme.scheme.weights;
  const bool interleaves = !key.quantized() || key.group.rows <= 1;
  const bool transposes = key.value != DType::kE2M1 && key.value != DType::kI4 &&
                          key.value != DType::kU8 && key.value != DType::kIq4;
  using enum GateUpLayout;
  std::vector<Case> cases{
      {.name = "sizes_360",
       .num_tokens = 3,
       .num_experts = 2,
       .topk = 2,
       .hidden = 360,
       .intermediate = 360,
       .bias = true},
      {.name = "inner_90",
       .num_tokens = 5,
       .num_experts = 6,
       .topk = 3,
       .hidden = 192,
       .intermediate = 90,
       .expert_map = true,
       .gate_up_layout = kUpGate},
      {.name = "inner_192",
       .num_tokens = 33,
       .num_experts = 4,
       .topk = 3,
       .hidden = 128,
       .intermediate = 192,
       .bias = true,
       .skew = RoutingSkew::kZipf,
       .negative_ids = true,
       .gate_up_layout = interleaves ? kInterleaved : kGateUp},
      {.name = "inner_1368",
       .num_tokens = 2,
       .num_experts = 2,
       .topk = 1,
       .hidden = 64,
       .intermediate = 1368},
      {.name = "sizes_2", .num_tokens = 3, .num_experts = 3, .hidden = 2, .intermediate = 2},
      {.name = "weight_on_input",
       .num_tokens = 9,
       .num_experts = 4,
       .topk = 1,
       .hidden = 96,
       .intermediate = 64,
       .bias = true,
       .weight_on_input = true},
      {.name = "one_token",
       .num_tokens = 1,
       .num_experts = 4,
       .topk = 3,
       .hidden = 160,
       .intermediate = 96,
       .transposed = transposes},
      {.name = "no_tokens", .num_tokens = 0, .num_experts = 2, .hidden = 64, .intermediate = 32},
      {.name = "empty_experts",
       .num_tokens = 20,
       .num_experts = 9,
       .topk = 2,
       .hidden = 64,
       .intermediate = 96,
       .skew = RoutingSkew::kSparse},
  };
  if (key.value != DType::kE2M1) {
    cases.push_back(
        {.name = "primes", .num_tokens = 7, .num_experts = 5, .hidden = 31, .intermediate = 17});
  }
  // A different start for each scheme, so that each activation meets each kind of format.
  std::size_t turn = 0;
  for (const char c : scheme.name) turn += static_cast<unsigned char>(c);
  for (std::size_t i = 0; i < cases.size(); ++i, ++turn) {
    cases[i].name.insert(0, scheme.name + "_");
    cases[i].scheme = scheme.scheme;
    cases[i].activation = kActivations[turn % kActivations.size()].kind;
    cases[i].activation_params = kActivations[turn % kActivations.size()].params;
    cases[i].seed = 5000 + i;
  }
  return cases;
}

std::vector<Case> scheme_cases() {
  std::vector<Case> cases;
  for (const NamedScheme& scheme : named_schemes()) {
    const std::vector<Case> more = scheme_cases(scheme);
    cases.insert(cases.end(), more.begin(), more.end());
  }
  return cases;
}

}  // namespace fusedmoe::testing
