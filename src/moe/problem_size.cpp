#include "moe/problem_size.h"

namespace fusedmoe {

ProblemSize ProblemSize::of(const MoeConfig& config, std::int64_t num_tokens) {
  ProblemSize problem;
  problem.num_tokens = num_tokens;
  problem.topk = config.topk;
  problem.num_local_experts = config.num_local_experts;
  problem.hidden = config.hidden;
  problem.intermediate = config.intermediate;
  problem.dtype = problem.output_dtype = config.dtype;
  problem.scheme = config.scheme;
  return problem;
}

namespace core {

ProblemSize callers_problem(const ForwardArgs& args) {
  ProblemSize problem;
  problem.num_tokens = args.hidden_states.size(0);
  problem.max_tokens = args.max_tokens;
  problem.fixed_sizes = args.fixed_sizes;
  problem.topk = args.topk_ids ? args.topk_ids.size(1) : 0;
  problem.num_local_experts = args.weights->info().num_experts;
  problem.hidden = args.hidden_states.size(1);
  problem.dtype = args.hidden_states.dtype();
  if (args.fused_output) problem.output_dtype = args.fused_output.dtype();
  return problem;
}

ProblemSize experts_problem(const Experts& experts, const ForwardArgs& args) {
  const bool batched = experts.batched();
  ProblemSize problem = ProblemSize::of(experts.config(), args.hidden_states.size(batched ? 1 : 0));
  problem.expected_rows = args.expected_rows;
  problem.max_rows = args.max_rows;
  problem.output_dtype = args.fused_output.dtype();
  if (args.topk_ids && !batched) problem.topk = args.topk_ids.size(1);
  return problem;
}

}  // namespace core
}  // namespace fusedmoe
