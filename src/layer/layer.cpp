// MoeLayer: router logits -> top-k -> modular kernel, plus shared experts, in one workspace.
#include "fusedmoe/layer.h"

#include <algorithm>

#include "core/check.h"
#include "core/device_runtime.h"
#include "core/parallel.h"
#include "core/workspace.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "layer/backend.h"
#include "layer/checks.h"
#include "moe/experts_args.h"
#include "reference/router.h"

namespace fusedmoe {
namespace {

// The layer keeps its own contiguous copy: checkpoints may hand out strided or unaligned views of
// memory that does not outlive them.
Tensor own(const Tensor& tensor, Device device) {
  if (!tensor) return {};
  const Tensor copy = Tensor::empty(tensor.shape(), tensor.dtype());
  convert(tensor, copy);
  return to_device(copy, device);
}

void check_parameter(const Tensor& tensor, const char* name, const Shape& shape) {
  FUSEDMOE_CHECK(
      tensor.defined() && core::is_activation_dtype(tensor.dtype()) && tensor.shape() == shape,
      name, core::describe(tensor), core::format("f32, bf16 or f16 {}", to_string(shape)));
}

void check_weights(const LayerWeights& weights) {
  weights.router.validate();
  weights.experts.validate();
  const std::int64_t num_experts = weights.router.num_experts, hidden = weights.experts.hidden;
  FUSEDMOE_CHECK(weights.experts.num_experts() == num_experts, "experts",
                 core::format("{} experts", weights.experts.num_experts()),
                 core::format("{}, as router.num_experts", num_experts));
  const RouterWeights& router = weights.router_weights;
  check_parameter(router.weight, "router_weights.weight", {num_experts, hidden});
  if (router.bias) check_parameter(router.bias, "router_weights.bias", {num_experts});
  if (router.score_correction_bias) {
    core::check_tensor(router.score_correction_bias, "router_weights.score_correction_bias",
                       DType::kF32, {num_experts});
  }
  if (!weights.shared_experts) return;
  const SharedExperts& shared = *weights.shared_experts;
  shared.weights.validate();
  FUSEDMOE_CHECK(shared.weights.num_experts() == 1 && shared.weights.hidden == hidden,
                 "shared_experts",
                 core::format("{} experts of hidden size {}", shared.weights.num_experts(),
                              shared.weights.hidden),
                 core::format("1 expert of hidden size {}", hidden));
  if (shared.gate) check_parameter(shared.gate, "shared_experts.gate", {1, hidden});
}

MoeConfig experts_config(const ExpertWeights& experts, const LayerOptions& options) {
  MoeConfig config;
  config.num_experts = experts.num_experts();
  config.num_local_experts = experts.num_experts();
  config.topk = 1;
  config.hidden = experts.hidden;
  config.intermediate = experts.intermediate;
  config.dtype = options.dtype;
  config.scheme = experts.scheme;
  config.activation = experts.activation;
  config.activation_params = experts.activation_params;
  config.has_bias = experts.has_bias();
  config.device = options.device;
  config.batch_invariant = options.batch_invariant;
  return config;
}

MoeConfig layer_config(const LayerWeights& weights, const LayerOptions& options) {
  MoeConfig config = experts_config(weights.experts, options);
  config.topk = weights.router.topk;
  config.apply_router_weight_on_input = weights.router.apply_router_weight_on_input;
  config.routing_method =
      routing_method(weights.router, weights.router_weights.score_correction_bias.defined());
  config.hooks = options.hooks;
  return config;
}

Selection select_routed(const LayerWeights& weights, const LayerOptions& options) {
  const MoeConfig config = layer_config(weights, options);
  if (options.plan.empty()) return select(config, options.require);
  FUSEDMOE_CHECK(options.require.empty(), "options.require",
                 core::format("\"{}\"", options.require), "empty: the plan says what runs");
  const Plan plan = Plan::parse(options.plan);
  FUSEDMOE_CHECK(
      plan.shared_experts.empty() == !weights.shared_experts, "plan.shared_experts",
      core::format("\"{}\"", plan.shared_experts),
      weights.shared_experts ? "set: the layer has shared experts" : "absent: the layer has none");
  return select(config, plan);
}

std::string pair_name(const PrepareAndFinalize& prepare_finalize, const Experts& experts) {
  return core::format("{}+{}", experts.name(), prepare_finalize.name());
}

// Shared experts see every token, in the standard format. Where the routed ones are required they
// come from the same backend, the reference or not.
Selection select_shared(const ExpertWeights& weights, const LayerOptions& options,
                        const Experts& routed) {
  const MoeConfig config = experts_config(weights, options);
  if (!options.plan.empty()) {
    const Plan plan = Plan::parse(options.plan);
    FUSEDMOE_CHECK(plan.shared_scheme == name(config.scheme), "plan.shared_scheme",
                   core::format("\"{}\"", plan.shared_scheme),
                   core::format("\"{}\", that of the weights", name(config.scheme)));
    return select(config, plan.shared_experts);
  }
  if (options.require.empty()) return select(config);
  const Selection all = explain(config);
  for (const Candidate& candidate : all.candidates) {
    if (candidate.support && candidate.experts->is_reference() == routed.is_reference()) {
      return select(config, pair_name(*candidate.prepare_finalize, *candidate.experts));
    }
  }
  throw Error("require", core::format("\"{}\"", options.require),
              "a backend that can serve the shared experts; none of it can:\n" + all.table());
}

}  // namespace

struct MoeLayer::Impl {
  struct Shared {
    ModularKernel kernel;
    std::shared_ptr<const PackedWeights> packed;
    Tensor gate;  // (1, hidden) on the device, or undefined
  };

