// One chunk of a forward: router logits -> top-k -> begin of the modular kernel; shared and zero
// experts -> the kernel's compute; its finish -> all sums added.
#include "fusedmoe/runtime.h"
#include "layer/layer_impl.h"

namespace fusedmoe {

MoeLayer::Step::Impl::Impl(const MoeLayer::Impl& layer, const Call& call,
                           const MoeLayer::Impl::Sizes& sizes, void* workspace)
    : layer(layer),
      call(call),
      sizes(sizes),
      buffers(layer.cut(sizes, workspace)),
      routing(call.routing.topk_ids ? call.routing : buffers.routing) {
  ++layer.running;
}

void MoeLayer::Step::Impl::begin(bool undivided) {
  const CurrentDevice current(layer.config.device);
  ForwardArgs args;
  args.weights = layer.packed.get();
  args.output = call.output;
  args.hidden_states = call.hidden_states;
  args.topk_ids = routing.topk_ids;
  args.topk_weights = routing.topk_weights;
  args.expert_map = call.expert_map;
  args.accumulate = call.options.accumulate;
  args.hooks = call.options.hooks;
  args.stream = call.stream;
  args.max_tokens = call.max_tokens;
  args.undivided = undivided;
  args.dropped_rows = call.options.dropped_rows;
  const bool routes = !call.routing.topk_ids;
  if (routes && layer.monolithic) {
    args.router = &layer.router;
    args.router_logits = buffers.router_logits;
    args.expert_load = call.options.expert_load;
    args.router_weights = &layer.router_weights;
    return begin_kernel(args);
  }
  const core::Backend& backend = layer.backend;
  const RouterWeights& weights = layer.router_weights;
  if (routes) {
    backend.router_logits(weights, call.hidden_states, buffers.router_logits, call.stream);
    backend.route(layer.router, buffers.router_logits, weights.score_correction_bias, routing,
                  call.options.expert_load, call.stream);
  } else if (call.options.expert_load) {
    backend.count_choices(routing.topk_ids, call.options.expert_load, call.stream);
  }
  if (layer.router.num_zero_experts > 0) {
    backend.split_zero_experts({routing, layer.router.num_experts, layer.router.num_choices(),
                                buffers.expert_ids, buffers.zero_weights},
                               call.stream);
    args.topk_ids = buffers.expert_ids;
  }
  if (layer.latent) {
    project(layer.latent->down, call.hidden_states,
            {.target = buffers.latent_input, .accumulate = false, .stream = call.stream});
    args.hidden_states = buffers.latent_input;
    args.output = buffers.latent_output;
    args.accumulate = false;
  }
  begin_kernel(args);
}

void MoeLayer::Step::Impl::begin_kernel(const ForwardArgs& args) {
  kernel.emplace(ModularKernel::Step(layer.kernel_of(call), args, sizes.routed, buffers.kernel));
  kernel->begin();
}

/// Shared experts before the routed ones, which may overwrite the hidden states.
void MoeLayer::Step::Impl::compute() {
  const CurrentDevice current(layer.config.device);
  if (layer.shared) run_shared();
  if (layer.adds_zero_experts) {
    layer.backend.add({.target = buffers.beside,
                       .source = call.hidden_states,
                       .scale = buffers.zero_weights,
                       .accumulate = layer.shared.has_value(),
                       .stream = call.stream});
  }
  kernel->compute();
}

void MoeLayer::Step::Impl::finish() {
  const CurrentDevice current(layer.config.device);
  kernel->finish();
  if (layer.latent) {
    project(layer.latent->up, buffers.latent_output,
            {.target = call.output, .accumulate = call.options.accumulate, .stream = call.stream});
  }
  if (layer.adds_beside()) {
    layer.backend.add({.target = call.output, .source = buffers.beside, .stream = call.stream});
  }
  const auto copy_result = [&](const TensorView& source, const TensorView& destination) {
    if (destination) copy(source, destination, call.stream);
  };
  copy_result(buffers.router_logits, call.options.router_logits);
  copy_result(routing.topk_ids, call.options.topk_ids);
  copy_result(routing.topk_weights, call.options.topk_weights);
  end();
}

void MoeLayer::Step::Impl::project(const Tensor& weight, const TensorView& x,
                                   core::AddArgs to) const {
  to.source =
      TensorView(buffers.projected, DType::kF32, {x.size(0), weight.size(0)}, layer.config.device);
  layer.backend.router_logits({weight, {}, {}}, x, to.source, to.stream);
  layer.backend.add(to);
}

void MoeLayer::Step::Impl::run_shared() const {
  const Routing& ones = buffers.shared_routing;
  const MoeLayer::Impl::Shared& shared = *layer.shared;
  if (shared.gate) {
    layer.backend.router_logits(RouterWeights{shared.gate, {}, {}}, call.hidden_states,
                                ones.topk_weights, call.stream);
  }
  layer.backend.route_shared(ones, shared.gate.defined(), call.stream);
  ForwardArgs args;
  args.weights = shared.packed.get();
  args.output = buffers.beside;
  args.hidden_states = call.hidden_states;
  args.topk_ids = ones.topk_ids;
  args.topk_weights = ones.topk_weights;
  args.stream = call.stream;
  ModularKernel::Step step(shared.kernel, args, sizes.shared, buffers.shared_kernel);
  step.begin();
  step.compute();
  step.finish();
}

MoeLayer::Step::Step(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MoeLayer::Step::Step(Step&&) noexcept = default;
MoeLayer::Step::~Step() = default;

namespace {

template <typename Impl>
Impl& given(const std::unique_ptr<Impl>& step) {
  if (!step) throw Error::invalid("step", "the step was moved from");
  return *step;
}

}  // namespace

// A part out of order is refused before anything of it runs, and ends no communicator.
void MoeLayer::Step::compute() {
  Impl& step = given(impl_);
  if (step.done != Impl::Part::kBegin) {
    throw Error::invalid("step", "compute() comes once, behind begin()");
  }
  step.done = Impl::Part::kCompute;
  step.layer.ending_ranks([&] { step.compute(); });
}
void MoeLayer::Step::finish() {
  Impl& step = given(impl_);
  if (step.done != Impl::Part::kCompute) {
    throw Error::invalid("step", "finish() comes once, behind compute()");
  }
  step.done = Impl::Part::kFinish;
  step.layer.ending_ranks([&] { step.finish(); });
}

}  // namespace fusedmoe
