#include "moe/experts_args.h"

#include "core/check.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::core {
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
  const auto unit = [](const QuantKey& key) -> std::int64_t {
    return key.value == DType::kE2M1 ? 2 : 1;
  };
  return supports_anywhere(config,
                           {unit(config.scheme.weights), unit(config.scheme.down_weights())});
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
  if (config.routing_method == RoutingMethod::kNone) {
    return Support::no(
        Reason::kRoutingMethod,
        "none: ids come from the caller or the layer, monolithic experts see logits");
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
  // So that the bytes of all experts' weights, at most 4 * 3 * kMost^3, fit into 63 bits.
  constexpr std::int64_t kMost = 1 << 19;
  for (const std::int64_t size :
       {config.hidden, config.intermediate, config.num_experts, config.num_local_experts}) {
    if (size > kMost)
      return no(Reason::kShape, core::format("a size of {}; at most {}", size, kMost));
  }
  if (config.num_experts < 1 || config.topk < 1 || config.topk > config.num_experts) {
    return no(Reason::kShape, core::format("topk {} of {} experts; takes 1 to all of at least one",
                                           config.topk, config.num_experts));
  }
  // A rank may hold several copies of an expert.
  const bool copies = config.parallel.ep_size > 1 && config.has_expert_map;
  if (config.num_local_experts < 1 || (config.num_local_experts > config.num_experts && !copies)) {
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
  info.activation_params = weights.activation_params;
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

PackedWeights::Info make_packed_info(const Experts& experts, const ExpertWeights& weights,
                                     const PackOptions& options) {
  const Device device = experts.config().device;
  FUSEDMOE_CHECK_FAULT(!options.stream || options.stream->device == device, kDevice,
                       "options.stream", core::format("of {}", to_string(options.stream->device)),
                       core::format("of {}, the device of the experts", to_string(device)));
  PackedWeights::Info info = info_of(weights, device);
  info.implementation = experts.descriptor().name();
  info.device = device;
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

const Tensor& part(const PackedParts& parts, std::string_view name, DType dtype,
                   const Shape& shape) {
  const auto found = parts.find(name);
  const std::string argument = core::format("parts[\"{}\"]", name);
  if (found == parts.end()) {
    throw Error::invalid(argument, core::format("packed weights lack their part \"{}\"", name));
  }
  const Tensor& tensor = found->second;
  FUSEDMOE_CHECK_FAULT(
      tensor.dtype() == dtype && tensor.shape() == shape && tensor.contiguous(), kShape, argument,
      core::format("{} {}", fusedmoe::name(tensor.dtype()), to_string(tensor.shape())),
      core::format("{} {}", fusedmoe::name(dtype), to_string(shape)));
  return tensor;
}

std::int64_t slice_position(std::int64_t value, std::string_view part) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  FUSEDMOE_CHECK(value >= 0 && value < kMost, core::format("parts[\"{}\"]", part),
                 core::to_string(value), core::format("in [0, {})", kMost));
  return value;
}

void check_expert(const Experts& experts, const PackedWeights& packed, std::int64_t expert) {
  FUSEDMOE_CHECK(experts.accepts(packed), "packed", packed.info().implementation,
                 core::format("packed by {} for this configuration", experts.descriptor().name()));
  check_expert_index(packed.info(), expert);
}

void check_expert_index(const PackedWeights::Info& packed, std::int64_t expert) {
  FUSEDMOE_CHECK(expert >= 0 && expert < packed.num_experts, "expert", core::to_string(expert),
                 core::format("in [0, {})", packed.num_experts));
}

PackedWeights::Info info_of_one(PackedWeights::Info packed) {
  packed.num_experts = 1;
  packed.read_only = false;
  return packed;
}

void check_writable(const PackedWeights::Info& packed) {
  if (!packed.read_only) return;
  throw Error::invalid("packed",
                       "packed is mapped from a file, which nobody may write to: read the file "
                       "instead (FileAccess::kRead, in C and Python packed_read) to replace "
                       "experts");
}

void check_one_expert(const PackedWeights::Info& packed, std::int64_t expert,
                      const PackedWeights::Info& one) {
  check_writable(packed);
  check_expert_index(packed, expert);
  const auto describe = [](const PackedWeights::Info& info) {
    return core::format("of {} x {}, {}, {}, bias {}, static scales {} and {}", info.hidden,
                        info.intermediate, name(info.scheme), name(info.activation.kind),
                        info.has_bias ? "yes" : "no", info.a1_scale.value_or(0),
                        info.a2_scale.value_or(0));
  };
  FUSEDMOE_CHECK(one.num_experts == 1, "one", core::format("{} experts", one.num_experts),
                 "one expert");
  FUSEDMOE_CHECK(describe(one) == describe(packed) && one.activation == packed.activation, "one",
                 describe(one), describe(packed));
}

void check_replacement(const ExpertWeights& weights, const PackedWeights::Info& packed) {
  check_writable(packed);
  const PackedWeights::Info info = info_of(weights, packed.device);
  FUSEDMOE_CHECK(info.scheme == packed.scheme, "weights.scheme", name(info.scheme),
                 name(packed.scheme));
  FUSEDMOE_CHECK_FAULT(info.hidden == packed.hidden && info.intermediate == packed.intermediate,
                       kShape, "weights", core::format("{} x {}", info.hidden, info.intermediate),
                       core::format("{} x {}", packed.hidden, packed.intermediate));
  FUSEDMOE_CHECK(info.activation == packed.activation, "weights.activation",
                 core::format("{}, or other parameters", name(info.activation.kind)),
                 core::format("{} as packed", name(packed.activation.kind)));
  FUSEDMOE_CHECK(info.has_bias == packed.has_bias, "weights.bias",
                 info.has_bias ? "present" : "absent",
                 packed.has_bias ? "present, as packed" : "absent, as packed");
  const auto check_scale = [](std::optional<float> now, std::optional<float> before) {
    FUSEDMOE_CHECK(!now || *now <= *before, "weights.input_scale", core::to_string(*now),
                   core::format("at most {}, the one packed", *before));
  };
  check_scale(info.a1_scale, packed.a1_scale);
  check_scale(info.a2_scale, packed.a2_scale);
}

}  // namespace fusedmoe::core
