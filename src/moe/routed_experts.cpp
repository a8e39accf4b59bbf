#include "moe/routed_experts.h"

#include "core/workspace.h"

namespace fusedmoe::core {
namespace {

/// workspace2 of monolithic experts: [ topk_ids | topk_weights | workspace2 of run_routed() ].
struct RoutedWorkspace {
  Routing routing;
  void* workspace2;
  std::size_t bytes;

  RoutedWorkspace(void* workspace, const Shape& shape, Device device, std::size_t inner_bytes) {
    WorkspaceCutter cutter(workspace);
    const auto take = [&](DType dtype) {
      void* data = cutter.take(static_cast<std::size_t>(fusedmoe::bytes(dtype, shape.numel())));
      return data ? TensorView(data, dtype, shape, device) : TensorView();
    };
    routing = {take(DType::kI32), take(DType::kF32)};
    workspace2 = cutter.take(inner_bytes);
    bytes = cutter.used();
  }
};

}  // namespace

WorkspacePlan RoutedExperts::plan(const ProblemSize& problem) const {
  WorkspacePlan plan = plan_routed(problem);
  if (!config().monolithic) return plan;
  const Shape shape{problem.num_tokens, problem.topk};
  plan.workspace2_bytes =
      RoutedWorkspace(nullptr, shape, config().device, plan.workspace2_bytes).bytes;
  return plan;
}

void RoutedExperts::run(const ForwardArgs& args) const {
  if (!config().monolithic) return run_routed(args);
  ForwardArgs routed = args;
  // What lies before the inner workspace does not depend on its size.
  const RoutedWorkspace workspace(args.workspace2, {args.hidden_states.size(0), args.router->topk},
                                  config().device, 0);
  if (args.hidden_states.size(0) > 0) {
    backend_.route(*args.router, args.router_logits, args.score_correction_bias, workspace.routing,
                   args.stream);
  }
  routed.topk_ids = workspace.routing.topk_ids;
  routed.topk_weights = workspace.routing.topk_weights;
  routed.workspace2 = workspace.workspace2;
  run_routed(routed);
}

}  // namespace fusedmoe::core
