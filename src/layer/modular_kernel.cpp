// ModularKernel: prepare -> experts -> finalize in one workspace:
//
//   [ prepare | workspace13 and the experts' output, from the same address | workspace2 ]
//
// each part rounded up to 256 bytes. An output that is the caller's, or lies elsewhere, needs no
// room.
#include "fusedmoe/modular_kernel.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "core/check.h"
#include "core/device_runtime.h"
#include "core/exception_text.h"
#include "core/workspace.h"
#include "layer/backend.h"
#include "layer/checks.h"
#include "moe/check_args.h"
#include "moe/row_places.h"

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
  passes_rows_ = !moves_rows_ && prepare_finalize_->sizes(one, {}).experts.num_tokens == 1;
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

std::string ModularKernel::rows_travel() const {
  return prepare_finalize_->rows_travel(
      make_preparation(experts_->descriptor(), experts_->config().scheme, false));
}

ForwardSizes ModularKernel::sizes(const ProblemSize& caller) const {
  ForwardSizes sizes;
  sizes.preparation = make_preparation(experts_->descriptor(), caller.scheme,
                                       experts_->config().apply_router_weight_on_input);
  sizes.transport = prepare_finalize_->sizes(caller, sizes.preparation);
  sizes.experts = experts_->workspace_sizes(sizes.transport.experts);
  const bool direct = passes_rows_ && reduce_ == WeightAndReduce::kNoOp &&
                      sizes.experts.output_shape == Shape{caller.num_tokens, caller.hidden};
  const bool elsewhere = direct || sizes.transport.output_elsewhere;
  sizes.common_bytes = elsewhere ? sizes.experts.workspace13_bytes : sizes.experts.common_bytes();
  // Where experts may run several times, each pass keeps the output of those before.
  if (sizes.transport.experts.max_rows > 0 && !elsewhere) {
    sizes.common_bytes += core::round_up_workspace(sizes.experts.workspace13_bytes);
  }
  core::WorkspaceCutter cutter(nullptr);
  for (const std::size_t bytes :
       {sizes.transport.workspace_bytes, sizes.common_bytes, sizes.experts.workspace2_bytes}) {
    cutter.take(bytes);
  }
  sizes.bytes = cutter.used();
  return sizes;
}

std::size_t ModularKernel::workspace_bytes(std::int64_t num_tokens) const {
  core::check_num_tokens(*experts_, num_tokens);
  return workspace_bytes(ProblemSize::of(experts_->config(), num_tokens));
}

ModularKernel::Step::Step(const ModularKernel& kernel, const ForwardArgs& args,
                          const ForwardSizes& sizes, void* workspace)
    : kernel_(&kernel), sizes_(sizes), args_(args) {
  core::WorkspaceCutter cutter(workspace);
  args_.fixed_sizes = sizes.transport.caller.fixed_sizes;
  args_.preparation = sizes.preparation;
  if (args_.preparation.quant) args_.preparation.scale = args.weights->info().a1_scale;
  args_.prepare_workspace = cutter.take(sizes.transport.workspace_bytes);
  args_.workspace13 = cutter.take(sizes.common_bytes);
  args_.workspace2 = cutter.take(sizes.experts.workspace2_bytes);
  args_.weight_and_reduce = kernel.reduce_;
  // finalize can work in place on the output itself if it adds nothing to what was there.
  const bool in_place = sizes.experts.output_dtype == args.output.dtype() &&
                        args.output.contiguous() && !args.accumulate;
  const bool direct = sizes.experts.output_shape == args.output.shape() &&
                      (kernel.reduce_ == WeightAndReduce::kNoOp || in_place);
  args_.fused_output = direct && !kernel.moves_rows_
                           ? args.output
                           : TensorView(args_.workspace13, sizes.experts.output_dtype,
                                        sizes.experts.output_shape, args.output.device());
}

ModularKernel::Step::Step(Step&& other) noexcept
    : kernel_(other.kernel_),
      state_(std::exchange(other.state_, State::kEnded)),
      sizes_(other.sizes_),
      args_(std::move(other.args_)),
      inner_(std::move(other.inner_)) {}

ModularKernel::Step::~Step() {
  if (state_ != State::kEnded) abandon("a forward was begun and not finished");
}

void ModularKernel::Step::abandon(std::string_view reason) noexcept {
  state_ = State::kEnded;
  if (kernel_->moves_rows_) kernel_->prepare_finalize_->abandon(reason);
}

template <typename Part>
void ModularKernel::Step::run(const Part& part) {
  try {
    const core::CurrentDevice current(args_.stream.device);
    part();
  } catch (...) {
    abandon(core::current_exception_text());
    throw;
  }
}