  // The workspace of one forward.
  struct Buffers {
    TensorView router_logits;  // (num_tokens, num_experts) f32
    Routing routing;           // (num_tokens, topk)
    Routing shared_routing;    // (num_tokens, 1): expert 0 with the gate's weight, or 1
    TensorView shared_output;  // (num_tokens, hidden)
    Workspace kernel;          // one after the other: routed experts, shared experts
    std::size_t bytes = 0;
  };

  // What a forward is about.
  struct Call {
    TensorView hidden_states, output;
    const ExpertsHooks* hooks;
    Stream stream;
  };

  MoeConfig config;
  Selection selection;
  const core::Backend& backend;
  RouterConfig router;
  RouterWeights router_weights;  // on the device
  ModularKernel kernel;
  std::shared_ptr<const PackedWeights> packed;
  std::optional<Shared> shared;
  bool inplace;

  Impl(const LayerWeights& weights, const LayerOptions& options, Selection chosen);
  void pack(const LayerWeights& weights, const LayerOptions& options);

  Plan plan() const;
  /// With a null workspace only `bytes` is meaningful.
  Buffers cut(std::int64_t num_tokens, void* workspace) const;
  std::int64_t check(const Call& call, Workspace workspace, const Routing& routing,
                     const ForwardDetails& details) const;
  /// The reference sums its logits in double, like everything else.
  void logits(const RouterWeights& weights, const TensorView& x, const TensorView& out,
              Stream stream) const;
  void apply_routed(const Call& call, const Routing& routing, const Buffers& buffers) const;
  void apply_shared(const Call& call, const Buffers& buffers) const;
  void apply_experts(const Call& call, const Routing& routing, const Buffers& buffers) const;
  Call make_call(const TensorView& hidden_states, const TensorView& output,
                 const ExpertsHooks* hooks, const std::optional<Stream>& stream) const {
    return {hidden_states, output, hooks, stream.value_or(Stream{config.device})};
  }
};

MoeLayer::Impl::Impl(const LayerWeights& weights, const LayerOptions& options, Selection chosen)
    : selection(std::move(chosen)),
      backend(layer::backend_of(options.device)),
      router(weights.router),
      router_weights{own(weights.router_weights.weight, options.device),
                     own(weights.router_weights.bias, options.device),
                     own(weights.router_weights.score_correction_bias, options.device)},
      kernel(selection.prepare_finalize, selection.experts),
      inplace(options.inplace) {
  config = layer_config(weights, options);
  config.activation_format = selection.experts->activation_format();
  pack(weights, options);
}

void MoeLayer::Impl::pack(const LayerWeights& weights, const LayerOptions& options) {
  const std::int64_t num_experts = weights.experts.num_experts();
  const std::int64_t total = num_experts + (weights.shared_experts ? 1 : 0);
  const auto progress_from = [&](std::int64_t first) -> PackProgress {
    if (!options.progress) return {};
    return [&options, first, total](std::int64_t done, std::int64_t) {
      options.progress(first + done, total);
    };
  };
  const core::CurrentDevice current(options.device);
  packed = selection.experts->pack(weights.experts, progress_from(0));
  if (!weights.shared_experts) return;
  const SharedExperts& source = *weights.shared_experts;
  const Selection choice = select_shared(source.weights, options, *selection.experts);
  shared.emplace(Shared{ModularKernel(choice.prepare_finalize, choice.experts),
                        choice.experts->pack(source.weights, progress_from(num_experts)),
                        own(source.gate, options.device)});
}

Plan MoeLayer::Impl::plan() const {
  Plan plan = selection.plan();
  if (!shared) return plan;
  plan.shared_experts = pair_name(shared->kernel.prepare_finalize(), shared->kernel.experts());
  plan.shared_scheme = name(shared->packed->info().scheme);
  return plan;
}

MoeLayer::Impl::Buffers MoeLayer::Impl::cut(std::int64_t num_tokens, void* workspace) const {
  Buffers buffers;
  if (num_tokens == 0) return buffers;
  core::WorkspaceCutter cutter(workspace);
  const auto tensor = [&](DType dtype, std::int64_t columns) {
    const Shape shape{num_tokens, columns};
    void* data = cutter.take(static_cast<std::size_t>(bytes(dtype, shape.numel())));
    return data ? TensorView(data, dtype, shape, config.device) : TensorView();
  };
  buffers.router_logits = tensor(DType::kF32, router.num_experts);
  buffers.routing = {tensor(DType::kI32, router.topk), tensor(DType::kF32, router.topk)};
  buffers.kernel.bytes =
      kernel.workspace_bytes(ProblemSize::of(packed->info(), num_tokens, router.topk, config.dtype),
                             router.apply_router_weight_on_input);
  if (shared) {
    buffers.shared_routing = {tensor(DType::kI32, 1), tensor(DType::kF32, 1)};
    buffers.shared_output = tensor(config.dtype, config.hidden);
    buffers.kernel.bytes =
        std::max(buffers.kernel.bytes, shared->kernel.workspace_bytes(ProblemSize::of(
                                           shared->packed->info(), num_tokens, 1, config.dtype)));
  }
  buffers.kernel.data = cutter.take(buffers.kernel.bytes);
  buffers.bytes = cutter.used();
  return buffers;
}

std::int64_t MoeLayer::Impl::check(const Call& call, Workspace workspace, const Routing& routing,
                                   const ForwardDetails& details) const {
  using layer::check_buffer;
  using layer::NamedView;
  const Device device = config.device;
  const TensorView &hidden_states = call.hidden_states, &output = call.output;
  FUSEDMOE_CHECK(call.stream.device == device, "stream",
                 core::format("of {}", to_string(call.stream.device)),
                 core::format("of {}, the device of the layer", to_string(device)));
  FUSEDMOE_CHECK(!call.hooks || selection.experts->has_hooks(), "hooks",
                 core::format("given to {}", selection.experts->name()),
                 "given to experts with injection points only");
  check_buffer(hidden_states, "hidden_states", config.dtype, {-1, config.hidden}, device);
  const std::int64_t num_tokens = hidden_states.size(0);
  check_buffer(output, "output", config.dtype, {num_tokens, config.hidden}, device);

  const NamedView in{"hidden_states", &hidden_states}, out{"output", &output};
  const NamedView ids{"topk_ids", &routing.topk_ids},
      weights{"topk_weights", &routing.topk_weights};
  const NamedView logits_out{"details.router_logits", &details.router_logits};
  const NamedView ids_out{"details.topk_ids", &details.topk_ids};
  const NamedView weights_out{"details.topk_weights", &details.topk_weights};
  if (details.router_logits) {
    check_buffer(details.router_logits, logits_out.name, DType::kF32,
                 {num_tokens, router.num_experts}, device);
  }
  if (details.topk_ids) {
    check_buffer(details.topk_ids, ids_out.name, DType::kI32, {num_tokens, router.topk}, device);
  }
  if (details.topk_weights) {
    check_buffer(details.topk_weights, weights_out.name, DType::kF32, {num_tokens, router.topk},
                 device);
  }
  layer::check_output(output, hidden_states, inplace);
  layer::check_disjoint(logits_out, {in, out});
  layer::check_disjoint(ids_out, {in, out, logits_out});
  layer::check_disjoint(weights_out, {in, out, logits_out, ids_out});
  layer::check_workspace(workspace, cut(num_tokens, nullptr).bytes,
                         {in, out, ids, weights, logits_out, ids_out, weights_out});
  return num_tokens;
}

void MoeLayer::Impl::logits(const RouterWeights& weights, const TensorView& x,
                            const TensorView& out, Stream stream) const {
  if (!selection.experts->is_reference()) {
    backend.router_logits(weights, x, out, stream);
    return;
  }
  const std::int64_t num_tokens = out.size(0), num_experts = out.size(1);
  auto* values = out.as<float>();
  core::parallel_for(core::executor_of(stream), num_tokens, true, [&](std::int64_t token) {
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      values[token * num_experts + expert] =
          static_cast<float>(reference::router_logit(weights, x, token, expert));
    }
  });
}

