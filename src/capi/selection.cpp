// What would run, and why.
#include "fusedmoe/selection.h"

#include <string>
#include <utility>
#include <vector>

#include "capi/checkpoint.h"
#include "capi/convert.h"
#include "fusedmoe/simulation.h"
#include "fusedmoe_selection.h"

struct fusedmoe_selection {
  explicit fusedmoe_selection(fusedmoe::Selection found)
      : selection(std::move(found)), table(selection.table()), json(selection.json()) {
    for (const fusedmoe::Candidate& candidate : selection.candidates) {
      experts.emplace_back(candidate.experts->name());
      prepare_finalize.emplace_back(candidate.prepare_finalize->name());
    }
  }

  fusedmoe::Selection selection;
  std::string table, json;
  std::vector<std::string> experts, prepare_finalize;  ///< names of the candidates
};

namespace fusedmoe::capi {
namespace {

MoeConfig to_config(const fusedmoe_moe_config& c) {
  MoeConfig config;
  config.num_experts = c.num_experts;
  config.num_local_experts = c.num_local_experts ? c.num_local_experts : c.num_experts;
  config.topk = c.topk;
  config.hidden = c.hidden;
  config.intermediate = c.intermediate;
  config.dtype = to_dtype_or(c.dtype, DType::kBF16, "config.dtype");
  config.scheme = c.scheme ? parse_scheme(c.scheme) : schemes::unquantized(config.dtype);
  if (c.activation) config.activation = parse_activation(c.activation);
  config.has_bias = c.has_bias != 0;
  config.has_expert_map = c.has_expert_map != 0;
  config.apply_router_weight_on_input = c.apply_router_weight_on_input != 0;
  config.batch_invariant = c.batch_invariant != 0;
  config.monolithic = c.monolithic != 0;
  config.hooks = c.hooks != 0;
  config.device = to_device_id(c.device_type, c.device_index, "config.device");
  if (c.compute_capability) config.compute_capability = c.compute_capability;
  return config;
}

/// What would run a layer of this model.
fusedmoe_selection* explain_model(const ModelConfig& model, std::int32_t dtype, Device device,
                                  std::int32_t compute_capability) {
  MoeConfig config = moe_config(model, to_dtype_or(dtype, DType::kBF16, "dtype"), device);
  if (compute_capability) config.compute_capability = compute_capability;
  return new fusedmoe_selection(explain(config));
}

SimulatedLayer to_layer(const Selection& selection, const fusedmoe_simulation& c) {
  if (c.reserved != 0) throw Error("simulation.reserved", std::to_string(c.reserved), "0");
  const ExpertPlacement placement =
      c.placement ? ExpertPlacement::parse(c.placement)
                  : ExpertPlacement::linear(selection.config.num_experts, c.num_ranks);
  SimulatedLayer layer = simulated_layer(selection, placement);
  if (c.num_ranks != 0 && c.num_ranks != placement.num_ranks()) {
    throw Error("simulation.num_ranks", std::to_string(c.num_ranks),
                "0, or the placement's " + std::to_string(placement.num_ranks()));
  }
  layer.num_hosts = c.num_hosts == 0 ? 1 : c.num_hosts;
  layer.tokens_per_rank = c.tokens_per_rank;
  layer.to_each_expert = c.to_each_expert != 0;
  return layer;
}

}  // namespace
}  // namespace fusedmoe::capi

using fusedmoe::capi::given;
using fusedmoe::capi::guarded;

fusedmoe_status fusedmoe_explain(const fusedmoe_moe_config* config,
                                 fusedmoe_selection** selection) {
  return guarded([&] {
    given(selection, "selection");
    const fusedmoe_moe_config c = fusedmoe::capi::read_given_struct(config, "config");
    const fusedmoe::MoeConfig asked = fusedmoe::capi::to_config(c);
    *selection = new fusedmoe_selection(c.require ? fusedmoe::select(asked, c.require)
                                                  : fusedmoe::explain(asked));
  });
}

fusedmoe_status fusedmoe_explain_checkpoint(const fusedmoe_checkpoint* checkpoint, int32_t dtype,
                                            int32_t device_type, int32_t device_index,
                                            int32_t compute_capability,
                                            fusedmoe_selection** selection) {
  return guarded([&] {
    given(selection, "selection");
    *selection = fusedmoe::capi::explain_model(
        given(checkpoint, "checkpoint").checkpoint.common_config(), dtype,
        fusedmoe::capi::to_device_id(device_type, device_index, "device"), compute_capability);
  });
}

