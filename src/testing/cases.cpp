// Cases with their tensors; see cases.h.
#include "testing/cases.h"

#include <numeric>

#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "testing/case_weights.h"

namespace fusedmoe::testing {
namespace {

std::vector<double> popularity(const Case& spec) {
  std::vector<double> result(static_cast<std::size_t>(spec.num_experts), 1.0);
  for (std::size_t e = 0; e < result.size(); ++e) {
    if (spec.skew == RoutingSkew::kZipf) result[e] = 1.0 / static_cast<double>(e + 1);
    if (spec.skew == RoutingSkew::kSparse && e % 2 == 1) result[e] = 0;
  }
  return result;
}

/// topk distinct experts, each draw in proportion to the popularity of those left.
void draw_experts(const Case& spec, std::vector<double> popular, Random& random,
                  std::int32_t* ids) {
  for (std::int64_t j = 0; j < spec.topk; ++j) {
    double left = std::accumulate(popular.begin(), popular.end(), 0.0) * random.uniform();
    std::size_t expert = popular.size();
    for (std::size_t e = 0; e < popular.size() && (expert == popular.size() || left >= 0); ++e) {
      if (popular[e] == 0) continue;
      expert = e;
      left -= popular[e];
    }
    if (expert == popular.size()) {
      throw Error("case.topk", std::to_string(spec.topk), "at most the experts that get tokens");
    }
    popular[expert] = 0;
    ids[j] = static_cast<std::int32_t>(expert);
  }
}

void fill_routing(Problem& problem, Random& random) {
  const Case& spec = problem.spec;
  problem.topk_ids = Tensor::empty({spec.num_tokens, spec.topk}, DType::kI32);
  problem.topk_weights = Tensor::empty({spec.num_tokens, spec.topk}, DType::kF32);
  const std::vector<double> popular = popularity(spec);
  for (std::int64_t t = 0; t < spec.num_tokens; ++t) {
    auto* ids = problem.topk_ids.as<std::int32_t>() + t * spec.topk;
    auto* weights = problem.topk_weights.as<float>() + t * spec.topk;
    if (spec.skew == RoutingSkew::kOneExpert) {
      for (std::int64_t j = 0; j < spec.topk; ++j) {
        ids[j] = static_cast<std::int32_t>(spec.num_experts - 1 - j);
      }
    } else {
      draw_experts(spec, popular, random, ids);
    }
    double sum = 0;
    for (std::int64_t j = 0; j < spec.topk; ++j) {
      weights[j] = static_cast<float>(0.1 + random.uniform());
      sum += weights[j];
    }
    for (std::int64_t j = 0; j < spec.topk; ++j) {
      // One expert's weight would be 1 and hide a missing multiplication.
      if (spec.topk > 1) weights[j] /= static_cast<float>(sum);
      if (spec.negative_ids && (t * spec.topk + j) % 5 == 1) ids[j] = -1;
    }
  }
  if (!spec.expert_map) return;
  problem.expert_map = Tensor::empty({spec.num_experts}, DType::kI32);
  auto next = static_cast<std::int32_t>(num_local_experts(spec));
  for (std::int64_t e = 0; e < spec.num_experts; ++e) {
    problem.expert_map.as<std::int32_t>()[e] = is_local(spec, e) ? --next : -1;
  }
}

}  // namespace

Problem make_problem(const Case& spec) {
  Problem problem;
  problem.spec = spec;
  Random random(spec.seed);
  problem.hidden_states = Tensor::empty({spec.num_tokens, spec.hidden}, DType::kF32);
  for (std::int64_t i = 0; i < problem.hidden_states.numel(); ++i) {
    problem.hidden_states.as<float>()[i] =
        bf16_to_f32(f32_to_bf16(static_cast<float>(random.normal())));
  }
  fill_routing(problem, random);
  problem.weights = make_weights(spec, random);
  return problem;
}

MoeConfig make_config(const Case& spec, DType dtype, Device device) {
  MoeConfig config;
  config.num_experts = spec.num_experts;
  config.num_local_experts = num_local_experts(spec);
  config.topk = spec.topk;
  config.hidden = spec.hidden;
  config.intermediate = spec.intermediate;
  config.dtype = dtype;
  config.scheme = spec.scheme;
  config.activation = spec.activation;
  config.activation_params = spec.activation_params;
  config.has_bias = spec.bias;
  config.has_expert_map = spec.expert_map;
  config.apply_router_weight_on_input = spec.weight_on_input;
  config.device = device;
  // run_experts replays the ids of the problem.
  config.routing_method = device.is_cpu() ? RoutingMethod::kCustom : RoutingMethod::kRouter;
  return config;
}

}  // namespace fusedmoe::testing