void MoeLayer::Impl::apply_routed(const Call& call, const Routing& routing,
                                  const Buffers& buffers) const {
  KernelArgs args;
  args.weights = packed.get();
  args.output = call.output;
  args.hidden_states = call.hidden_states;
  args.topk_ids = routing.topk_ids;
  args.topk_weights = routing.topk_weights;
  args.router_logits = buffers.router_logits;
  args.router = &router;
  args.score_correction_bias = router_weights.score_correction_bias;
  args.apply_router_weight_on_input = router.apply_router_weight_on_input;
  args.inplace = inplace;
  args.hooks = call.hooks;
  args.stream = call.stream;
  kernel.apply(args, buffers.kernel);
}

void MoeLayer::Impl::apply_shared(const Call& call, const Buffers& buffers) const {
  const Routing& routing = buffers.shared_routing;
  if (shared->gate) {
    logits(RouterWeights{shared->gate, {}, {}}, call.hidden_states, routing.topk_weights,
           call.stream);
  }
  backend.route_shared(routing, shared->gate.defined(), call.stream);
  KernelArgs args;
  args.weights = shared->packed.get();
  args.output = buffers.shared_output;
  args.hidden_states = call.hidden_states;
  args.topk_ids = routing.topk_ids;
  args.topk_weights = routing.topk_weights;
  args.stream = call.stream;
  shared->kernel.apply(args, buffers.kernel);
}

