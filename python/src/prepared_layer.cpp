#include "prepared_layer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "fusedmoe/checkpoint.h"
#include "module.h"
#include "ranks.h"
#include "settings.h"

namespace fusedmoe::python {
namespace {

LayerOptions options_of(const nb::dict& settings) {
  LayerOptions options;
  options.device = parse_device(get<std::string>(settings, "device", "cpu"));
  options.dtype = dtype_of(get<std::string>(settings, "dtype", "bf16"), "dtype");
  const auto output = get<std::string>(settings, "output_dtype", "");
  if (!output.empty()) options.output_dtype = dtype_of(output, "output_dtype");
  options.require = get<std::string>(settings, "require", "");
  options.plan = get<std::string>(settings, "plan", "");
  options.batch_invariant = get(settings, "batch_invariant", false);
  options.inplace = get(settings, "inplace", false);
  options.monolithic = get(settings, "monolithic", false);
  options.parallel = {get(settings, "tp_size", 1), get(settings, "dp_size", 1),
                      get(settings, "ep_size", 1), get(settings, "ep_rank", 0),
                      get(settings, "tp_rank", 0), get(settings, "sequence_parallel", false)};
  read_ranks(settings, options);
  options.num_threads = get(settings, "num_threads", 0);
  options.max_workspace_bytes = get<std::size_t>(settings, "max_workspace_bytes", 0);
  const auto packed = get<std::string>(settings, "packed_weights", "");
  const bool read = get(settings, "packed_read", false),
             verify = get(settings, "packed_verify", true);
  if (!packed.empty()) {
    options.packed_weights = {packed, read ? FileAccess::kRead : FileAccess::kMap, verify};
  } else if (read || !verify) {
    throw Error::invalid("packed_weights", "packed_weights is not given, but how to read it");
  }
  return options;
}

PreparedLayer load(const Checkpoint& checkpoint, std::optional<std::int64_t> index,
                   const nb::dict& settings) {
  LayerOptions options = options_of(settings);
  const bool experts_only = get(settings, "experts_only", false);
  const WithoutGil no_gil;
  const std::vector<std::int64_t> layers = checkpoint.moe_layers();
  if (!index && layers.empty()) {
    throw Error::invalid("layer", "the checkpoint has no MoE layers");
  }
  const std::int64_t chosen = index ? *index : layers.front();
  const ParallelConfig parallel = parallel_of(options);
  LayerWeights weights = checkpoint.load_layer(chosen, parallel, options.ranks.placement);
  // The caller adds the outputs of all ranks.
  if (!options.ranks.communicator && parallel.rank() > 0) weights.shared_experts.reset();
  if (experts_only) {
    weights.router_weights = {};
    weights.shared_experts.reset();
  }
  return {{}, std::move(weights), std::move(options)};
}

/// `shared`: settings of the shared experts with their w13 and w2, or empty.
PreparedLayer create(nb::handle w13, nb::handle w2, const nb::dict& settings,
                     const nb::dict& shared) {
  PreparedLayer prepared;
  auto& [kept, weights, options] = prepared;
  options = options_of(settings);
  weights.router = router_of(settings);
  weights.router_weights.weight = tensor_of(item(settings, "router_weight"), "router_weight", kept);
  weights.router_weights.bias = tensor_of(item(settings, "router_bias"), "router_bias", kept);
  weights.router_weights.score_correction_bias =
      tensor_of(item(settings, "e_score_correction_bias"), "e_score_correction_bias", kept);
  weights.experts = experts_of(w13, w2, settings, kept);
  if (item(settings, "num_experts").is_none()) {
    weights.router.num_experts = static_cast<std::int64_t>(weights.experts.experts.size());
  }
  weights.expert_map = tensor_of(item(settings, "expert_map"), "expert_map", kept);
  if (!shared.empty()) {
    weights.shared_experts = {experts_within("shared", shared, kept),
                              tensor_of(item(shared, "gate"), "shared: gate", kept)};
  }
  const Tensor down = tensor_of(item(settings, "latent_down"), "latent_down", kept);
  const Tensor up = tensor_of(item(settings, "latent_up"), "latent_up", kept);
  if (down || up) weights.latent = {down, up};
  weights = own_slice(std::move(weights), parallel_of(options),
                      get<std::int64_t>(settings, "intermediate", 0));
  return prepared;
}

}  // namespace

ExpertWeights experts_of(nb::handle w13, nb::handle w2, const nb::dict& settings, Kept& kept) {
  const ExpertWeights::Stacked stacked = stacked_of(w13, w2, settings, kept);
  if (!stacked.w13) throw Error("w13", "None", "given", Fault::kNull);
  const QuantScheme scheme = scheme_of(settings, stacked.w13);
  const Activation activation = parse_activation(get<std::string>(settings, "activation", "silu"));
  const ActivationParams params = params_of(settings);
  const WithoutGil no_gil;
  return ExpertWeights::from_stacked(stacked, scheme, activation, params);
}

ExpertWeights experts_within(const char* argument, const nb::dict& settings, Kept& kept) {
  try {
    return experts_of(item(settings, "w13"), item(settings, "w2"), settings, kept);
  } catch (const Error& error) {
    throw error.within(argument);
  }
}

void bind_prepared_layers(nb::module_& module) {
  nb::class_<Checkpoint>(module, "Checkpoint")
      .def("moe_layers", &Checkpoint::moe_layers)
      .def("files", &Checkpoint::files)
      .def("scheme", [](const Checkpoint& self,
                        std::int64_t layer) { return name(self.config(layer).scheme); })
      .def("info", [](const Checkpoint& self) {
        const ModelConfig& model = self.config();
        nb::dict info;
        info["family"] = std::string(name(model.family));
        info["scheme"] = name(model.scheme);
        info["layout"] = std::string(name(model.layout));
        info["activation"] = std::string(name(model.activation));
        info["num_layers"] = model.num_layers;
        info["num_experts"] = model.router.num_experts;
        info["topk"] = model.router.topk;
        info["hidden"] = model.hidden;
        info["intermediate"] = model.intermediate;
        info["shared_intermediate"] = model.shared_intermediate;
        return info;
      });
  module.def(
      "open_checkpoint",
      [](const std::string& path, bool read_files, const std::string& family) {
        const WithoutGil no_gil;
        CheckpointOptions options;
        if (read_files) options.access = FileAccess::kRead;
        if (!family.empty()) options.family = Family::named(family);
        return Checkpoint::open(path, options);
      },
      nb::arg("path"), nb::arg("read_files"), nb::arg("family"));
  module.def("load_layer", &load, nb::arg("checkpoint"), nb::arg("layer").none(),
             nb::arg("settings"));
  module.def("create_layer", &create, nb::arg("w13").none(), nb::arg("w2").none(),
             nb::arg("settings"), nb::arg("shared"));
}

}  // namespace fusedmoe::python
