// Layers: made from a checkpoint or from tensors of the caller's, and run.
#include "fusedmoe/layer.h"

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "capi/callbacks.h"
#include "capi/checkpoint.h"
#include "capi/communicator.h"
#include "capi/convert.h"

namespace fusedmoe::capi {
namespace {

RankOptions to_rank_options(const fusedmoe_layer_options& o) {
  RankOptions ranks;
  if (o.communicator) ranks.communicator = o.communicator->communicator;
  if (o.placement) ranks.placement = ExpertPlacement::parse(o.placement);
  ranks.max_tokens_per_rank = o.max_tokens_per_rank;
  ranks.receive_capacity = o.receive_capacity;
  ranks.drop_rows = o.drop_rows != 0;
  if (o.nearest_replica) ranks.replica_choice = ReplicaChoice::kNearest;
  ranks.combine = to_combine(o.combine, "options.combine");
  if (o.dispatch_dtype) {
    ranks.dispatch_dtype = to_dtype(o.dispatch_dtype, "options.dispatch_dtype");
  }
  if (o.lanes) ranks.lanes = o.lanes;
  if (o.combine_dtype) ranks.combine_dtype = to_dtype(o.combine_dtype, "options.combine_dtype");
  if (o.fixed_sizes) {
    throw Error("options.fixed_sizes", std::to_string(o.fixed_sizes),
                "0: sizes are fixed by args.fixed_sizes, for each forward");
  }
  return ranks;
}

LayerOptions to_options(const fusedmoe_layer_options& o, Executor* executor) {
  LayerOptions options;
  options.device = to_device_id(o.device_type, o.device_index, "options.device");
  options.dtype = to_dtype_or(o.dtype, DType::kBF16, "options.dtype");
  if (o.output_dtype) options.output_dtype = to_dtype(o.output_dtype, "options.output_dtype");
  options.require = to_text(o.require);
  options.plan = to_text(o.plan);
  options.batch_invariant = o.batch_invariant != 0;
  options.inplace = o.inplace != 0;
  options.hooks = o.hooks != 0;
  options.monolithic = o.monolithic != 0;
  const auto size_of = [](std::int32_t size) { return size == 0 ? 1 : size; };
  options.parallel = {size_of(o.tp_size), size_of(o.dp_size), size_of(o.ep_size),
                      o.ep_rank,          o.tp_rank,          o.sequence_parallel != 0};
  options.ranks = to_rank_options(o);
  options.num_threads = o.num_threads;
  options.executor = executor;
  options.max_workspace_bytes = o.max_workspace_bytes;
  if (o.packed_weights) {
    options.packed_weights = {to_text(o.packed_weights),
                              o.packed_read != 0 ? FileAccess::kRead : FileAccess::kMap,
                              o.packed_unverified == 0};
  } else if (o.packed_read != 0 || o.packed_unverified != 0) {
    throw Error::invalid("options.packed_weights",
                         "options.packed_weights is not given, but how to read it");
  }
  return options;
}

LayerWeights to_layer_weights(const fusedmoe_layer_weights* weights,
                              const ParallelConfig& parallel) {
  const fusedmoe_layer_weights w = read_given_struct(weights, "weights");
  LayerWeights result;
  result.router = to_router(w.router, "weights.router");
  result.router_weights.weight = to_tensor(w.router_weight, "weights.router_weight");
  result.router_weights.bias = to_tensor(w.router_bias, "weights.router_bias");
  result.router_weights.score_correction_bias =
      to_tensor(w.score_correction_bias, "weights.score_correction_bias");
  result.experts = to_experts(w.experts, "weights.experts").weights();
  result.expert_map = to_tensor(w.expert_map, "weights.expert_map");
  if (w.shared_experts) {
    result.shared_experts = {to_experts(w.shared_experts, "weights.shared_experts").weights(),
                             to_tensor(w.shared_gate, "weights.shared_gate")};
  } else if (w.shared_gate.dtype != FUSEDMOE_NONE) {
    throw Error::invalid("weights.shared_gate",
                         "weights.shared_gate is given without weights.shared_experts, whose "
                         "output alone it scales");
  }
  const Tensor down = to_tensor(w.latent_down, "weights.latent_down");
  const Tensor up = to_tensor(w.latent_up, "weights.latent_up");
  if (down || up) result.latent = {down, up};
  return own_slice(std::move(result), parallel, w.intermediate);
}

}  // namespace
}  // namespace fusedmoe::capi

