#include "moe/experts_args.h"

#include <limits>

#include "core/check.h"

namespace fusedmoe::core {
namespace {

void check_row_count(std::int64_t rows, const char* argument) {
  // Kernels count them in 32 bits, in steps of up to 2^15.
  constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max() - (1 << 16);
  FUSEDMOE_CHECK(rows <= kMaxRows, argument, core::format("{} rows", rows),
                 core::format("at most {} rows of all experts", kMaxRows));
}

/// Before anything is read: all arguments where the packed weights are.
void check_devices(const ExpertsArgs& args) {
  const Device device = args.weights->info().device;
  FUSEDMOE_CHECK(args.stream.device == device, "stream",
                 core::format("of {}", to_string(args.stream.device)),
                 core::format("of {}, where the packed weights are", to_string(device)));
  const auto check = [device](const TensorView& view, const char* argument) {
    FUSEDMOE_CHECK(!view || view.device() == device, argument,
                   core::format("on {}", to_string(view.device())),
                   core::format("on {}, where the packed weights are", to_string(device)));
  };
  check(args.hidden_states, "hidden_states");
  check(args.hidden_scales, "hidden_scales");
  check(args.output, "output");
  check(args.topk_ids, "topk_ids");
  check(args.topk_weights, "topk_weights");
  check(args.expert_map, "expert_map");
  check(args.expert_num_tokens, "expert_num_tokens");
}

void check_batched(const ExpertsArgs& args, const ProblemSize& problem) {
  check_row_count(problem.num_local_experts * problem.num_tokens, "hidden_states");
  check_tensor(args.expert_num_tokens, "expert_num_tokens", DType::kI32,
               {problem.num_local_experts});
  if (!args.expert_num_tokens.device().is_cpu()) return;  // would have to wait for the values
  for (std::int64_t e = 0; e < problem.num_local_experts; ++e) {
    const std::int32_t count = args.expert_num_tokens.as<const std::int32_t>()[e];
    FUSEDMOE_CHECK(count >= 0 && count <= problem.num_tokens, "expert_num_tokens",
                   core::format("{} for expert {}", count, e),
                   core::format("in [0, max_tokens = {}]", problem.num_tokens));
  }
}

void check_standard(const ExpertsArgs& args, ProblemSize& problem) {
  check_tensor(args.topk_ids, "topk_ids", DType::kI32, {problem.num_tokens, -1});
  problem.topk = args.topk_ids.size(1);
  check_row_count(problem.num_tokens * problem.topk, "topk_ids");
  check_tensor(args.topk_weights, "topk_weights", DType::kF32, {problem.num_tokens, problem.topk});
  if (args.expert_map) check_tensor(args.expert_map, "expert_map", DType::kI32, {-1});
}

void check_hidden_scales(const ExpertsArgs& args, const QuantKey& key) {
  const TensorView& x = args.hidden_states;
  const std::int64_t hidden = x.size(x.rank() - 1), group = key.group.cols;
  Shape shape{1, 1};
  if (key.group.rows == 1) {
    shape = x.shape();
    shape[x.rank() - 1] = group < 0 ? 1 : (hidden + group - 1) / group;
  }
  check_tensor(args.hidden_scales, "hidden_scales", *key.scale, shape);
}

}  // namespace

bool is_activation_dtype(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

Support supports_on_cpu(const MoeConfig& config, ActivationFormat format, bool scheme_known,
                        std::string_view known_schemes) {
  const auto no = [](Reason reason, std::string text) {
    return Support::no(reason, std::move(text));
  };
  if (!config.device.is_cpu()) {
    return no(Reason::kDevice, core::format("device is {}, runs on cpu", to_string(config.device)));
  }
  if (!is_activation_dtype(config.dtype)) {
    return no(Reason::kDType,
              core::format("dtype is {}, takes f32, bf16, f16", name(config.dtype)));
  }
  if (!scheme_known) {
    return no(Reason::kQuantScheme,
              core::format("scheme is {}, takes {}", name(config.scheme), known_schemes));
  }
  const std::int64_t unit = config.scheme.weights.value == DType::kE2M1 ? 2 : 1;
  return supports_anywhere(config, format, {unit, unit});
}

Support supports_anywhere(const MoeConfig& config, ActivationFormat format, SizeUnits units) {
  const auto no = [](Reason reason, std::string text) {
    return Support::no(reason, std::move(text));
  };
  try {
    resolve(config.activation, config.activation_params);
  } catch (const Error& error) {
    return no(Reason::kActivation, error.what());
  }
  if (config.hidden < 1 || config.intermediate < 1 || config.hidden % units.hidden != 0 ||
      config.intermediate % units.intermediate != 0) {
    return no(Reason::kShape,
              core::format("hidden {}, intermediate {}; takes positive multiples of {} and {}",
                           config.hidden, config.intermediate, units.hidden, units.intermediate));
  }
  if (config.activation_format != format) {
    return no(Reason::kActivationFormat,
              core::format("format is {}, takes {}", name(config.activation_format), name(format)));
  }
  if (config.apply_router_weight_on_input && config.topk != 1) {
    return no(Reason::kRouterWeightOnInput,
              core::format("router weight on input with topk {}, takes topk 1", config.topk));
  }
  if (config.num_local_experts != config.num_experts && !config.has_expert_map) {
    return no(Reason::kExpertMap, core::format("{} of {} experts are local without an expert map",
                                               config.num_local_experts, config.num_experts));
  }
  return Support::yes();
}

namespace {

/// All but the implementation.
PackedWeights::Info info_of(const ExpertWeights& weights) {
  weights.validate();
  PackedWeights::Info info;
  info.scheme = weights.scheme;
  info.num_experts = weights.num_experts();
  info.hidden = weights.hidden;
  info.intermediate = weights.intermediate;
  info.activation = resolve(weights.activation, weights.activation_params);
  info.has_bias = weights.has_bias();
  const std::optional<QuantKey>& key = weights.scheme.activations;
  if (!key || key->dynamic || key->group != GroupShape{-1, -1}) return info;
  const auto include = [](std::optional<float>& largest, const TensorView& scale) {
    if (scale) largest = std::max(largest.value_or(0), *scale.as<const float>());
  };
  for (const ExpertMatrices& expert : weights.experts) {
    include(info.a1_scale, expert.gate.input_scale);
    include(info.a1_scale, expert.up.input_scale);
    include(info.a2_scale, expert.down.input_scale);
  }
  return info;
}

}  // namespace

PackedWeights::Info make_packed_info(const Experts& experts, const ExpertWeights& weights) {
  PackedWeights::Info info = info_of(weights);
  info.implementation = experts.name();
  info.layout_version = experts.layout_version();
  return info;
}

void check_expert(const Experts& experts, const PackedWeights& packed, std::int64_t expert) {
  FUSEDMOE_CHECK(experts.accepts(packed), "packed", packed.info().implementation,
                 core::format("packed by {}", experts.name()));
  FUSEDMOE_CHECK(expert >= 0 && expert < packed.info().num_experts, "expert",
                 core::to_string(expert), core::format("in [0, {})", packed.info().num_experts));
}

void check_replacement(const ExpertWeights& weights, const PackedWeights::Info& packed) {
  const PackedWeights::Info info = info_of(weights);
  FUSEDMOE_CHECK(info.scheme == packed.scheme, "weights.scheme", name(info.scheme),
                 name(packed.scheme));
  FUSEDMOE_CHECK(info.hidden == packed.hidden && info.intermediate == packed.intermediate,
                 "weights", core::format("{} x {}", info.hidden, info.intermediate),
                 core::format("{} x {}", packed.hidden, packed.intermediate));
  FUSEDMOE_CHECK(info.activation == packed.activation, "weights.activation",
                 core::format("{}, or other parameters", name(info.activation.kind)),
                 core::format("{} as packed", name(packed.activation.kind)));
  FUSEDMOE_CHECK(info.has_bias == packed.has_bias, "weights.bias", info.has_bias ? "given" : "none",
                 packed.has_bias ? "given" : "none");
  const auto check_scale = [](std::optional<float> now, std::optional<float> before) {
    FUSEDMOE_CHECK(!now || *now <= *before, "weights.input_scale", core::to_string(*now),
                   core::format("at most {}, the one packed", *before));
  };
  check_scale(info.a1_scale, packed.a1_scale);
  check_scale(info.a2_scale, packed.a2_scale);
}

ProblemSize check_experts_args(const ModularExperts& experts, const ExpertsArgs& args) {
  FUSEDMOE_CHECK(args.weights && experts.accepts(*args.weights), "weights",
                 args.weights ? args.weights->info().implementation : "null",
                 core::format("packed by {}", experts.name()));
  FUSEDMOE_CHECK(!args.hooks || experts.has_hooks(), "hooks",
                 core::format("given to {}", experts.name()),
                 "given to experts with injection points only");
  check_devices(args);
  const bool batched = experts.activation_format() == ActivationFormat::kBatchedExperts;
  const PackedWeights::Info& info = args.weights->info();
  const TensorView& x = args.hidden_states;
  const bool quantized =
      info.scheme.activations && !experts.expects_unquantized_inputs(info.scheme);
  const std::optional<QuantKey>& key = info.scheme.activations;
  if (quantized) {
    FUSEDMOE_CHECK(x.defined() && x.dtype() == key->value, "hidden_states", describe(x),
                   core::format("{}, quantized", name(key->value)));
  } else {
    FUSEDMOE_CHECK(x.defined() && is_activation_dtype(x.dtype()), "hidden_states", describe(x),
                   "f32, bf16 or f16");
    FUSEDMOE_CHECK(!args.hidden_scales, "hidden_scales", describe(args.hidden_scales),
                   "undefined: hidden_states are not quantized");
  }
  FUSEDMOE_CHECK(args.output.defined() && is_activation_dtype(args.output.dtype()), "output",
                 describe(args.output), "f32, bf16 or f16");
  ProblemSize problem = ProblemSize::of(info, 0, 1, args.output.dtype());
  if (batched) {
    check_tensor(x, "hidden_states", x.dtype(), {info.num_experts, -1, info.hidden});
    problem.num_tokens = x.size(1);
    check_batched(args, problem);
  } else {
    check_tensor(x, "hidden_states", x.dtype(), {-1, info.hidden});
    problem.num_tokens = x.size(0);
    check_standard(args, problem);
  }
  if (quantized) check_hidden_scales(args, *key);
  const WorkspacePlan plan = experts.plan(problem);
  check_tensor(args.output, "output", plan.output_dtype, plan.output_shape);
  if (problem.num_tokens == 0) return problem;
  FUSEDMOE_CHECK(args.workspace13 || plan.workspace13_bytes == 0, "workspace13", "null",
                 core::format("of {} bytes", plan.workspace13_bytes));
  FUSEDMOE_CHECK(args.workspace2 || plan.workspace2_bytes == 0, "workspace2", "null",
                 core::format("of {} bytes", plan.workspace2_bytes));
  return problem;
}

}  // namespace fusedmoe::core