// Shared experts first: the routed ones may overwrite the hidden states.
void MoeLayer::Impl::apply_experts(const Call& call, const Routing& routing,
                                   const Buffers& buffers) const {
  const bool add_shared = shared && call.hidden_states.size(0) > 0;
  if (add_shared) apply_shared(call, buffers);
  apply_routed(call, routing, buffers);
  if (add_shared) backend.add(call.output, buffers.shared_output, call.stream);
}

MoeLayer::MoeLayer(LayerWeights weights, LayerOptions options) {
  FUSEDMOE_CHECK(core::is_activation_dtype(options.dtype), "options.dtype",
                 std::string(name(options.dtype)), "f32, bf16 or f16");
  check_weights(weights);
  FUSEDMOE_CHECK(!weights.router.custom || options.device.is_cpu(), "router.custom",
                 core::format("set on {}", to_string(options.device)),
                 "unset: the callback of a custom routing runs on the cpu");
  impl_ = std::make_unique<Impl>(weights, options, select_routed(weights, options));
}

MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;

const MoeConfig& MoeLayer::config() const {
  return impl_->config;
}
const Selection& MoeLayer::selection() const {
  return impl_->selection;
}
const RouterConfig& MoeLayer::router() const {
  return impl_->router;
}
const PackedWeights& MoeLayer::packed_weights() const {
  return *impl_->packed;
}

