// The list of cases that every implementation must get right; see cases.h.
#include "testing/cases.h"
#include "testing/sized.h"

namespace fusedmoe::testing {
namespace {

std::vector<Case> sizes() {
  const QuantScheme f32 = schemes::unquantized(DType::kF32);
  const QuantScheme f16 = schemes::unquantized(DType::kF16);
  return {
      {.name = "no_tokens", .num_tokens = 0},
      sized("all_ones", 1, 1, 1, 1, 1),
      {.name = "intermediate_1", .num_tokens = 3, .hidden = 33, .intermediate = 1},
      {.name = "hidden_1", .num_tokens = 3, .hidden = 1, .intermediate = 33},
      {.name = "sizes_2", .num_tokens = 2, .hidden = 2, .intermediate = 2},
      {.name = "primes", .num_tokens = 7, .num_experts = 11, .hidden = 31, .intermediate = 17},
      sized("primes_f32", 13, 5, 3, 127, 61, {.scheme = f32}),
      sized("primes_f16", 5, 3, 2, 67, 131, {.scheme = f16}),
      {.name = "one_past_tiles", .num_tokens = 65, .hidden = 129, .intermediate = 65},
      {.name = "size_360", .num_tokens = 3, .topk = 4, .hidden = 360, .intermediate = 360},
      sized("size_2880", 1, 2, 1, 2880, 2880),
      sized("wide_f32", 2, 2, 2, 2880, 33, {.scheme = f32}),
      sized("long_f32", 2, 2, 2, 33, 2880, {.scheme = f32}),
      {.name = "one_expert_exists", .num_tokens = 64, .num_experts = 1, .topk = 1},
      {.name = "topk_1", .num_tokens = 3, .topk = 1},
      {.name = "topk_all", .num_tokens = 2, .num_experts = 5, .topk = 5},
      {.name = "more_experts_than_slots", .num_tokens = 1, .num_experts = 128, .topk = 8},
      {.name = "tokens_64", .num_tokens = 64, .topk = 3},
      {.name = "tokens_200", .num_tokens = 200, .num_experts = 7, .hidden = 96},
  };
}

std::vector<Case> routing() {
  using enum RoutingSkew;
  return {
      {.name = "all_on_one_expert", .num_tokens = 65, .topk = 1, .skew = kOneExpert},
      {.name = "all_on_the_same_experts", .num_tokens = 64, .topk = 4, .skew = kOneExpert},
      {.name = "half_of_the_experts_empty", .num_tokens = 33, .skew = kSparse},
      {.name = "zipf", .num_tokens = 100, .num_experts = 33, .topk = 4, .skew = kZipf},
      {.name = "negative_ids", .num_tokens = 7, .topk = 3, .negative_ids = true},
      {.name = "expert_map", .num_tokens = 9, .topk = 3, .expert_map = true},
      sized("expert_map_and_negative_ids", 65, 10, 4, 64, 48,
            {.bias = true, .negative_ids = true, .expert_map = true}),
      sized("every_token_remote", 3, 2, 1, 64, 48, {.skew = kOneExpert, .expert_map = true}),
      {.name = "weight_on_input", .num_tokens = 7, .topk = 1, .weight_on_input = true},
      sized("weight_on_input_with_bias", 65, 8, 1, 64, 48,
            {.scheme = schemes::unquantized(DType::kF32),
             .bias = true,
             .expert_map = true,
             .weight_on_input = true}),
  };
}

std::vector<Case> layouts() {
  const QuantScheme mxfp4 = schemes::mxfp4_w4a16();
  using enum GateUpLayout;
  return {
      {.name = "interleaved", .hidden = 40, .intermediate = 24, .gate_up_layout = kInterleaved},
      sized("up_gate", 7, 8, 2, 40, 24, {.bias = true, .gate_up_layout = kUpGate}),
      {.name = "transposed", .hidden = 40, .intermediate = 24, .transposed = true},
      sized("gpt_oss_bf16", 7, 8, 4, 360, 90,
            {.activation = Activation::kSwigluOai,
             .bias = true,
             .gate_up_layout = kInterleaved,
             .transposed = true}),
      sized("gpt_oss_mxfp4", 65, 10, 4, 288, 160,
            {.scheme = mxfp4,
             .activation = Activation::kSwigluOai,
             .bias = true,
             .gate_up_layout = kInterleaved}),
      sized("mxfp4_one_block", 3, 4, 2, 32, 32, {.scheme = mxfp4}),
      sized("mxfp4_wide", 1, 5, 2, 96, 32, {.scheme = mxfp4, .bias = true, .expert_map = true}),
      sized("mxfp4_long", 200, 3, 1, 32, 96, {.scheme = mxfp4, .negative_ids = true}),
      sized("mxfp4_2880", 2, 4, 1, 2880, 2880,
            {.scheme = mxfp4,
             .activation = Activation::kSwigluOai,
             .bias = true,
             .gate_up_layout = kInterleaved}),
  };
}

/// Every activation with two schemes in turn, gated ones with every layout in turn.
std::vector<Case> activations() {
  std::vector<Case> cases;
  const auto add = [&](Activation activation, const char* suffix, ActivationParams params) {
    Case added{.num_tokens = 5, .num_experts = 3, .hidden = 48, .intermediate = 40};
    added.name = std::string("activation_").append(name(activation)).append(suffix);
    added.scheme = schemes::unquantized(cases.size() % 2 == 0 ? DType::kF32 : DType::kBF16);
    added.activation = activation;
    added.activation_params = params;
    added.bias = cases.size() % 3 == 0;
    added.gate_up_layout = static_cast<GateUpLayout>(cases.size() % 3);
    cases.push_back(added);
  };
  add(Activation::kSilu, "", {});
  add(Activation::kSilu, "_limit", {.limit = 0.75F});
  add(Activation::kGelu, "", {});
  add(Activation::kGeluTanh, "", {});
  add(Activation::kSwigluOai, "", {});
  add(Activation::kSwigluOai, "_limit", {.alpha = 1.25F, .limit = 0.5F});
  add(Activation::kSwigluOaiUninterleave, "", {.alpha = 1.5F, .beta = 0.5F, .limit = 1.0F});
  add(Activation::kSwigluStep, "", {});
  add(Activation::kSwigluStep, "_limit", {.limit = 0.5F});
  add(Activation::kSitu, "", {.situ_beta = 1.5F});
  add(Activation::kSitu, "_linear", {.situ_beta = 2.0F, .situ_linear_beta = 0.75F});
  add(Activation::kSiluNoMul, "", {});
  add(Activation::kGeluNoMul, "", {});
  add(Activation::kGeluTanhNoMul, "", {});
  add(Activation::kRelu2NoMul, "", {});
  return cases;
}

}  // namespace

std::vector<Case> awkward_cases() {
  std::vector<Case> cases;
  for (std::vector<Case> group : {sizes(), routing(), layouts(), activations()}) {
    cases.insert(cases.end(), group.begin(), group.end());
  }
  for (std::size_t i = 0; i < cases.size(); ++i) cases[i].seed = 1000 + i;
  return cases;
}

}  // namespace fusedmoe::testing
