// Cases with their tensors; see cases.h.
#include "testing/cases.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fusedmoe/error.h"
#include "fusedmoe/formats.h"

namespace fusedmoe::testing {
namespace {

bool is_local(const Case& spec, std::int64_t expert) {
  return !spec.expert_map || expert % 3 != 1;
}

std::int64_t num_local_experts(const Case& spec) {
  std::int64_t count = 0;
  for (std::int64_t e = 0; e < spec.num_experts; ++e) count += is_local(spec, e);
  return count;
}

bool is_mxfp4(const Case& spec) {
  return spec.scheme == schemes::mxfp4_w4a16();
}

// ------------------------------------------------------------------------------------------------
// Routing

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

// ------------------------------------------------------------------------------------------------
// Weights

/// Views of one projection of every local expert, all in stacked tensors.
struct Stack {
  TensorView values, scales, bias;  // (E, out, ...) and (E, out)
};

WeightMatrix matrix_of(const Stack& stack, std::int64_t expert) {
  const auto part = [&](const TensorView& view) {
    return view ? view.select(0, expert) : TensorView();
  };
  WeightMatrix matrix;
  matrix.values = part(stack.values);
  matrix.scales = part(stack.scales);
  matrix.bias = part(stack.bias);
  return matrix;
}

Stack rows_of(const Stack& stack, std::int64_t begin, std::int64_t end, std::int64_t step) {
  const auto part = [&](const TensorView& view) {
    return view ? view.slice(1, begin, end, step) : TensorView();
  };
  return {part(stack.values), part(stack.scales), part(stack.bias)};
}

class WeightMaker {
 public:
  WeightMaker(const Case& spec, std::vector<std::shared_ptr<const void>>& owners)
      : spec_(spec), experts_(num_local_experts(spec)), owners_(owners) {}

  /// Uninitialised (E, out, in) in the layout of the case.
  Stack allocate(std::int64_t out, std::int64_t in) {
    Stack stack;
    if (is_mxfp4(spec_)) {
      stack.values = keep(Tensor::empty({experts_, out, in / 2}, DType::kU8));
      stack.scales = keep(Tensor::empty({experts_, out, in / 32}, DType::kU8));
    } else if (spec_.transposed) {
      stack.values =
          keep(Tensor::empty({experts_, in, out}, spec_.scheme.weights.value)).transpose(1, 2);
    } else {
      stack.values = keep(Tensor::empty({experts_, out, in}, spec_.scheme.weights.value));
    }
    if (spec_.bias) {
      const DType dtype = is_mxfp4(spec_) ? DType::kBF16 : spec_.scheme.weights.value;
      stack.bias = keep(Tensor::empty({experts_, out}, dtype));
    }
    return stack;
  }

  /// Random numbers for one expert, row by row, whatever the strides.
  void fill(const WeightMatrix& matrix, Random& random) const {
    const TensorView& values = matrix.values;
    const std::int64_t out = values.size(0), columns = values.size(1);
    const double fan_in = static_cast<double>(matrix.scales ? 2 * columns : columns);
    const double deviation = 1 / std::sqrt(fan_in);
    for (std::int64_t r = 0; r < out; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        const std::int64_t index = r * values.stride(0) + c * values.stride(1);
        if (matrix.scales) {
          values.as<std::uint8_t>()[index] = static_cast<std::uint8_t>(random.bits() >> 56);
        } else {
          store_f32(values.data(), values.dtype(), index,
                    static_cast<float>(random.normal() * deviation));
        }
      }
      if (matrix.scales) fill_scales(matrix.scales.select(0, r), deviation, random);
      if (matrix.bias) {
        store_f32(matrix.bias.data(), matrix.bias.dtype(), r * matrix.bias.stride(0),
                  static_cast<float>(random.normal() / 2));
      }
    }
  }

 private:
  TensorView keep(const Tensor& tensor) {
    owners_.push_back(tensor.owner());
    return tensor;
  }

  static void fill_scales(const TensorView& scales, double deviation, Random& random) {
    constexpr double kRmsOfCodes = 2.93;  // of the 16 E2M1 values
    const int exponent = std::ilogb(deviation / kRmsOfCodes);
    for (std::int64_t b = 0; b < scales.size(0); ++b) {
      scales.as<std::uint8_t>()[b * scales.stride(0)] =
          static_cast<std::uint8_t>(127 + exponent + random.below(3) - 1);
    }
  }

  const Case& spec_;
  const std::int64_t experts_;
  std::vector<std::shared_ptr<const void>>& owners_;
};

ExpertWeights make_weights(const Case& spec, Random& random) {
  ExpertWeights weights;
  weights.scheme = spec.scheme;
  weights.hidden = spec.hidden;
  weights.intermediate = spec.intermediate;
  weights.activation = spec.activation;
  weights.activation_params = spec.activation_params;

  WeightMaker maker(spec, weights.owners);
  const std::int64_t size = spec.intermediate;
  const bool gated = is_gated(spec.activation);
  const Stack w13 = maker.allocate(gated ? 2 * size : size, spec.hidden);
  Stack gate = w13, up;
  if (gated && spec.gate_up_layout == GateUpLayout::kInterleaved) {
    gate = rows_of(w13, 0, 2 * size, 2);
    up = rows_of(w13, 1, 2 * size, 2);
  } else if (gated) {
    const bool gate_first = spec.gate_up_layout == GateUpLayout::kGateUp;
    gate = rows_of(w13, gate_first ? 0 : size, gate_first ? size : 2 * size, 1);
    up = rows_of(w13, gate_first ? size : 0, gate_first ? 2 * size : size, 1);
  }
  const Stack w2 = maker.allocate(spec.hidden, size);
  for (std::int64_t e = 0; e < num_local_experts(spec); ++e) {
    ExpertMatrices expert{matrix_of(gate, e), {}, matrix_of(w2, e)};
    maker.fill(expert.gate, random);
    if (gated) {
      expert.up = matrix_of(up, e);
      maker.fill(expert.up, random);
    }
    maker.fill(expert.down, random);
    weights.experts.push_back(expert);
  }
  return weights;
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

MoeConfig make_config(const Case& spec, DType dtype) {
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
  config.routing_method = RoutingMethod::kCustom;  // run_experts replays the ids of the problem
  return config;
}

}  // namespace fusedmoe::testing
