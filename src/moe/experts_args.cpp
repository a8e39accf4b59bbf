#include "moe/experts_args.h"

#include <limits>

#include "core/check.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::core {
namespace {

void check_row_count(std::int64_t rows, const char* argument) {
  // Kernels count them in 32 bits, in steps of up to 2^15.
  constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max() - (1 << 16);
  FUSEDMOE_CHECK_FAULT(rows <= kMaxRows, kShape, argument, core::format("{} rows", rows),
                       core::format("at most {} rows of all experts", kMaxRows));
}

void check_counts(const ForwardArgs& args, const ProblemSize& problem) {
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

void check_hidden_scales(const ForwardArgs& args, const QuantKey& key) {
  const TensorView& x = args.hidden_states;
  const std::int64_t hidden = x.size(x.rank() - 1), group = key.group.cols;
  Shape shape{1, 1};
  if (key.group.rows == 1) {
    shape = x.shape();
    shape[x.rank() - 1] = group < 0 ? 1 : (hidden + group - 1) / group;
  }
  check_tensor(args.hidden_scales, "hidden_scales", *key.scale, shape);
}

/// Rank and dtype of the hidden states, and the scales beside them.
void check_hidden_states(const Experts& experts, const ForwardArgs& args) {
  const QuantScheme& scheme = experts.config().scheme;
  const TensorView& x = args.hidden_states;
  const bool quantized =
      scheme.activations && !experts.descriptor().expects_unquantized_inputs(scheme);
  const DType dtype = quantized ? scheme.activations->value : experts.config().dtype;
  const std::int64_t hidden = experts.config().hidden;
  if (experts.batched()) {
    check_tensor(x, "hidden_states", dtype, {experts.config().num_local_experts, -1, hidden});
  } else {
    check_rows(x, "hidden_states", dtype, {-1, hidden});
  }
  if (quantized) {
    check_hidden_scales(args, *scheme.activations);
  } else {
    FUSEDMOE_CHECK(!args.hidden_scales, "hidden_scales", describe(args.hidden_scales),
                   "undefined: hidden_states are not quantized");
  }
}

/// topk_ids and topk_weights, or what monolithic experts make them from.
void check_routing(const Experts& experts, const ForwardArgs& args, const ProblemSize& problem) {
  const MoeConfig& config = experts.config();
  if (args.expert_map) check_tensor(args.expert_map, "expert_map", DType::kI32, {-1});
  check_row_count(problem.num_tokens * problem.topk, "topk_ids");
  if (config.monolithic) {
    check_router_args(config, args, problem.num_tokens);
    check_tensor(args.topk_ids, "topk_ids", DType::kI32, {problem.num_tokens, args.router->topk});
  }
  check_tensor(args.topk_ids, "topk_ids", DType::kI32, {problem.num_tokens, -1});
  check_tensor(args.topk_weights, "topk_weights", DType::kF32, args.topk_ids.shape());
}

void check_places(const ForwardArgs& args, Device device) {
  FUSEDMOE_CHECK_FAULT(args.stream.device == device, kDevice, "stream",
                       core::format("of {}", to_string(args.stream.device)),
                       core::format("of {}, the device of the experts", to_string(device)));
  check_place(args.hidden_states, "hidden_states", device, true);
  check_place(args.fused_output, "fused_output", device, true);
  const std::pair<const TensorView*, const char*> others[] = {
      {&args.hidden_scales, "hidden_scales"},
      {&args.topk_ids, "topk_ids"},
      {&args.topk_weights, "topk_weights"},
      {&args.expert_map, "expert_map"},
      {&args.router_logits, "router_logits"},
      {&args.expert_num_tokens, "expert_num_tokens"},
      {&args.score_correction_bias, "score_correction_bias"},
      {&args.expert_load, "expert_load"}};
  for (const auto& [view, argument] : others) check_place(*view, argument, device, false);
}

}  // namespace

void check_place(const TensorView& view, const char* argument, Device device, bool rows) {
  if (!view) return;
  FUSEDMOE_CHECK_FAULT(view.device() == device, kDevice, argument,
                       core::format("on {}", to_string(view.device())),
                       core::format("on {}", to_string(device)));
  const bool wide = rows && !device.is_cpu();
  const auto element = static_cast<std::size_t>(std::max(bits(view.dtype()) / 8, 1));
  check_aligned(view.data(), argument, wide ? 16 : element);
  if (!wide || view.rank() < 2 || view.size(view.rank() - 2) < 2) return;
  const std::int64_t stride = view.stride(view.rank() - 2);
  FUSEDMOE_CHECK_FAULT(bytes(view.dtype(), stride) % 16 == 0, kLayout, argument,
                       core::format("rows with a stride of {} elements", stride),
                       "rows with a stride of a multiple of 16 bytes");
}

void check_router_args(const MoeConfig& config, const ForwardArgs& args, std::int64_t num_tokens) {
  FUSEDMOE_CHECK_FAULT(args.router, kNull, "router", "null", "given to monolithic experts");
  args.router->validate();
  const std::int64_t num_experts = config.num_experts;
  FUSEDMOE_CHECK(args.router->num_experts == num_experts, "router.num_experts",
                 core::to_string(args.router->num_experts), core::format("{}", num_experts));
  check_activation_dtype(args.router_logits, "router_logits");
  const DType logits = args.router_weights ? DType::kF32 : args.router_logits.dtype();
  check_tensor(args.router_logits, "router_logits", logits, {num_tokens, num_experts});
  const auto check_f32 = [&](const TensorView& view, const char* argument) {
    if (view) check_tensor(view, argument, DType::kF32, {num_experts});
  };
  check_f32(args.score_correction_bias, "score_correction_bias");
  if (args.expert_load) check_tensor(args.expert_load, "expert_load", DType::kI32, {num_experts});
  if (!args.router_weights) return;
  const auto& [weight, bias, correction_bias] = *args.router_weights;
  check_activation_dtype(weight, "router_weights.weight");
  check_tensor(weight, "router_weights.weight", weight.dtype(), {num_experts, config.hidden});
  if (bias) {
    check_activation_dtype(bias, "router_weights.bias");
    check_tensor(bias, "router_weights.bias", bias.dtype(), {num_experts});
  }
  check_f32(correction_bias, "router_weights.score_correction_bias");
}

Support supports_on_cpu(const MoeConfig& config, bool scheme_known,
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
  return supports_anywhere(config, {unit, unit});
}

namespace {

/// Whether monolithic experts can route what the configuration asks for.
Support supports_routing(const MoeConfig& config) {
  if (config.activation_format == ActivationFormat::kBatchedExperts) {
    return Support::no(Reason::kActivationFormat,
                       "batched: monolithic experts see all tokens, not those of each expert");
  }
  if (config.apply_router_weight_on_input) {
    return Support::no(Reason::kRouterWeightOnInput,
                       "the experts see logits: nobody weights the input");
  }
  if (config.routing_method == RoutingMethod::kUnspecified) {
    return Support::no(Reason::kRoutingMethod,
                       "unspecified: ids come from the caller, monolithic experts see logits");
  }
  if (config.routing_method == RoutingMethod::kCustom && !config.device.is_cpu()) {
    return Support::no(Reason::kRoutingMethod, "custom: its callback runs on the cpu");
  }
  return Support::yes();
}

}  // namespace

Support supports_anywhere(const MoeConfig& config, SizeUnits units) {
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
  if (config.num_experts < 1 || config.topk < 1 || config.topk > config.num_experts) {
    return no(Reason::kShape, core::format("topk {} of {} experts; takes 1 to all of at least one",
                                           config.topk, config.num_experts));
  }
  if (config.num_local_experts < 1 || config.num_local_experts > config.num_experts) {
    return no(Reason::kShape,
              core::format("{} local experts of {}; takes at least one, and no more than there are",
                           config.num_local_experts, config.num_experts));
  }
  if (config.apply_router_weight_on_input && config.topk != 1) {
    return no(Reason::kRouterWeightOnInput,
              core::format("router weight on input with topk {}, takes topk 1", config.topk));
  }
  if (config.num_local_experts != config.num_experts && !config.has_expert_map) {
    return no(Reason::kExpertMap, core::format("{} of {} experts are local without an expert map",
                                               config.num_local_experts, config.num_experts));
  }
  const bool batched = config.activation_format == ActivationFormat::kBatchedExperts;
  if (config.hooks && batched) {
    return no(Reason::kHooks, "the batched format has no injection points");
  }
  if (config.monolithic) return supports_routing(config);
  return Support::yes();
}

namespace {

/// All but the implementation. `device`: where the weights will be packed.
PackedWeights::Info info_of(const ExpertWeights& weights, Device device) {
  weights.validate();
  const Device source = weights.device();
  FUSEDMOE_CHECK_FAULT(
      source.is_cpu() || source == device, kDevice, "weights",
      core::format("on {}", to_string(source)),
      device.is_cpu() ? std::string("on cpu") : core::format("on cpu or {}", to_string(device)));
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
    if (!scale) return;
    const Tensor host = to_device(Tensor(scale, nullptr), {});
    largest = std::max(largest.value_or(0), *host.as<const float>());
  };
  for (const ExpertMatrices& expert : weights.experts) {
    include(info.a1_scale, expert.gate.input_scale);
    include(info.a1_scale, expert.up.input_scale);
    include(info.a2_scale, expert.down.input_scale);
  }
  return info;
}

}  // namespace

