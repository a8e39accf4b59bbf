// Routers, quantizers, and what would run.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <tuple>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/simulation.h"
#include "module.h"
#include "ranks.h"
#include "settings.h"
#include "tools/machine.h"

namespace fusedmoe::python {
namespace {

/// What reads or writes the memory at once needs it in host memory.
TensorView on_host(const TensorView& view, const char* name) {
  if (view && !view.device().is_cpu()) {
    throw Error(name, "on " + to_string(view.device()), "in host memory", Fault::kDevice);
  }
  return view;
}

TensorView host_view(nb::handle array, const char* name, Kept& kept) {
  const TensorView view = on_host(view_of(array, name, kept), name);
  if (!view) throw Error(name, "None", "given", Fault::kNull);
  return view;
}

/// Bytes and floating-point operations per second of the CPU; see tools/machine.h.
nb::tuple cpu_limits(nb::handle memory, const std::string& dtype) {
  Kept kept;
  const TensorView view = host_view(memory, "memory", kept);
  const DType element = dtype_of(dtype, "dtype");
  const WithoutGil no_gil;
  const double bandwidth = measure_read_bandwidth(view), flops = measure_flop_rate(element);
  const WithGil gil;
  return nb::make_tuple(bandwidth, flops);
}

nb::tuple route_of(nb::handle logits, nb::handle bias, const nb::dict& settings) {
  Kept kept;
  RouterConfig config = router_of(settings);
  const TensorView scores = host_view(logits, "router_logits", kept);
  const TensorView correction =
      on_host(view_of(bias, "e_score_correction_bias", kept), "e_score_correction_bias");
  if (scores.rank() != 2) {
    throw Error("router_logits", to_string(scores.shape()), "(num_tokens, num_experts)",
                Fault::kShape);
  }
  config.num_experts = scores.size(1);
  config.validate();
  const Shape shape{scores.size(0), config.topk};
  const Tensor weights = Tensor::empty(shape, DType::kF32), ids = Tensor::empty(shape, DType::kI32);
  {
    const WithoutGil no_gil;
    route(config, scores, correction, {ids, weights});
  }
  return nb::make_tuple(weights, ids);
}

Tensor logits_of(nb::handle x, nb::handle weight, nb::handle bias) {
  Kept kept;
  const TensorView hidden_states = host_view(x, "hidden_states", kept);
  RouterWeights weights;
  weights.weight = Tensor(host_view(weight, "weight", kept), nullptr);
  weights.bias = tensor_of(bias, "bias", kept);
  on_host(weights.bias, "bias");
  if (hidden_states.rank() != 2 || weights.weight.rank() != 2) {
    throw Error("hidden_states", to_string(hidden_states.shape()),
                "(num_tokens, hidden), and weight (num_experts, hidden)", Fault::kShape);
  }
  Tensor logits = Tensor::empty({hidden_states.size(0), weights.weight.size(0)}, DType::kF32);
  const WithoutGil no_gil;
  router_logits(weights, hidden_states, logits);
  return logits;
}

nb::tuple quantize_weights_of(nb::handle values, const std::string& scheme,
                              const std::string& scale_rule, const std::string& scale_dtype,
                              std::optional<float> global_amax) {
  Kept kept;
  const TensorView source = host_view(values, "values", kept);
  QuantizeOptions options;
  options.scale_rule = parse_enum<MxScaleRule>(scale_rule, 4, "scale_rule",
                                               [](MxScaleRule rule) { return name(rule); });
  options.scale_dtype = dtype_of(scale_dtype, "scale_dtype");
  const QuantKey key = parse_scheme(scheme).weights;
  const bool groups_of_integers =
      (key.value == DType::kI4 || key.value == DType::kU8) && key.scale != DType::kE4M3;
  const std::pair<bool, const char*> ignored[] = {
      {options.scale_rule != MxScaleRule::kOcp && key.scale != DType::kE8M0, "scale_rule"},
      {options.scale_dtype != DType::kF32 && !groups_of_integers, "scale_dtype"},
      {global_amax && key != keys::nvfp4(), "global_amax"}};
  for (const auto& [is_ignored, argument] : ignored) {
    if (is_ignored) throw Error::conflict(argument, "scheme " + scheme);
  }
  QuantizedMatrix matrix;
  {
    const WithoutGil no_gil;
    matrix = quantize_weights(source, key, options, global_amax);
  }
  const auto part = [](const Tensor& tensor) {
    return tensor ? nb::cast(tensor) : nb::object(nb::none());
  };
  return nb::make_tuple(part(matrix.values), part(matrix.scales), part(matrix.zero_points),
                        part(matrix.global_scale));
}

Tensor dequantize_weights_of(nb::handle values, nb::handle scales, nb::handle zero_points,
                             nb::handle global_scale, const std::string& scheme, std::int64_t in) {
  Kept kept;
  WeightMatrix matrix;
  matrix.values = host_view(values, "values", kept);
  matrix.scales = on_host(view_of(scales, "scales", kept), "scales");
  matrix.zero_points = on_host(view_of(zero_points, "zero_points", kept), "zero_points");
  matrix.global_scale = on_host(view_of(global_scale, "global_scale", kept), "global_scale");
  const WithoutGil no_gil;
  return dequantize_weights(matrix, parse_scheme(scheme).weights, in);
}

nb::tuple quantize_activations_of(nb::handle x, const std::string& scheme,
                                  std::optional<float> scale) {
  Kept kept;
  const TensorView source = host_view(x, "x", kept);
  const QuantScheme parsed = parse_scheme(scheme);
  if (!parsed.activations) throw Error("scheme", scheme, "one that quantizes activations");
  if (source.rank() != 2) {
    throw Error("x", to_string(source.shape()), "(rows, columns)", Fault::kShape);
  }
  const QuantizedShape shape = quantized_shape(*parsed.activations, source.size(0), source.size(1));
  const Tensor values = Tensor::empty(shape.values, shape.values_dtype);
  const Tensor scales = Tensor::empty(shape.scales, shape.scales_dtype);
  {
    const WithoutGil no_gil;
    quantize(source, *parsed.activations, values, scales, scale);
  }
  return nb::make_tuple(values, scales);
}

MoeConfig config_of(const nb::dict& settings) {
  MoeConfig config;
  config.num_experts = get<std::int64_t>(settings, "num_experts", 0);
  config.num_local_experts = get<std::int64_t>(settings, "num_local_experts", config.num_experts);
  config.topk = get<std::int64_t>(settings, "topk", 0);
  config.hidden = get<std::int64_t>(settings, "hidden", 0);
  config.intermediate = get<std::int64_t>(settings, "intermediate", 0);
  config.dtype = dtype_of(get<std::string>(settings, "dtype", "bf16"), "dtype");
  const auto scheme = get<std::string>(settings, "scheme", "");
  config.scheme = scheme.empty() ? schemes::unquantized(config.dtype) : parse_scheme(scheme);
  config.activation = parse_activation(get<std::string>(settings, "activation", "silu"));
  config.activation_params = params_of(settings);
  config.has_bias = get(settings, "has_bias", false);
  config.has_expert_map = get(settings, "has_expert_map", false);
  config.apply_router_weight_on_input = get(settings, "apply_router_weight_on_input", false);
  config.batch_invariant = get(settings, "batch_invariant", false);
  config.monolithic = get(settings, "monolithic", false);
  config.device = parse_device(get<std::string>(settings, "device", "cpu"));
  return config;
}

Selection selection_of(MoeConfig config, const nb::dict& settings) {
  const int capability = get(settings, "compute_capability", 0);
  if (capability != 0) config.compute_capability = capability;
  const auto require = get<std::string>(settings, "require", "");
  return require.empty() ? explain(config) : select(config, require);
}

Selection explain_checkpoint(const Checkpoint& checkpoint, std::optional<std::int64_t> layer,
                             const nb::dict& settings) {
  return selection_of(moe_config(layer ? checkpoint.config(*layer) : checkpoint.common_config(),
                                 dtype_of(get<std::string>(settings, "dtype", "bf16"), "dtype"),
                                 parse_device(get<std::string>(settings, "device", "cpu"))),
                      settings);
}

nb::list candidates_of(const Selection& selection) {
  nb::list result;
  for (const Candidate& candidate : selection.candidates) {
    result.append(nb::make_tuple(
        std::string(candidate.experts->name()), std::string(candidate.prepare_finalize->name()),
        candidate.chosen, std::string(code(candidate.support.reason)), candidate.support.text));
  }
  return result;
}

/// The numbers of a SimulatedStep. `placement` and `costs` are JSON.
std::array<double, 7> simulate_selection(const Selection& selection, nb::handle topk_ids,
                                         std::int64_t tokens_per_rank, const std::string& placement,
                                         int num_hosts, const std::string& costs,
                                         bool to_each_expert) {
  Kept kept;
  const bool at_random = topk_ids.is_none();
  const TensorView ids = at_random ? TensorView() : host_view(topk_ids, "topk_ids", kept);
  SimulatedLayer layer = simulated_layer(selection, ExpertPlacement::parse(placement));
  layer.num_hosts = num_hosts;
  layer.tokens_per_rank = tokens_per_rank;
  layer.to_each_expert = to_each_expert;
  const RankCosts of_ranks = RankCosts::parse(costs);
  const WithoutGil no_gil;
  const SimulatedStep step =
      at_random ? simulate(of_ranks, layer, selection.config.topk) : simulate(of_ranks, layer, ids);
  return {step.dispatch_us,   step.experts_us, step.combine_us, step.inside_bytes,
          step.between_bytes, step.balance,    step.quantize_us};
}

}  // namespace

RouterConfig router_of(const nb::dict& settings) {
  RouterConfig config;
  config.num_experts = get<std::int64_t>(settings, "num_experts", 0);
  config.topk = get<std::int64_t>(settings, "topk", 0);
  config.scoring =
      parse_enum<ScoringFunc>(get<std::string>(settings, "scoring_func", "softmax"), 7,
                              "scoring_func", [](ScoringFunc scoring) { return name(scoring); });
  config.renormalize = get(settings, "renormalize", false);
  config.renormalize_epsilon = get(settings, "renormalize_epsilon", config.renormalize_epsilon);
  config.num_expert_group = get<std::int64_t>(settings, "num_expert_group", 0);
  config.topk_group = get<std::int64_t>(settings, "topk_group", 0);
  if (config.topk_group != 0 && config.num_expert_group == 0) {
    throw Error::conflict("topk_group", "num_expert_group 0");
  }
  config.routed_scaling_factor = get(settings, "routed_scaling_factor", 1.0F);
  config.sparsemixer_jitter = get(settings, "sparsemixer_jitter", config.sparsemixer_jitter);
  config.num_zero_experts = get<std::int64_t>(settings, "num_zero_experts", 0);
  config.apply_router_weight_on_input = get(settings, "apply_router_weight_on_input", false);
  return config;
}

void bind_numbers(nb::module_& module) {
  module.def("route", &route_of, nb::arg("router_logits").none(), nb::arg("bias").none(),
             nb::arg("settings"));
  module.def("router_logits", &logits_of, nb::arg("hidden_states").none(), nb::arg("weight").none(),
             nb::arg("bias").none());
  module.def("quantize_weights", &quantize_weights_of, nb::arg("values").none(), nb::arg("scheme"),
             nb::arg("scale_rule"), nb::arg("scale_dtype"), nb::arg("global_amax").none());
  module.def("dequantize_weights", &dequantize_weights_of, nb::arg("values").none(),
             nb::arg("scales").none(), nb::arg("zero_points").none(),
             nb::arg("global_scale").none(), nb::arg("scheme"), nb::arg("in_features"));
  module.def("quantize_activations", &quantize_activations_of, nb::arg("x").none(),
             nb::arg("scheme"), nb::arg("scale").none());
  module.def("cpu_limits", &cpu_limits, nb::arg("memory"), nb::arg("dtype"));
  module.def("schemes", [] {
    std::vector<std::string> names;
    for (const NamedScheme& named : named_schemes()) names.push_back(named.name);
    return names;
  });
  nb::class_<Selection>(module, "Selection")
      .def("table", &Selection::table)
      .def("json", &Selection::json)
      .def("candidates", &candidates_of)
      .def("packed_bytes", &Selection::packed_bytes)
      .def(
          "peer_bytes",
          [](const Selection& self, int num_ranks, std::int64_t max_tokens_per_rank,
             const nb::dict& settings) {
            RankOptions ranks;
            ranks.max_tokens_per_rank = max_tokens_per_rank;
            read_combine(settings, ranks);
            return self.peer_bytes(ranks, num_ranks);
          },
          nb::arg("num_ranks"), nb::arg("max_tokens_per_rank"), nb::arg("settings"))
      .def("num_experts", [](const Selection& self) { return self.config.num_experts; })
      .def("simulate", &simulate_selection, nb::arg("topk_ids").none(), nb::arg("tokens_per_rank"),
           nb::arg("placement"), nb::arg("num_hosts"), nb::arg("costs"), nb::arg("to_each_expert"))
      .def("workspace_bytes", [](const Selection& self, std::int64_t num_tokens, int num_threads) {
        Context context = make_context();
        context.num_threads = num_threads;
        return self.create(context).workspace_bytes(num_tokens);
      });
  module.def("explain",
             [](const nb::dict& settings) { return selection_of(config_of(settings), settings); });
  module.def("explain_checkpoint", &explain_checkpoint, nb::arg("checkpoint"),
             nb::arg("layer").none(), nb::arg("settings"));
  module.def("rank_costs", [] { return rank_costs().json(); });
}

}  // namespace fusedmoe::python
