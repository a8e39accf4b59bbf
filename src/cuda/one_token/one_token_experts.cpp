#include "cuda/one_token/one_token_experts.h"

namespace fusedmoe::cuda {

void OneTokenExperts::run(const ForwardArgs& args, const Scratch& scratch,
                          const FusedMlpParams& mlp, const ProblemSize& problem) const {
  OneTokenParams params;
  params.gemms[0] = mlp.gemms[0];
  params.gemms[1] = mlp.gemms[1];
  params.activation = mlp.activation;
  params.hidden = rows_.hidden(args, scratch);
  params.activated = rows_.activated(args, scratch, mlp);
  params.topk_ids = args.topk_ids.as<const std::int32_t>();
  if (!config_.apply_router_weight_on_input) {
    params.topk_weights = args.topk_weights.as<const float>();
  }
  params.topk = static_cast<int>(problem.topk);
  params.local_experts = core::LocalExperts(args.expert_map, problem.num_local_experts);
  params.output = args.fused_output.data();
  params.output_f32 = args.fused_output.dtype() == DType::kF32;
  params.accumulate = args.accumulate;
  kernels_.one_token(params, plan_.shape_of(problem), args.stream);
}

}  // namespace fusedmoe::cuda