void check_supported(const ExpertsDescriptor& descriptor, const MoeConfig& config) {
  const Support support = descriptor.supports(config);
  if (!support)
    throw Error::unsupported(support.reason, std::string(descriptor.name()), support.text);
}

PackedWeights::Info make_packed_info(const Experts& experts, const ExpertWeights& weights) {
  PackedWeights::Info info = info_of(weights, experts.config().device);
  info.implementation = experts.descriptor().name();
  info.device = experts.config().device;
  const MoeConfig& config = experts.config();
  FUSEDMOE_CHECK(info.scheme == config.scheme, "weights.scheme", name(info.scheme),
                 core::format("{}, for which the experts were made", name(config.scheme)));
  FUSEDMOE_CHECK(matches(info, config), "weights",
                 core::format("{} experts of {} x {}, {}", info.num_experts, info.hidden,
                              info.intermediate, name(info.activation.kind)),
                 core::format("{} experts of {} x {}, {}, for which the experts were made",
                              config.num_local_experts, config.hidden, config.intermediate,
                              name(config.activation)));
  return info;
}

bool matches(const PackedWeights::Info& weights, const MoeConfig& config) {
  return weights.scheme == config.scheme && weights.num_experts == config.num_local_experts &&
         weights.hidden == config.hidden && weights.intermediate == config.intermediate &&
         weights.activation == resolve(config.activation, config.activation_params) &&
         weights.has_bias == config.has_bias && weights.device == config.device;
}

