#include "moe/routed_experts.h"

namespace fusedmoe::core {

WorkspaceSizes output_sizes(const MoeConfig& config, const ProblemSize& problem) {
  const bool batched = config.activation_format == ActivationFormat::kBatchedExperts;
  WorkspaceSizes sizes;
  sizes.output_shape = batched
                           ? Shape{problem.num_local_experts, problem.num_tokens, problem.hidden}
                           : Shape{problem.num_tokens, problem.hidden};
  sizes.output_dtype = problem.output_dtype;
  return sizes;
}

void RoutedExperts::route(const ForwardArgs& args) const {
  if (args.router_weights) {
    backend_.router_logits(*args.router_weights, args.hidden_states, args.router_logits,
                           args.stream);
  }
  const TensorView bias = args.router_weights
                              ? TensorView(args.router_weights->score_correction_bias)
                              : args.score_correction_bias;
  backend_.route(*args.router, args.router_logits, bias, {args.topk_ids, args.topk_weights},
                 args.expert_load, args.stream);
}

void RoutedExperts::route_and_run(const ForwardArgs& args) const {
  route(args);
  run_routed(args);
}

}  // namespace fusedmoe::core
