// The cases of every quantization scheme; see cases.h.
#include <array>

#include "testing/cases.h"
#include "testing/sized.h"

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
      sized("sizes_360", 3, 2, 2, 360, 360, {.bias = true}),
      sized("inner_90", 5, 6, 3, 192, 90, {.expert_map = true, .gate_up_layout = kUpGate}),
      sized("inner_192", 33, 4, 3, 128, 192,
            {.bias = true,
             .skew = RoutingSkew::kZipf,
             .negative_ids = true,
             .gate_up_layout = interleaves ? kInterleaved : kGateUp}),
      sized("inner_1368", 2, 2, 1, 64, 1368),
      {.name = "sizes_2", .num_tokens = 3, .num_experts = 3, .hidden = 2, .intermediate = 2},
      sized("weight_on_input", 9, 4, 1, 96, 64, {.bias = true, .weight_on_input = true}),
      sized("one_token", 1, 4, 3, 160, 96, {.transposed = transposes}),
      {.name = "no_tokens", .num_tokens = 0, .num_experts = 2, .hidden = 64, .intermediate = 32},
      sized("empty_experts", 20, 9, 2, 64, 96, {.skew = RoutingSkew::kSparse}),
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