struct fusedmoe_layer {
  fusedmoe_layer(std::unique_ptr<fusedmoe::Executor> threads, fusedmoe::LayerWeights weights,
                 const fusedmoe::LayerOptions& options)
      : executor(std::move(threads)),
        layer(std::move(weights), options),
        output_dtype(options.output_dtype.value_or(options.dtype)) {
    describe();
  }
  /// The texts that C may keep, of what the layer is now.
  void describe() {
    plan_line = layer.plan_line();
    plan = layer.plan_json();
    table = layer.selection().table();
    const auto placed = layer.placement();
    placement = placed ? std::optional(placed->json()) : std::nullopt;
  }

  std::unique_ptr<fusedmoe::Executor> executor;
  fusedmoe::MoeLayer layer;
  fusedmoe::DType output_dtype;
  std::string plan_line, plan, table;
  std::optional<std::string> placement;  // JSON
};

namespace fusedmoe::capi {
namespace {

/// load(options) returns the weights. Where it fails on one rank the others learn why.
template <typename Load>
fusedmoe_status make_layer(const fusedmoe_layer_options* options, fusedmoe_layer** layer,
                           Load&& load) {
  return guarded([&] {
    const fusedmoe_layer_options o = read_struct(options, "options");
    std::unique_ptr<Executor> executor;
    LayerOptions made;
    LayerWeights weights;
    const auto prepare = [&] {
      given(layer, "layer");
      if (o.executor) {
        executor = std::make_unique<CallerExecutor>(o.executor, "options.executor");
      }
      made = to_options(o, executor.get());
      weights = load(made);
      if (o.experts_only) {
        weights.router_weights = {};
        weights.shared_experts.reset();
      }
    };
    if (o.communicator) {
      o.communicator->communicator->together(prepare, "loading a layer");
    } else {
      prepare();
    }
    *layer = new fusedmoe_layer(std::move(executor), std::move(weights), made);
  });
}

/// Where experts that no rank has come from.
ExpertSource to_source(const fusedmoe_lost_experts* lost) {
  if (!lost) return {};
  const fusedmoe_lost_experts l = read_struct(lost, "lost");
  if ((l.checkpoint != nullptr) == (l.run != nullptr)) {
    throw Error::invalid("lost", "lost needs one of checkpoint and run, where experts come from");
  }
  if (l.checkpoint) {
    return [&checkpoint = l.checkpoint->checkpoint, layer = l.layer_index](std::int64_t expert) {
      return checkpoint.load_expert(layer, expert);
    };
  }
  struct Given {
    std::optional<ExpertWeights> weights;
    std::exception_ptr error;  // it must not pass the caller's frames
  };
  return [l](std::int64_t expert) {
    Given result;
    const auto give = [](void* data, const fusedmoe_expert_weights* weights) {
      auto& here = *static_cast<Given*>(data);
      try {
        here.weights = to_experts(weights, "weights").weights();
      } catch (...) {
        here.error = std::current_exception();
      }
    };
    const std::int32_t failed = l.run(l.context, expert, give, &result);
    if (result.error) std::rethrow_exception(result.error);
    if (failed || !result.weights) {
      throw Error::invalid("lost.run", "lost.run has not given expert " + std::to_string(expert));
    }
    return *result.weights;
  };
}

}  // namespace

/// What a forward is given. The options refer to the callbacks, so it stays where it is made.
struct Call {
  const MoeLayer& layer;
  TensorView hidden_states, output;
  Routing routing;  // of the caller, where it is `routed`
  Workspace workspace;
  ForwardOptions options;
  ExpertsHooks hooks;
  std::optional<CallerExecutor> executor;