std::string MoeLayer::plan_line() const {
  const Impl& impl = *impl_;
  const Plan plan = impl.plan();
  std::string line =
      core::format("{}+{} {} {}", plan.experts, plan.prepare_finalize, plan.scheme, plan.dtype);
  if (impl.shared) line += core::format(" shared={}", plan.shared_experts);
  line += core::format(" isa={}", plan.isa);
  return line + (impl.config.device.is_cpu() ? core::format(" threads={}", num_threads())
                                             : core::format(" device={}", plan.device));
}

std::string MoeLayer::plan_json() const {
  return impl_->plan().json();
}

std::size_t MoeLayer::workspace_bytes(std::int64_t num_tokens) const {
  FUSEDMOE_CHECK(num_tokens >= 0, "num_tokens", core::to_string(num_tokens), "not negative");
  return impl_->cut(num_tokens, nullptr).bytes;
}

void MoeLayer::forward(const TensorView& hidden_states, const TensorView& output,
                       Workspace workspace, const ForwardDetails& details,
                       const ExpertsHooks* hooks, std::optional<Stream> stream) const {
  const Impl& impl = *impl_;
  const Impl::Call call = impl.make_call(hidden_states, output, hooks, stream);
  const std::int64_t num_tokens = impl.check(call, workspace, {}, details);
  if (num_tokens == 0) return;
  const core::CurrentDevice current(impl.config.device);
  const Impl::Buffers buffers = impl.cut(num_tokens, workspace.data);
  impl.logits(impl.router_weights, hidden_states, buffers.router_logits, call.stream);
  // Monolithic experts route by themselves; then only the details ask for it here.
  if (!impl.kernel.experts().is_monolithic() || details.topk_ids || details.topk_weights) {
    impl.backend.route(impl.router, buffers.router_logits,
                       impl.router_weights.score_correction_bias, buffers.routing, call.stream);
  }
  impl.apply_experts(call, buffers.routing, buffers);
  const auto copy_detail = [&](const TensorView& source, const TensorView& destination) {
    if (destination) impl.backend.copy(source, destination, call.stream);
  };
  copy_detail(buffers.router_logits, details.router_logits);
  copy_detail(buffers.routing.topk_ids, details.topk_ids);
  copy_detail(buffers.routing.topk_weights, details.topk_weights);
}

void MoeLayer::forward_routed(const TensorView& hidden_states, const Routing& routing,
                              const TensorView& output, Workspace workspace,
                              const ExpertsHooks* hooks, std::optional<Stream> stream) const {
  const Impl& impl = *impl_;
  FUSEDMOE_CHECK(!impl.kernel.experts().is_monolithic(), "routing", "given",
                 core::format("computed by the monolithic {}", impl.kernel.experts().name()));
  const Impl::Call call = impl.make_call(hidden_states, output, hooks, stream);
  const std::int64_t num_tokens = impl.check(call, workspace, routing, {});
  const Shape shape{num_tokens, impl.router.topk};
  layer::check_buffer(routing.topk_ids, "topk_ids", DType::kI32, shape, impl.config.device);
  layer::check_buffer(routing.topk_weights, "topk_weights", DType::kF32, shape, impl.config.device);
  const core::CurrentDevice current(impl.config.device);
  const Impl::Buffers buffers = impl.cut(num_tokens, workspace.data);
  impl.apply_experts(call, routing, buffers);
}

Tensor MoeLayer::forward(const TensorView& hidden_states) const {
  const Device device = impl_->config.device;
  layer::check_buffer(hidden_states, "hidden_states", impl_->config.dtype,
                      {-1, impl_->config.hidden}, device);
  const std::int64_t num_tokens = hidden_states.size(0);
  Tensor output = Tensor::empty(hidden_states.shape(), impl_->config.dtype, device);
  const std::size_t bytes = workspace_bytes(num_tokens);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, device);
  forward(hidden_states, output, Workspace{workspace.data(), bytes});
  synchronize(Stream{device});
  return output;
}

}  // namespace fusedmoe
