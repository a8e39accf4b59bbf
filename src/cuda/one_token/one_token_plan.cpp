#include "cuda/one_token/one_token_plan.h"

#include "cuda/experts/scratch.h"

namespace fusedmoe::cuda {

/// Hopper gives a thread block 227 KiB; the kernel of one token has up to 5 KiB of its own, mostly
/// the tables of W4A8.
static_assert(kOneTokenSharedBytes + (5 << 10) <= 227 << 10);

OneTokenShape OneTokenPlan::shape_of(const ProblemSize& problem) const {
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

bool OneTokenPlan::supports(const ProblemSize& problem) const {
  return variant_of(config_) == Variant::kStandard && problem.num_tokens == 1 &&
         problem.topk <= kMaxSlotsOfOneToken && !rows_.needs_hidden_pass() &&
         shape_of(problem).layout().bytes <= kOneTokenSharedBytes;
}

}  // namespace fusedmoe::cuda