  Call(const fusedmoe_layer* of, const fusedmoe_forward_args* args, bool routed)
      : layer(given(of, "layer").layer) {
    const fusedmoe_forward_args a = read_given_struct(args, "args");
    hidden_states = to_view(a.hidden_states, "hidden_states");
    output = to_view(a.output, "output");
    workspace = {a.workspace, a.workspace_bytes};
    TensorView& ids = routed ? routing.topk_ids : options.topk_ids;
    TensorView& weights = routed ? routing.topk_weights : options.topk_weights;
    ids = to_view(a.topk_ids, "topk_ids");
    weights = to_view(a.topk_weights, "topk_weights");
    options.router_logits = to_view(a.router_logits, "router_logits");
    options.expert_load = to_view(a.expert_load, "expert_load");
    options.dropped_rows = to_view(a.dropped_rows, "dropped_rows");
    options.expert_map = to_view(a.expert_map, "expert_map");
    options.accumulate = a.accumulate != 0;
    options.max_tokens = a.max_tokens;
    options.fixed_sizes = a.fixed_sizes != 0;
    options.lane = a.lane;
    hooks = to_hooks(a.hooks, "args.hooks");
    if (a.hooks) options.hooks = &hooks;
    if (a.executor) executor.emplace(a.executor, "args.executor");
    options.stream = to_stream(a.stream, executor ? &*executor : nullptr, layer.config().device);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void forward() const { layer.forward(hidden_states, output, workspace, options); }
  void forward_routed() const {
    layer.forward_routed(hidden_states, routing, output, workspace, options);
  }
  MoeLayer::Step begin(bool routed) const {
    return routed ? layer.begin_routed(hidden_states, routing, output, workspace, options)
                  : layer.begin(hidden_states, output, workspace, options);
  }
};

}  // namespace fusedmoe::capi

using fusedmoe::capi::given;
using fusedmoe::capi::guarded;

fusedmoe_status fusedmoe_layer_load(const fusedmoe_checkpoint* checkpoint, int64_t layer_index,
                                    const fusedmoe_layer_options* options, fusedmoe_layer** layer) {
  return fusedmoe::capi::make_layer(options, layer, [&](const fusedmoe::LayerOptions& made) {
    const fusedmoe::Checkpoint& opened = given(checkpoint, "checkpoint").checkpoint;
    const fusedmoe::ParallelConfig parallel = parallel_of(made);
    fusedmoe::LayerWeights weights = opened.load_layer(layer_index, parallel, made.ranks.placement);
    // The caller adds the outputs of all ranks.
    if (!made.ranks.communicator && parallel.rank() > 0) weights.shared_experts.reset();
    return weights;
  });
}

fusedmoe_status fusedmoe_layer_create(const fusedmoe_layer_weights* weights,
                                      const fusedmoe_layer_options* options,
                                      fusedmoe_layer** layer) {
  return fusedmoe::capi::make_layer(options, layer, [&](const fusedmoe::LayerOptions& made) {
    return fusedmoe::capi::to_layer_weights(weights, parallel_of(made));
  });
}

fusedmoe_status fusedmoe_layer_save_packed(const fusedmoe_layer* layer, const char* path) {
  return guarded([&] { given(layer, "layer").layer.save_packed(&given(path, "path")); });
}

void fusedmoe_layer_destroy(fusedmoe_layer* layer) {
  delete layer;
}

fusedmoe_status fusedmoe_layer_get_info(const fusedmoe_layer* layer, fusedmoe_layer_info* info) {
  return guarded([&] {
    const fusedmoe::MoeLayer& made = given(layer, "layer").layer;
    const fusedmoe::MoeConfig& config = made.config();
    fusedmoe_layer_info values{};
    values.num_experts = config.num_experts;
    values.num_local_experts = config.num_local_experts;
    values.topk = config.topk;
    values.hidden = made.hidden();
    values.intermediate = config.intermediate;
    values.dtype = fusedmoe::capi::from_dtype(config.dtype);
    values.output_dtype = fusedmoe::capi::from_dtype(layer->output_dtype);
    values.packed_bytes = made.packed_weights().nbytes();
    values.plan_line = layer->plan_line.c_str();
    values.plan = layer->plan.c_str();
    values.table = layer->table.c_str();
    values.num_zero_experts = made.router().num_zero_experts;
    fusedmoe::capi::write_struct(info, values, "info");
  });
}

fusedmoe_status fusedmoe_layer_workspace_bytes(const fusedmoe_layer* layer, int64_t num_tokens,
                                               size_t* bytes) {
  return guarded([&] {
    given(bytes, "bytes");
    *bytes = given(layer, "layer").layer.workspace_bytes(num_tokens);
  });
}

fusedmoe_status fusedmoe_layer_shared_bytes(const fusedmoe_layer* layer, int64_t num_tokens,
                                            size_t* bytes) {
  return guarded([&] {
    given(bytes, "bytes");
    *bytes = given(layer, "layer").layer.shared_bytes(num_tokens);
  });
}

fusedmoe_status fusedmoe_layer_fixed_workspace_bytes(const fusedmoe_layer* layer,
                                                     int64_t num_tokens, size_t* bytes) {
  return guarded([&] {
    given(bytes, "bytes");
    *bytes = given(layer, "layer").layer.workspace_bytes(num_tokens, true);
  });
}

fusedmoe_status fusedmoe_layer_repack(fusedmoe_layer* layer, const fusedmoe_expert_weights* weights,
                                      int64_t expert) {
  return guarded([&] {
    fusedmoe::MoeLayer& made = given(layer, "layer").layer;
    made.repack(fusedmoe::capi::to_experts(weights, "weights").weights(), expert);
  });
}

struct fusedmoe_step {
  fusedmoe_step(const fusedmoe_layer* layer, const fusedmoe_forward_args* args, bool routed)
      : call(layer, args, routed), step(call.begin(routed)) {}

