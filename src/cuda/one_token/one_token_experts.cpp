#include "cuda/one_token/one_token_experts.h"

namespace fusedmoe::cuda {

/// Hopper gives a thread block 227 KiB; the kernel of one token has up to 5 KiB of its own, mostly
/// the tables of W4A8.
static_assert(kOneTokenSharedBytes + (5 << 10) <= 227 << 10);

OneTokenShape OneTokenExperts::shape_of(const ProblemSize& problem) const {
  OneTokenShape shape;
  shape.slots = problem.topk;
  shape.blocks = blocks_;
  shape.slices[0] = slices_of(problem.intermediate, is_gated(config_.activation));
  shape.slices[1] = slices_of(problem.hidden, false);
  shape.block_k = format_.block.k;
  shape.k_blocks[0] = ceil_div(problem.hidden, shape.block_k);
  shape.k_blocks[1] = ceil_div(problem.intermediate, shape.block_k);
  shape.rows_by_slot = rows_.differ_by_expert();
  return shape;
}

bool OneTokenExperts::supports(const ProblemSize& problem) const {
  return variant_of(config_) == Variant::kStandard && problem.num_tokens == 1 &&
         problem.topk <= kMaxSlotsOfOneToken && !rows_.needs_hidden_pass() &&
         shape_of(problem).layout().bytes <= kOneTokenSharedBytes;
}

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
  format_.one_token(params, shape_of(problem), args.stream);
}

}  // namespace fusedmoe::cuda
