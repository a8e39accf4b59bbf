// ModularKernel: prepare -> experts -> finalize in one workspace:
//
//   [ prepare | workspace13 and the experts' output, from the same address | workspace2 ]
//
// each part rounded up to 256 bytes.
#include "fusedmoe/modular_kernel.h"

#include "core/check.h"
#include "core/device_runtime.h"
#include "core/workspace.h"
#include "layer/checks.h"

namespace fusedmoe {
namespace {

struct ExpertsBuffers {
  void* common;  // workspace13 and, unless the experts write to the caller's output, their output
  void* workspace2;
  TensorView output;  // what the experts write
};

ExpertsBuffers cut_buffers(core::WorkspaceCutter& cutter, const WorkspacePlan& plan,
                           const TensorView& output) {
  ExpertsBuffers buffers;
  buffers.common = cutter.take(plan.common_bytes());
  buffers.workspace2 = cutter.take(plan.workspace2_bytes);
  const bool direct = plan.output_shape == output.shape() && plan.output_dtype == output.dtype();
  buffers.output =
      direct ? output
             : TensorView(buffers.common, plan.output_dtype, plan.output_shape, output.device());
  return buffers;
}

void apply_modular(const ModularExperts& implementation, const KernelArgs& args,
                   const Prepared& prepared, const ExpertsBuffers& buffers) {
  ExpertsArgs experts;
  experts.weights = args.weights;
  experts.output = buffers.output;
  experts.hidden_states = prepared.hidden_states;
  experts.hidden_scales = prepared.hidden_scales;
  experts.topk_ids = prepared.topk_ids ? prepared.topk_ids : args.topk_ids;
  experts.topk_weights = prepared.topk_weights ? prepared.topk_weights : args.topk_weights;
  experts.expert_map = args.expert_map;
  experts.expert_num_tokens = prepared.expert_num_tokens;
  experts.router_weight_on_input = args.apply_router_weight_on_input;
  experts.hooks = args.hooks;
  experts.workspace13 = buffers.common;
  experts.workspace2 = buffers.workspace2;
  experts.stream = args.stream;
  implementation.apply(experts);
}

void apply_monolithic(const MonolithicExperts& implementation, const KernelArgs& args,
                      const Prepared& prepared, const ExpertsBuffers& buffers) {
  MonolithicArgs experts;
  experts.weights = args.weights;
  experts.output = buffers.output;
  experts.hidden_states = prepared.hidden_states;
  experts.hidden_scales = prepared.hidden_scales;
  experts.router_logits = args.router_logits;
  experts.router = args.router;
  experts.score_correction_bias = args.score_correction_bias;
  experts.expert_map = args.expert_map;
  experts.workspace13 = buffers.common;
  experts.workspace2 = buffers.workspace2;
  experts.stream = args.stream;
  implementation.apply(experts);
}

}  // namespace

ModularKernel::ModularKernel(std::shared_ptr<const PrepareAndFinalize> prepare_finalize,
                             std::shared_ptr<const Experts> experts)
    : prepare_finalize_(std::move(prepare_finalize)), experts_(std::move(experts)) {
  FUSEDMOE_CHECK_FAULT(prepare_finalize_, kNull, "prepare_finalize", "null", "an implementation");
  FUSEDMOE_CHECK_FAULT(experts_, kNull, "experts", "null", "an implementation");
  const ActivationFormat format = prepare_finalize_->activation_format();
  FUSEDMOE_CHECK_SUPPORTED(
      experts_->activation_format() == format, kPairing, "experts",
      core::format("{}, of format {}", experts_->name(), name(experts_->activation_format())),
      core::format("of format {}, that of {}", name(format), prepare_finalize_->name()));
  const WeightAndReduce reduce = experts_->weight_and_reduce();
  FUSEDMOE_CHECK_SUPPORTED(
      prepare_finalize_->accepts(reduce), kPairing, "experts",
      core::format("{}, which leaves \"{}\" to finalize", experts_->name(), name(reduce)),
      core::format("one whose output {} can finalize", prepare_finalize_->name()));
  if (!experts_->is_monolithic()) return;
  FUSEDMOE_CHECK(format == ActivationFormat::kStandard && reduce == WeightAndReduce::kNoOp,
                 "experts", core::format("monolithic, {}, {}", name(format), name(reduce)),
                 "of standard format and no_op when monolithic");
}

std::size_t ModularKernel::workspace_bytes(const ProblemSize& problem, bool weight_on_input) const {
  if (problem.num_tokens == 0) return 0;
  core::WorkspaceCutter cutter(nullptr);
  cutter.take(prepare_finalize_->workspace_bytes(
      problem, make_preparation(*experts_, problem.scheme, weight_on_input)));
  cutter.take(experts_->plan(prepare_finalize_->problem_size(problem)).total_bytes());
  return cutter.used();
}

void ModularKernel::apply(const KernelArgs& args, Workspace workspace) const {
  const ProblemSize problem = layer::check_kernel_args(*this, args, workspace);
  if (problem.num_tokens == 0) return;
  const core::CurrentDevice current(args.stream.device);
  const bool monolithic = experts_->is_monolithic();
  core::WorkspaceCutter cutter(workspace.data);

  PrepareArgs prepare;
  prepare.hidden_states = args.hidden_states;
  if (!monolithic) {
    prepare.topk_ids = args.topk_ids;
    prepare.topk_weights = args.topk_weights;
    prepare.expert_map = args.expert_map;
  }
  prepare.num_local_experts = problem.num_local_experts;
  prepare.preparation = make_preparation(
      *experts_, problem.scheme, args.apply_router_weight_on_input, args.weights->info().a1_scale);
  prepare.workspace = cutter.take(prepare_finalize_->workspace_bytes(problem, prepare.preparation));
  prepare.stream = args.stream;
  const ExpertsBuffers buffers =
      cut_buffers(cutter, experts_->plan(prepare_finalize_->problem_size(problem)), args.output);

  const Prepared prepared = prepare_finalize_->prepare(prepare);
  if (monolithic) {
    apply_monolithic(static_cast<const MonolithicExperts&>(*experts_), args, prepared, buffers);
  } else {
    apply_modular(static_cast<const ModularExperts&>(*experts_), args, prepared, buffers);
  }

  FinalizeArgs finalize;
  finalize.output = args.output;
  finalize.fused_output = buffers.output;
  finalize.topk_ids = prepared.topk_ids ? prepared.topk_ids : prepare.topk_ids;
  finalize.topk_weights = prepared.topk_weights ? prepared.topk_weights : prepare.topk_weights;
  finalize.expert_map = args.expert_map;
  finalize.num_local_experts = problem.num_local_experts;
  finalize.router_weight_on_input = args.apply_router_weight_on_input;
  finalize.weight_and_reduce = experts_->weight_and_reduce();
  finalize.workspace = prepare.workspace;
  finalize.stream = args.stream;
  prepare_finalize_->finalize(finalize);
}

}  // namespace fusedmoe
