// ModularKernel: prepare -> experts -> finalize in one workspace:
//
//   [ prepare | workspace13 and the experts' output, from the same address | workspace2 ]
//
// each part rounded up to 256 bytes. Experts that write the caller's output need no room for one.
#include "fusedmoe/modular_kernel.h"

#include <exception>

#include "core/check.h"
#include "core/device_runtime.h"
#include "core/exception_text.h"
#include "core/workspace.h"
#include "layer/backend.h"
#include "layer/checks.h"
#include "moe/check_args.h"

namespace fusedmoe {

ModularKernel::ModularKernel(std::shared_ptr<const PrepareAndFinalize> prepare_finalize,
                             std::shared_ptr<const Experts> experts)
    : prepare_finalize_(std::move(prepare_finalize)), experts_(std::move(experts)) {
  FUSEDMOE_CHECK_FAULT(prepare_finalize_, kNull, "prepare_finalize", "null", "an instance");
  FUSEDMOE_CHECK_FAULT(experts_, kNull, "experts", "null", "an instance");
  const PrepareFinalizeDescriptor& prepare = prepare_finalize_->descriptor();
  const ActivationFormat format = prepare.activation_format();
  const ActivationFormat theirs = experts_->config().activation_format;
  const auto no_pair = [&](const std::string& why) {
    return Error::unsupported(Reason::kPairing, "experts",
                              core::format("experts {} cannot be used with {}: {}",
                                           experts_->descriptor().name(), prepare.name(), why));
  };
  if (theirs != format) {
    throw no_pair(core::format("their format is {}, not {}", name(theirs), name(format)));
  }
  reduce_ = experts_->descriptor().weight_and_reduce(format);
  const ProblemSize one = ProblemSize::of(experts_->config(), 1);
  moves_rows_ = prepare_finalize_->moves_rows();
  passes_rows_ = !moves_rows_ && prepare_finalize_->problem_size(one).num_tokens == 1;
  if (!prepare.accepts(reduce_)) {
    throw no_pair(core::format("it cannot finalize what they leave, \"{}\"", name(reduce_)));
  }
  if (experts_->config().monolithic && reduce_ != WeightAndReduce::kNoOp) {
    throw no_pair(
        core::format("they are monolithic, so they alone know the ids, but leave \"{}\" "
                     "to finalize",
                     name(reduce_)));
  }
}

std::size_t ModularKernel::workspace_bytes(const ProblemSize& problem) const {
  core::WorkspaceCutter cutter(nullptr);
  cutter.take(prepare_finalize_->workspace_bytes(problem, preparation_of(problem)));
  const WorkspaceSizes sizes = experts_->workspace_sizes(prepare_finalize_->problem_size(problem));
  cutter.take(common_bytes(sizes, problem));
  cutter.take(sizes.workspace2_bytes);
  return cutter.used();
}

std::size_t ModularKernel::shared_bytes(const ProblemSize& problem) const {
  return prepare_finalize_->shared_bytes(problem, preparation_of(problem));
}

/// Without the static scale of activations, on which no size depends.
Preparation ModularKernel::preparation_of(const ProblemSize& problem) const {
  return make_preparation(experts_->descriptor(), problem.scheme,
                          experts_->config().apply_router_weight_on_input);
}

/// Room for workspace13 and for the experts' output, unless they write the caller's.
std::size_t ModularKernel::common_bytes(const WorkspaceSizes& sizes,
                                        const ProblemSize& problem) const {
  const bool direct = passes_rows_ && reduce_ == WeightAndReduce::kNoOp &&
                      sizes.output_shape == Shape{problem.num_tokens, problem.hidden};
  return direct ? sizes.workspace13_bytes : sizes.common_bytes();
}

std::size_t ModularKernel::workspace_bytes(std::int64_t num_tokens) const {
  core::check_num_tokens(*experts_, num_tokens);
  return workspace_bytes(ProblemSize::of(experts_->config(), num_tokens));
}

std::size_t ModularKernel::shared_bytes(std::int64_t num_tokens) const {
  core::check_num_tokens(*experts_, num_tokens);
  return shared_bytes(ProblemSize::of(experts_->config(), num_tokens));
}

void ModularKernel::apply(const ForwardArgs& args, Workspace workspace) const {
  abandon_on_error([&] {
    const ProblemSize problem = layer::check_forward_args(*this, args, workspace);
    const core::CurrentDevice current(args.stream.device);
    cut_and_run(args, problem, workspace.data);
  });
}

void ModularKernel::run(const ForwardArgs& args, const ProblemSize& problem,
                        void* workspace) const {
  abandon_on_error([&] { cut_and_run(args, problem, workspace); });
}

template <typename Step>
void ModularKernel::abandon_on_error(const Step& step) const {
  if (!moves_rows_) return step();
  try {
    step();
  } catch (...) {
    prepare_finalize_->abandon(core::current_exception_text());
    throw;
  }
}

void ModularKernel::cut_and_run(ForwardArgs args, const ProblemSize& problem,
                                void* workspace) const {
  core::WorkspaceCutter cutter(workspace);
  args.preparation = make_preparation(experts_->descriptor(), problem.scheme,
                                      experts_->config().apply_router_weight_on_input,
                                      args.weights->info().a1_scale);
  if (args.router_weights && (args.preparation.quant || moves_rows_)) {
    // The experts will see quantized hidden states, which are nothing to route by, or those of
    // other ranks, which bring their logits.
    layer::backend_of(experts_->descriptor(), args.stream.device)
        .router_logits(*args.router_weights, args.hidden_states, args.router_logits, args.stream);
    args.score_correction_bias = args.router_weights->score_correction_bias;
    args.router_weights = nullptr;
  }
  args.prepare_workspace =
      cutter.take(prepare_finalize_->workspace_bytes(problem, args.preparation));
  const WorkspaceSizes sizes = experts_->workspace_sizes(prepare_finalize_->problem_size(problem));
  args.workspace13 = cutter.take(common_bytes(sizes, problem));
  args.workspace2 = cutter.take(sizes.workspace2_bytes);
  args.weight_and_reduce = reduce_;
  // finalize can work in place on the output itself if it adds nothing to what was there.
  const bool in_place =
      sizes.output_dtype == args.output.dtype() && args.output.contiguous() && !args.accumulate;
  const bool direct =
      sizes.output_shape == args.output.shape() && (reduce_ == WeightAndReduce::kNoOp || in_place);
  args.fused_output = direct && !moves_rows_ ? args.output
                                             : TensorView(args.workspace13, sizes.output_dtype,
                                                          sizes.output_shape, args.output.device());
  run_steps(args, problem);
}

void ModularKernel::run_steps(ForwardArgs args, const ProblemSize& problem) const {
  ForwardArgs inner = args;                  // what the experts see
  if (moves_rows_) inner.expected_rows = 0;  // those of the rows that arrive, if prepare knows
  prepare_finalize_->do_start_prepare(inner);
  prepare_finalize_->do_finish_prepare(inner);
  if (moves_rows_) {
    inner.accumulate = false;
    ProblemSize arrived = prepare_finalize_->problem_size(problem);
    arrived.num_tokens = inner.hidden_states.size(0);
    const WorkspaceSizes sizes = experts_->workspace_sizes(arrived);
    inner.fused_output = TensorView(inner.output_memory ? inner.output_memory : args.workspace13,
                                    sizes.output_dtype, sizes.output_shape, args.output.device());
    args.fused_output = inner.fused_output;
  }
  experts_->run(inner);
  // Where rows stay, finalize reads what prepare has set.
  const ForwardArgs& last = moves_rows_ ? args : inner;
  prepare_finalize_->do_start_finalize(last);
  prepare_finalize_->do_finish_finalize(last);
}

}  // namespace fusedmoe
