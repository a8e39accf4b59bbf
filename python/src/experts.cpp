// The experts alone: fused_experts() with a cache of packed weights.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <mutex>
#include <utility>

#include "module.h"
#include "settings.h"

namespace fusedmoe::python {
namespace {

/// A PackCache for any thread, which keeps the arrays alive that it has packed: their addresses
/// are its keys, so nothing else may come to lie there.
struct PyPackCache {
  PackCache cache;
  std::vector<Kept> sources;
  std::mutex mutex;  ///< of both; who waits for it does not hold the GIL

  /// Forgets everything. The caller destroys the arrays after it has released the mutex, because
  /// that can run any Python code.
  std::vector<Kept> forget() {
    cache.clear();
    return std::exchange(sources, {});
  }
  void run(const FusedExpertsArgs& args, Kept& weights, std::vector<Kept>& forgotten);
};

/// Without the GIL. If the call packs the weights, the cache keeps their memory, even where the
/// call fails afterwards. What it cannot keep it forgets, with everything else.
void PyPackCache::run(const FusedExpertsArgs& args, Kept& weights, std::vector<Kept>& forgotten) {
  const std::lock_guard lock(mutex);
  const auto keep_if_packed = [&, before = cache.size()] {
    if (cache.size() == before) return;
    const WithGil gil;
    try {
      hold_memory(weights);
      sources.push_back(std::move(weights));
    } catch (...) {
      forgotten = forget();
      throw;
    }
  };
  try {
    fused_experts(args, cache);
  } catch (...) {
    keep_if_packed();
    throw;
  }
  keep_if_packed();
}

struct Member {
  const char* name;
  const char* argument;  ///< what the library calls it
  Tensor ExpertWeights::Stacked::*member;
};

/// vLLM's names.
constexpr std::array<Member, 10> kMembers{{
    {"w1_scale", "w13_scales", &ExpertWeights::Stacked::w13_scales},
    {"w1_zp", "w13_zero_points", &ExpertWeights::Stacked::w13_zero_points},
    {"w1_global_scale", "w13_global_scales", &ExpertWeights::Stacked::w13_global_scales},
    {"a1_scale", "w13_input_scales", &ExpertWeights::Stacked::w13_input_scales},
    {"w1_bias", "w13_bias", &ExpertWeights::Stacked::w13_bias},
    {"w2_scale", "w2_scales", &ExpertWeights::Stacked::w2_scales},
    {"w2_zp", "w2_zero_points", &ExpertWeights::Stacked::w2_zero_points},
    {"w2_global_scale", "w2_global_scales", &ExpertWeights::Stacked::w2_global_scales},
    {"a2_scale", "w2_input_scales", &ExpertWeights::Stacked::w2_input_scales},
    {"w2_bias", "w2_bias", &ExpertWeights::Stacked::w2_bias},
}};

}  // namespace

std::string_view python_name(std::string_view argument) {
  for (const Member& member : kMembers) {
    if (argument == member.argument) return member.name;
  }
  return argument;
}

namespace {

std::string_view name_of(GateUpLayout layout) {
  constexpr std::string_view kNames[] = {"gate_up", "up_gate", "interleaved"};
  return kNames[static_cast<int>(layout)];
}

std::string_view name_of(ScaleLayout layout) {
  return layout == ScaleLayout::kFlat ? "flat" : "tiled_128x4";
}

std::optional<float> optional_float(const nb::dict& settings, const char* key) {
  return item(settings, key).is_none() ? std::nullopt : std::optional(get(settings, key, 0.0F));
}

void fused_experts_of(PyPackCache& cache, nb::handle hidden_states, nb::handle w13, nb::handle w2,
                      nb::handle topk_weights, nb::handle topk_ids, nb::handle out,
                      const nb::dict& settings, std::optional<std::uintptr_t> stream,
                      nb::handle scratch) {
  Kept kept, weights;
  FusedExpertsArgs args;
  args.hidden_states = view_of(hidden_states, "hidden_states", kept);
  args.weights = stacked_of(w13, w2, settings, weights);
  args.topk_weights = view_of(topk_weights, "topk_weights", kept);
  args.topk_ids = view_of(topk_ids, "topk_ids", kept);
  args.output = output_view_of(out, "out", kept);
  if (settings.contains("scheme")) args.scheme = scheme_of(settings, args.weights.w13);
  args.activation = parse_activation(get<std::string>(settings, "activation", "silu"));
  args.activation_params = params_of(settings);
  args.apply_router_weight_on_input = get(settings, "apply_router_weight_on_input", false);
  args.global_num_experts = get<std::int64_t>(settings, "global_num_experts", 0);
  args.expert_map = view_of(item(settings, "expert_map"), "expert_map", kept);
  args.require = get<std::string>(settings, "require", "");
  args.stream = stream_of(stream, args.hidden_states.device());
  if (!scratch.is_none()) {
    args.workspace = [&](std::size_t bytes) {
      return scratch_from(scratch, bytes, args.hidden_states.device(), kept);
    };
  }
  std::vector<Kept> forgotten;
  const WithoutGil no_gil;
  cache.run(args, weights, forgotten);
}

void clear(PyPackCache& cache) {
  std::vector<Kept> forgotten;
  const WithoutGil no_gil;
  const std::lock_guard lock(cache.mutex);
  forgotten = cache.forget();
}

}  // namespace

ExpertWeights::Stacked stacked_of(nb::handle w13, nb::handle w2, const nb::dict& settings,
                                  Kept& kept) {
  ExpertWeights::Stacked stacked;
  stacked.w13 = tensor_of(w13, "w13", kept);
  stacked.w2 = tensor_of(w2, "w2", kept);
  if (settings.empty()) return stacked;
  for (const Member& member : kMembers) {
    if (settings.contains(member.name)) {
      stacked.*member.member = tensor_of(item(settings, member.name), member.name, kept);
    }
  }
  stacked.gate_up_layout = parse_enum<GateUpLayout>(
      get<std::string>(settings, "gate_up_layout", "gate_up"), 3, "gate_up_layout",
      [](GateUpLayout layout) { return name_of(layout); });
  stacked.transposed = get(settings, "transposed", false);
  stacked.scale_layout =
      parse_enum<ScaleLayout>(get<std::string>(settings, "scale_layout", "flat"), 2, "scale_layout",
                              [](ScaleLayout layout) { return name_of(layout); });
  return stacked;
}

QuantScheme scheme_of(const nb::dict& settings, const Tensor& w13) {
  const auto scheme = get<std::string>(settings, "scheme", "");
  return scheme.empty() ? schemes::unquantized(w13.dtype()) : parse_scheme(scheme);
}

ActivationParams params_of(const nb::dict& settings) {
  return {optional_float(settings, "alpha"), optional_float(settings, "beta"),
          optional_float(settings, "limit"), optional_float(settings, "situ_beta"),
          optional_float(settings, "situ_linear_beta")};
}

void bind_experts(nb::module_& module) {
  nb::class_<PyPackCache>(module, "PackCache",
                          "Weights that fused_experts() has packed, and the arrays they came from.")
      .def(nb::init<>())
      .def("clear", &clear, "Forgets everything: after weights have changed in place.")
      .def("__len__", [](PyPackCache& self) {
        const WithoutGil no_gil;
        const std::lock_guard lock(self.mutex);
        return self.cache.size();
      });
  module.def("fused_experts", &fused_experts_of, nb::arg("cache"), nb::arg("hidden_states").none(),
             nb::arg("w13").none(), nb::arg("w2").none(), nb::arg("topk_weights").none(),
             nb::arg("topk_ids").none(), nb::arg("out").none(), nb::arg("settings"),
             nb::arg("stream").none(), nb::arg("scratch").none());
}

}  // namespace fusedmoe::python