void ModularKernel::Step::begin() {
  run([&] {
    if (args_.router_weights && (args_.preparation.quant || kernel_->moves_rows_)) {
      // The experts will see quantized hidden states, which are nothing to route by, or those of
      // other ranks, which bring their logits.
      layer::backend_of(kernel_->experts_->descriptor(), args_.stream.device)
          .router_logits(*args_.router_weights, args_.hidden_states, args_.router_logits,
                         args_.stream);
      args_.score_correction_bias = args_.router_weights->score_correction_bias;
      args_.router_weights = nullptr;
    }
    inner_ = args_;
    // Those of the rows that arrive, if prepare knows.
    if (kernel_->moves_rows_) inner_.expected_rows = 0;
    kernel_->prepare_finalize_->do_start_prepare(inner_, sizes_.transport);
  });
}

void ModularKernel::Step::compute() {
  if (state_ != State::kBegun) throw Error::invalid("step", "compute() comes once, behind begin()");
  const PrepareAndFinalize& prepare_finalize = *kernel_->prepare_finalize_;
  run([&] {
    prepare_finalize.do_finish_prepare(inner_);
    if (kernel_->moves_rows_) {
      inner_.accumulate = false;
      Shape shape = sizes_.experts.output_shape;
      shape[0] = inner_.hidden_states.size(0);
      void* output = inner_.output_memory ? inner_.output_memory : args_.workspace13;
      const bool elsewhere = inner_.output_memory || sizes_.transport.output_elsewhere;
      if (inner_.max_rows > 0 && !elsewhere) {
        output = static_cast<std::byte*>(output) +
                 core::round_up_workspace(sizes_.experts.workspace13_bytes);
      }
      inner_.fused_output =
          TensorView(output, sizes_.experts.output_dtype, shape, args_.output.device());
      args_.fused_output = inner_.fused_output;
      args_.step = inner_.step;
    }
    run_experts();
    prepare_finalize.do_start_finalize(kernel_->moves_rows_ ? args_ : inner_);
    state_ = State::kComputed;
  });
}

/// In one pass, or in as many as the room for expert rows asks for.
void ModularKernel::Step::run_experts() {
  const Experts& experts = *kernel_->experts_;
  const std::int64_t rows = inner_.hidden_states.size(0), at_once = inner_.rows_at_once;
  if (at_once == 0 || rows <= at_once) return experts.run(inner_);
  for (std::int64_t begin = 0; begin < rows; begin += at_once) {
    const std::int64_t end = std::min(rows, begin + at_once);
    const auto part = [&](const TensorView& all) {
      return all && all.size(0) == rows ? all.slice(0, begin, end) : all;
    };
    ForwardArgs pass = inner_;
    for (TensorView* view : {&pass.hidden_states, &pass.hidden_scales, &pass.topk_ids,
                             &pass.topk_weights, &pass.fused_output}) {
      *view = part(*view);
    }
    if (pass.row_addresses) pass.row_addresses += begin;
    RowSources sources;
    if (pass.row_sources) {
      sources = *pass.row_sources;
      sources.first_row += begin;
      pass.row_sources = &sources;
    }
    RowTargets targets;
    if (pass.row_targets) {
      targets = *pass.row_targets;
      targets.first_row += begin;
      pass.row_targets = &targets;
    }
    pass.expected_rows = inner_.expected_rows * (end - begin) / rows;
    experts.run(pass);
  }
}

void ModularKernel::Step::finish() {
  if (state_ != State::kComputed) {
    throw Error::invalid("step", "finish() comes once, behind compute()");
  }
  run([&] {
    // Where rows stay, finalize reads what prepare has set.
    kernel_->prepare_finalize_->do_finish_finalize(kernel_->moves_rows_ ? args_ : inner_);
    state_ = State::kEnded;
  });
}

ModularKernel::Step ModularKernel::begin(const ForwardArgs& args, Workspace workspace) const {
  ForwardSizes sizes;
  try {
    sizes = layer::check_forward_args(*this, args, workspace);
  } catch (...) {
    if (moves_rows_) prepare_finalize_->abandon(core::current_exception_text());
    throw;
  }
  Step step(*this, args, sizes, workspace.data);
  step.begin();
  return step;
}

void ModularKernel::apply(const ForwardArgs& args, Workspace workspace) const {
  ForwardArgs whole = args;
  whole.undivided = true;
  Step step = begin(whole, workspace);
  step.compute();
  step.finish();
}

}  // namespace fusedmoe