void check_expert(const Experts& experts, const PackedWeights& packed, std::int64_t expert) {
  FUSEDMOE_CHECK(experts.accepts(packed), "packed", packed.info().implementation,
                 core::format("packed by {} for this configuration", experts.descriptor().name()));
  FUSEDMOE_CHECK(expert >= 0 && expert < packed.info().num_experts, "expert",
                 core::to_string(expert), core::format("in [0, {})", packed.info().num_experts));
}

void check_replacement(const ExpertWeights& weights, const PackedWeights::Info& packed) {
  const PackedWeights::Info info = info_of(weights, packed.device);
  FUSEDMOE_CHECK(info.scheme == packed.scheme, "weights.scheme", name(info.scheme),
                 name(packed.scheme));
  FUSEDMOE_CHECK_FAULT(info.hidden == packed.hidden && info.intermediate == packed.intermediate,
                       kShape, "weights", core::format("{} x {}", info.hidden, info.intermediate),
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

ProblemSize problem_of(const Experts& experts, const ForwardArgs& args) {
  const bool batched = experts.batched();
  ProblemSize problem = ProblemSize::of(experts.config(), args.hidden_states.size(batched ? 1 : 0));
  problem.expected_rows = args.expected_rows;
  problem.output_dtype = args.fused_output.dtype();
  if (args.topk_ids && !batched) problem.topk = args.topk_ids.size(1);
  return problem;
}

void check_experts_args(const Experts& experts, const ForwardArgs& args) {
  const std::string_view name = experts.descriptor().name();
  FUSEDMOE_CHECK(args.weights && experts.accepts(*args.weights), "weights",
                 args.weights ? args.weights->info().implementation : "null",
                 core::format("packed by {} for this configuration", name));
  FUSEDMOE_CHECK_SUPPORTED(!args.hooks || experts.config().hooks, kHooks, "hooks",
                           core::format("given to {}", name),
                           "given to experts of a configuration with hooks only");
  check_hidden_states(experts, args);
  FUSEDMOE_CHECK_FAULT(args.fused_output.defined(), kNull, "fused_output", "undefined", "given");
  const ProblemSize problem = problem_of(experts, args);
  if (experts.batched()) {
    check_counts(args, problem);
  } else {
    check_routing(experts, args, problem);
  }
  const WorkspacePlan plan = experts.plan(problem);
  FUSEDMOE_CHECK_FAULT(args.fused_output.dtype() == experts.config().dtype ||
                           args.fused_output.dtype() == DType::kF32,
                       kDType, "fused_output", describe(args.fused_output),
                       core::format("{} or f32", fusedmoe::name(experts.config().dtype)));
  check_rows(args.fused_output, "fused_output", plan.output_dtype, plan.output_shape);
  check_places(args, experts.config().device);
  if (problem.num_tokens == 0) return;
  FUSEDMOE_CHECK_FAULT(args.workspace13 || plan.workspace13_bytes == 0, kWorkspace, "workspace13",
                       "null", core::format("of {} bytes", plan.workspace13_bytes));
  FUSEDMOE_CHECK_FAULT(args.workspace2 || plan.workspace2_bytes == 0, kWorkspace, "workspace2",
                       "null", core::format("of {} bytes", plan.workspace2_bytes));
}

}  // namespace fusedmoe::core