  fusedmoe::capi::Call call;  // which the step refers to
  fusedmoe::MoeLayer::Step step;
};

fusedmoe_status fusedmoe_layer_forward(const fusedmoe_layer* layer,
                                       const fusedmoe_forward_args* args) {
  return guarded([&] { fusedmoe::capi::Call(layer, args, false).forward(); });
}

fusedmoe_status fusedmoe_layer_forward_routed(const fusedmoe_layer* layer,
                                              const fusedmoe_forward_args* args) {
  return guarded([&] { fusedmoe::capi::Call(layer, args, true).forward_routed(); });
}

fusedmoe_status fusedmoe_layer_begin(const fusedmoe_layer* layer, const fusedmoe_forward_args* args,
                                     fusedmoe_step** step) {
  return guarded([&] {
    given(step, "step");
    *step = new fusedmoe_step(layer, args, false);
  });
}

fusedmoe_status fusedmoe_layer_begin_routed(const fusedmoe_layer* layer,
                                            const fusedmoe_forward_args* args,
                                            fusedmoe_step** step) {
  return guarded([&] {
    given(step, "step");
    *step = new fusedmoe_step(layer, args, true);
  });
}

fusedmoe_status fusedmoe_step_compute(fusedmoe_step* step) {
  return guarded([&] { given(step, "step").step.compute(); });
}

fusedmoe_status fusedmoe_step_finish(fusedmoe_step* step) {
  return guarded([&] { given(step, "step").step.finish(); });
}

void fusedmoe_step_destroy(fusedmoe_step* step) {
  delete step;
}

fusedmoe_status fusedmoe_layer_placement(const fusedmoe_layer* layer, const char** placement) {
  return guarded([&] {
    const auto& json = given(layer, "layer").placement;
    given(placement, "placement") = json ? json->c_str() : nullptr;
  });
}

fusedmoe_status fusedmoe_layer_start_move(fusedmoe_layer* layer, const char* placement) {
  return guarded([&] {
    given(layer, "layer")
        .layer.start_move(fusedmoe::ExpertPlacement::parse(&given(placement, "placement")));
  });
}

fusedmoe_status fusedmoe_layer_start_move_over(fusedmoe_layer* layer, const char* placement,
                                               fusedmoe_communicator* communicator) {
  return guarded([&] {
    given(layer, "layer")
        .layer.start_move(fusedmoe::ExpertPlacement::parse(&given(placement, "placement")),
                          *given(communicator, "communicator").communicator);
  });
}

fusedmoe_status fusedmoe_layer_commit_move(fusedmoe_layer* layer) {
  return guarded([&] {
    given(layer, "layer").layer.commit_move();
    layer->describe();
  });
}

fusedmoe_status fusedmoe_layer_rebind(fusedmoe_layer* layer, fusedmoe_communicator* communicator,
                                      const char* placement, const fusedmoe_lost_experts* lost) {
  return guarded([&] {
    given(layer, "layer")
        .layer.rebind(given(communicator, "communicator").communicator,
                      fusedmoe::ExpertPlacement::parse(&given(placement, "placement")),
                      fusedmoe::capi::to_source(lost));
    layer->describe();
  });
}