fusedmoe_status fusedmoe_explain_layer(const fusedmoe_checkpoint* checkpoint, int64_t layer,
                                       int32_t dtype, int32_t device_type, int32_t device_index,
                                       int32_t compute_capability, fusedmoe_selection** selection) {
  return guarded([&] {
    given(selection, "selection");
    *selection = fusedmoe::capi::explain_model(
        given(checkpoint, "checkpoint").checkpoint.config(layer), dtype,
        fusedmoe::capi::to_device_id(device_type, device_index, "device"), compute_capability);
  });
}

void fusedmoe_selection_destroy(fusedmoe_selection* selection) {
  delete selection;
}

size_t fusedmoe_selection_size(const fusedmoe_selection* selection) {
  return selection ? selection->selection.candidates.size() : 0;
}

fusedmoe_status fusedmoe_selection_get(const fusedmoe_selection* selection, size_t index,
                                       fusedmoe_candidate* candidate) {
  return guarded([&] {
    const auto& candidates = given(selection, "selection").selection.candidates;
    if (index >= candidates.size()) {
      throw fusedmoe::Error("index", std::to_string(index),
                            "below " + std::to_string(candidates.size()));
    }
    fusedmoe_candidate values{};
    values.experts = selection->experts[index].c_str();
    values.prepare_finalize = selection->prepare_finalize[index].c_str();
    values.chosen = candidates[index].chosen;
    values.reason = static_cast<int32_t>(candidates[index].support.reason);
    values.text = candidates[index].support.text.c_str();
    fusedmoe::capi::write_struct(candidate, values, "candidate");
  });
}

const char* fusedmoe_selection_table(const fusedmoe_selection* selection) {
  return selection ? selection->table.c_str() : "";
}

const char* fusedmoe_selection_json(const fusedmoe_selection* selection) {
  return selection ? selection->json.c_str() : "";
}

fusedmoe_status fusedmoe_selection_workspace_bytes(const fusedmoe_selection* selection,
                                                   int64_t num_tokens, int32_t num_threads,
                                                   size_t* bytes) {
  return guarded([&] {
    given(bytes, "bytes");
    const fusedmoe::Selection& chosen = given(selection, "selection").selection;
    fusedmoe::Context context = fusedmoe::make_context();
    context.num_threads = num_threads;
    *bytes = chosen.create(context).workspace_bytes(num_tokens);
  });
}

fusedmoe_status fusedmoe_selection_packed_bytes(const fusedmoe_selection* selection,
                                                int64_t* bytes) {
  return guarded([&] {
    given(bytes, "bytes");
    *bytes = given(selection, "selection").selection.packed_bytes();
  });
}

fusedmoe_status fusedmoe_selection_peer_bytes(const fusedmoe_selection* selection,
                                              int32_t num_ranks, int64_t max_tokens_per_rank,
                                              int32_t combine, int32_t combine_dtype,
                                              size_t* bytes) {
  return guarded([&] {
    given(bytes, "bytes");
    fusedmoe::RankOptions ranks;
    ranks.max_tokens_per_rank = max_tokens_per_rank;
    ranks.combine = fusedmoe::capi::to_combine(combine, "combine");
    if (combine_dtype)
      ranks.combine_dtype = fusedmoe::capi::to_dtype(combine_dtype, "combine_dtype");
    *bytes = given(selection, "selection").selection.peer_bytes(ranks, num_ranks);
  });
}

fusedmoe_status fusedmoe_selection_simulate(const fusedmoe_selection* selection,
                                            const fusedmoe_simulation* simulation,
                                            const fusedmoe_tensor* topk_ids,
                                            fusedmoe_simulated_step* step) {
  return guarded([&] {
    const fusedmoe_simulation c = fusedmoe::capi::read_given_struct(simulation, "simulation");
    const fusedmoe::RankCosts costs =
        c.costs ? fusedmoe::RankCosts::parse(c.costs) : fusedmoe::rank_costs();
    const fusedmoe::Selection& of = given(selection, "selection").selection;
    const fusedmoe::SimulatedLayer layer = fusedmoe::capi::to_layer(of, c);
    const fusedmoe::SimulatedStep result =
        topk_ids ? simulate(costs, layer, fusedmoe::capi::to_view(*topk_ids, "topk_ids"))
                 : simulate(costs, layer, of.config.topk);
    fusedmoe_simulated_step values{};
    values.dispatch_us = result.dispatch_us;
    values.experts_us = result.experts_us;
    values.combine_us = result.combine_us;
    values.inside_bytes = result.inside_bytes;
    values.between_bytes = result.between_bytes;
    values.balance = result.balance;
    values.quantize_us = result.quantize_us;
    fusedmoe::capi::write_struct(step, values, "step");
  });
}

const char* fusedmoe_rank_costs(void) {
  const char* text = nullptr;
  guarded([&] {
    static const std::string json = fusedmoe::rank_costs().json();
    text = json.c_str();
  });
  return text;
}
