// The experts alone, and the router alone.
#include "capi/callbacks.h"
#include "capi/convert.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/router.h"

struct fusedmoe_pack_cache {
  fusedmoe::PackCache cache;
};

using fusedmoe::capi::given;
using fusedmoe::capi::guarded;
using fusedmoe::capi::to_view;

fusedmoe_status fusedmoe_pack_cache_create(fusedmoe_pack_cache** cache) {
  return guarded([&] {
    given(cache, "cache");
    *cache = new fusedmoe_pack_cache;
  });
}

void fusedmoe_pack_cache_destroy(fusedmoe_pack_cache* cache) {
  delete cache;
}

fusedmoe_status fusedmoe_pack_cache_clear(fusedmoe_pack_cache* cache) {
  return guarded([&] { given(cache, "cache").cache.clear(); });
}

fusedmoe_status fusedmoe_fused_experts(const fusedmoe_fused_experts_args* args,
                                       fusedmoe_pack_cache* cache) {
  return guarded([&] {
    given(cache, "cache");
    const fusedmoe_fused_experts_args a = fusedmoe::capi::read_given_struct(args, "args");
    const fusedmoe::capi::StackedExperts experts = fusedmoe::capi::to_experts(a.weights, "weights");
    fusedmoe::FusedExpertsArgs call;
    call.hidden_states = to_view(a.hidden_states, "hidden_states");
    call.weights = experts.stacked;
    call.topk_weights = to_view(a.topk_weights, "topk_weights");
    call.topk_ids = to_view(a.topk_ids, "topk_ids");
    call.output = to_view(a.output, "output");
    call.scheme = experts.scheme;
    call.activation = experts.activation;
    call.activation_params = experts.params;
    call.apply_router_weight_on_input = a.apply_router_weight_on_input != 0;
    call.global_num_experts = a.global_num_experts;
    call.expert_map = to_view(a.expert_map, "expert_map");
    std::optional<fusedmoe::capi::CallerExecutor> executor;
    if (a.executor) executor.emplace(a.executor, "args.executor");
    call.stream = fusedmoe::capi::to_stream(a.stream, executor ? &*executor : nullptr,
                                            call.hidden_states.device());
    call.require = fusedmoe::capi::to_text(a.require);
    fusedmoe::fused_experts(call, cache->cache);
  });
}

fusedmoe_status fusedmoe_route(const fusedmoe_router_config* config, const fusedmoe_tensor* logits,
                               const fusedmoe_tensor* correction_bias,
                               const fusedmoe_tensor* topk_ids,
                               const fusedmoe_tensor* topk_weights) {
  return guarded([&] {
    fusedmoe::route(fusedmoe::capi::to_router(config, "config"), to_view(logits, "logits"),
                    to_view(correction_bias, "correction_bias"),
                    {to_view(topk_ids, "topk_ids"), to_view(topk_weights, "topk_weights")});
  });
}

fusedmoe_status fusedmoe_router_logits(const fusedmoe_tensor* weight, const fusedmoe_tensor* bias,
                                       const fusedmoe_tensor* x, const fusedmoe_tensor* logits) {
  return guarded([&] {
    fusedmoe::RouterWeights weights;
    if (weight) weights.weight = fusedmoe::capi::to_tensor(*weight, "weight");
    if (bias) weights.bias = fusedmoe::capi::to_tensor(*bias, "bias");
    fusedmoe::router_logits(weights, to_view(x, "x"), to_view(logits, "logits"));
  });
}
