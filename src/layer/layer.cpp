// MoeLayer: router logits -> top-k -> modular kernel, plus shared experts, in one workspace.
#include "fusedmoe/layer.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/device_runtime.h"
#include "core/parallel.h"
#include "core/workspace.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "layer/backend.h"
#include "layer/checks.h"
#include "layer/layer_weights.h"
#include "moe/check_args.h"

namespace fusedmoe {
namespace {

using layer::own;

/// Null where the caller leaves the threads to the default executor.
std::shared_ptr<Executor> executor_for(const LayerOptions& options) {
  if (options.executor) return {std::shared_ptr<void>(), options.executor};  // not ours
  return options.num_threads > 0 ? make_executor(options.num_threads) : nullptr;
}

Context layer_context(const LayerOptions& options) {
  Context context = make_context();
  context.num_threads = options.num_threads;
  if (options.executor && options.num_threads == 0) {
    context.num_threads = options.executor->concurrency();
  }
  return context;
}

}  // namespace

struct MoeLayer::Impl {
  struct Shared {
    std::string pair;
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
    void* kernel = nullptr;    // one after the other: routed experts, shared experts
    std::size_t bytes = 0;
  };

  // What a forward is about.
  struct Call {
    TensorView hidden_states, output;
    Routing routing;  // of the caller; undefined: the layer routes
    const ForwardOptions& options;
    Stream stream;
  };

  MoeConfig config;
  Selection selection;
  const core::Backend& backend;
  RouterConfig router;
  RouterWeights router_weights;             // on the device
  Tensor expert_map;                        // on the device
  ModularKernel kernel;                     // takes ids and weights
  std::optional<ModularKernel> monolithic;  // routes by itself, with the same packed weights
  std::shared_ptr<const PackedWeights> packed;
  std::optional<Shared> shared;
  DType output_dtype;
  bool inplace;
  std::shared_ptr<Executor> executor;  // of the CPU; null: the default one
  Stream stream;                       // of forwards that name none
  std::int64_t chunk = std::numeric_limits<std::int64_t>::max();  // tokens at a time, at most

  Impl(const LayerWeights& weights, const LayerOptions& options, const Selection& chosen);
  void pack(const LayerWeights& weights, const LayerOptions& options);
  void limit_chunk(std::size_t max_bytes);

  Plan plan() const;
  /// With a null workspace only `bytes` is meaningful.
  Buffers cut(std::int64_t num_tokens, void* workspace) const;
  /// Of one of the two kernels.
  ProblemSize problem(const ModularKernel& of, std::int64_t num_tokens) const;
  void check(const Call& call, Workspace workspace) const;
  void run(const Call& call, void* workspace) const;
  void run_chunk(const Call& call, void* workspace) const;
  void apply_routed(const Call& call, const Routing& routing, const Buffers& buffers) const;
  void apply_shared(const Call& call, const Buffers& buffers) const;
};

MoeLayer::Impl::Impl(const LayerWeights& weights, const LayerOptions& options,
                     const Selection& chosen)
    : config(layer::layer_config(weights, options)),
      selection(chosen),
      backend(layer::backend_of(*chosen.experts, options.device)),
      router(weights.router),
      router_weights{own(weights.router_weights.weight, options.device),
                     own(weights.router_weights.bias, options.device),
                     own(weights.router_weights.score_correction_bias, options.device)},
      expert_map(own(weights.expert_map, options.device)),
      kernel(chosen.create(layer_context(options))),
      output_dtype(options.output_dtype.value_or(options.dtype)),
      inplace(options.inplace),
      executor(executor_for(options)),
      stream{options.device} {
  if (executor && options.device.is_cpu()) stream = cpu_stream(*executor);
  config.activation_format = chosen.prepare_finalize->activation_format();
  if (options.monolithic || (weights.router_weights.weight && chosen.experts->routes_faster())) {
    Selection routing = chosen;
    routing.config.monolithic = true;
    const Support support = chosen.experts->supports(routing.config);
    if (support) monolithic.emplace(routing.create(layer_context(options)));
    if (options.monolithic && !support) {
      throw Error::unsupported(support.reason, "options.monolithic", support.text);
    }
  }
  pack(weights, options);
  if (options.max_workspace_bytes > 0) limit_chunk(options.max_workspace_bytes);
}

void MoeLayer::Impl::pack(const LayerWeights& weights, const LayerOptions& options) {
  const std::int64_t num_experts = weights.experts.num_experts();
  const std::int64_t total = num_experts + (weights.shared_experts ? 1 : 0);
  const auto progress_from = [&](std::int64_t first) {
    PackOptions pack_options;
    pack_options.stream = stream;
    if (options.progress) {
      pack_options.progress = [&options, first, total](std::int64_t done, std::int64_t) {
        options.progress(first + done, total);
      };
    }
    return pack_options;
  };
  packed = kernel.experts().pack(weights.experts, progress_from(0));
  if (!weights.shared_experts) return;
  const SharedExperts& source = *weights.shared_experts;
  const Selection choice = layer::select_shared(source.weights, options, selection);
  ModularKernel shared_kernel = choice.create(layer_context(options));
  auto shared_packed = shared_kernel.experts().pack(source.weights, progress_from(num_experts));
  shared.emplace(Shared{choice.pair(), std::move(shared_kernel), std::move(shared_packed),
                        own(source.gate, options.device)});
}

/// The most tokens whose workspace stays below the limit.
void MoeLayer::Impl::limit_chunk(std::size_t max_bytes) {
  FUSEDMOE_CHECK(!batch_dependent(config.scheme), "options.max_workspace_bytes",
                 core::format("{} for {}", max_bytes, name(config.scheme)),
                 "0: one activation scale for all rows of a batch does not allow chunks");
  FUSEDMOE_CHECK(cut(1, nullptr).bytes <= max_bytes, "options.max_workspace_bytes",
                 core::format("{}", max_bytes),
                 core::format("at least {}, for one token", cut(1, nullptr).bytes));
  std::int64_t fits = 1, too_many = 2;
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  while (too_many < kMost && cut(too_many, nullptr).bytes <= max_bytes) {
    fits = std::exchange(too_many, 2 * too_many);
  }
  if (too_many >= kMost) return;
  while (too_many - fits > 1) {
    const std::int64_t middle = (fits + too_many) / 2;
    (cut(middle, nullptr).bytes <= max_bytes ? fits : too_many) = middle;
  }
  chunk = fits;
}

Plan MoeLayer::Impl::plan() const {
  Plan plan = selection.plan();
  if (!shared) return plan;
  plan.shared_experts = shared->pair;
  plan.shared_scheme = name(shared->packed->info().scheme);
  return plan;
}

ProblemSize MoeLayer::Impl::problem(const ModularKernel& of, std::int64_t num_tokens) const {
  ProblemSize size = ProblemSize::of(of.experts().config(), num_tokens);
  size.output_dtype = output_dtype;
  return size;
}

MoeLayer::Impl::Buffers MoeLayer::Impl::cut(std::int64_t num_tokens, void* workspace) const {
  Buffers buffers;
  core::WorkspaceCutter cutter(workspace);
  const auto tensor = [&](DType dtype, std::int64_t columns) {
    return cutter.take(dtype, {num_tokens, columns}, config.device);
  };
  buffers.router_logits = tensor(DType::kF32, router.num_experts);
  buffers.routing = {tensor(DType::kI32, router.topk), tensor(DType::kF32, router.topk)};
  std::size_t kernel_bytes = 0;
  const auto make_room_for = [&](const ModularKernel& each) {
    kernel_bytes = std::max(kernel_bytes, each.workspace_bytes(problem(each, num_tokens)));
  };
  make_room_for(kernel);
  if (monolithic) make_room_for(*monolithic);
  if (shared) {
    buffers.shared_routing = {tensor(DType::kI32, 1), tensor(DType::kF32, 1)};
    buffers.shared_output = tensor(output_dtype, config.hidden);
    make_room_for(shared->kernel);
  }
  buffers.kernel = cutter.take(kernel_bytes);
  buffers.bytes = cutter.used();
  return buffers;
}

void MoeLayer::Impl::check(const Call& call, Workspace workspace) const {
  using layer::NamedView;
  const Device device = config.device;
  const ForwardOptions& options = call.options;
  FUSEDMOE_CHECK_FAULT(call.stream.device == device, kDevice, "stream",
                       core::format("of {}", to_string(call.stream.device)),
                       core::format("of {}, the device of the layer", to_string(device)));
  FUSEDMOE_CHECK_SUPPORTED(!options.hooks || config.hooks, kHooks, "hooks", "given",
                           "given to a layer made with LayerOptions::hooks only");
  core::check_row_buffer(call.hidden_states, "hidden_states", config.dtype, {-1, config.hidden},
                         device);
  const std::int64_t num_tokens = call.hidden_states.size(0);
  core::check_row_count(num_tokens, 1);
  core::check_row_count(std::min(num_tokens, chunk),
                        kernel.experts().batched() ? config.num_local_experts : router.topk);
  core::check_row_buffer(call.output, "output", output_dtype, {num_tokens, config.hidden}, device);
  FUSEDMOE_CHECK(
      !options.hooks || num_tokens <= chunk, "hooks",
      core::format("given with {} tokens", num_tokens),
      core::format("given with at most {}, which fit into max_workspace_bytes: hooks see "
                   "all tokens at once",
                   chunk));

  const Shape choice{num_tokens, router.topk};
  const bool routed = call.routing.topk_ids.defined();
  if (routed) {
    core::check_buffer(call.routing.topk_ids, "topk_ids", DType::kI32, choice, device);
    core::check_buffer(call.routing.topk_weights, "topk_weights", DType::kF32, choice, device);
  }
  const NamedView in{"hidden_states", &call.hidden_states}, out{"output", &call.output};
  const NamedView ids{"topk_ids", &call.routing.topk_ids};
  const NamedView weights{"topk_weights", &call.routing.topk_weights};
  const struct {
    NamedView view;
    DType dtype;
    Shape shape;
  } results[] = {
      {{"options.router_logits", &options.router_logits},
       DType::kF32,
       {num_tokens, router.num_experts}},
      {{"options.topk_ids", &options.topk_ids}, DType::kI32, choice},
      {{"options.topk_weights", &options.topk_weights}, DType::kF32, choice},
      {{"options.expert_load", &options.expert_load}, DType::kI32, {router.num_experts}},
  };
  layer::check_output(call.output, call.hidden_states, inplace);
  layer::check_disjoint(out, {ids, weights});
  layer::check_workspace(workspace, cut(std::min(num_tokens, chunk), nullptr).bytes,
                         {in, out, ids, weights});
  const TensorView block(workspace.data, DType::kU8,
                         {static_cast<std::int64_t>(workspace.data ? workspace.bytes : 0)});
  for (const auto& result : results) {
    if (!result.view.view->defined()) continue;
    core::check_buffer(*result.view.view, result.view.name, result.dtype, result.shape, device);
    layer::check_disjoint(result.view, {in, out, ids, weights, {"workspace", &block}});
    for (const auto& other : results) {
      if (&other != &result) layer::check_disjoint(result.view, {other.view});
    }
  }
  if (routed && device.is_cpu()) layer::check_ids(call.routing.topk_ids, config, expert_map);
}

void MoeLayer::Impl::apply_routed(const Call& call, const Routing& routing,
                                  const Buffers& buffers) const {
  ForwardArgs args;
  args.weights = packed.get();
  args.output = call.output;
  args.hidden_states = call.hidden_states;
  args.topk_ids = routing.topk_ids;
  args.topk_weights = routing.topk_weights;
  args.expert_map = expert_map;
  args.accumulate = call.options.accumulate;
  args.hooks = call.options.hooks;
  args.stream = call.stream;
  const ProblemSize size = problem(kernel, call.hidden_states.size(0));
  if (call.routing.topk_ids) return kernel.run(args, size, buffers.kernel);
  args.router = &router;
  args.router_logits = buffers.router_logits;
  args.expert_load = call.options.expert_load;
  if (monolithic) {
    args.router_weights = &router_weights;
    return monolithic->run(args, size, buffers.kernel);
  }
  backend.router_logits(router_weights, args.hidden_states, args.router_logits, args.stream);
  backend.route(router, args.router_logits, router_weights.score_correction_bias, routing,
                args.expert_load, args.stream);
  kernel.run(args, size, buffers.kernel);
}

void MoeLayer::Impl::apply_shared(const Call& call, const Buffers& buffers) const {
  const Routing& routing = buffers.shared_routing;
  if (shared->gate) {
    backend.router_logits(RouterWeights{shared->gate, {}, {}}, call.hidden_states,
                          routing.topk_weights, call.stream);
  }
  backend.route_shared(routing, shared->gate.defined(), call.stream);
  ForwardArgs args;
  args.weights = shared->packed.get();
  args.output = buffers.shared_output;
  args.hidden_states = call.hidden_states;
  args.topk_ids = routing.topk_ids;
  args.topk_weights = routing.topk_weights;
  args.stream = call.stream;
  const ProblemSize size = problem(shared->kernel, call.hidden_states.size(0));
  shared->kernel.run(args, size, buffers.kernel);
}

void MoeLayer::Impl::run_chunk(const Call& call, void* workspace) const {
  const ForwardOptions& options = call.options;
  const Buffers buffers = cut(call.hidden_states.size(0), workspace);
  const Routing routing = call.routing.topk_ids ? call.routing : buffers.routing;
  // Shared experts first: the routed ones may overwrite the hidden states.
  if (shared) apply_shared(call, buffers);
  apply_routed(call, routing, buffers);
  if (shared) backend.add(call.output, buffers.shared_output, call.stream);
  const auto copy_result = [&](const TensorView& source, const TensorView& destination) {
    if (destination) copy(source, destination, call.stream);
  };
  copy_result(buffers.router_logits, options.router_logits);
  copy_result(routing.topk_ids, options.topk_ids);
  copy_result(routing.topk_weights, options.topk_weights);
}

void MoeLayer::Impl::run(const Call& call, void* workspace) const {
  const core::CurrentDevice current(config.device);
  const std::int64_t num_tokens = call.hidden_states.size(0);
  const ForwardOptions& whole = call.options;
  if (whole.expert_load) fill_bytes(whole.expert_load, 0, call.stream);
  if (num_tokens <= chunk) return run_chunk(call, workspace);
  for (std::int64_t begin = 0; begin < num_tokens; begin += chunk) {
    const std::int64_t end = std::min(num_tokens, begin + chunk);
    const auto part = [&](const TensorView& view) {
      return view ? view.slice(0, begin, end) : TensorView();
    };
    ForwardOptions options = whole;
    options.router_logits = part(whole.router_logits);
    options.topk_ids = part(whole.topk_ids);
    options.topk_weights = part(whole.topk_weights);
    run_chunk({part(call.hidden_states),
               part(call.output),
               {part(call.routing.topk_ids), part(call.routing.topk_weights)},
               options,
               call.stream},
              workspace);
  }
}

MoeLayer::MoeLayer(LayerWeights weights, LayerOptions options) {
  FUSEDMOE_CHECK_FAULT(core::is_activation_dtype(options.dtype), kDType, "options.dtype",
                       std::string(name(options.dtype)), "f32, bf16 or f16");
  const DType output = options.output_dtype.value_or(options.dtype);
  FUSEDMOE_CHECK_FAULT(output == options.dtype || output == DType::kF32, kDType,
                       "options.output_dtype", std::string(name(output)),
                       core::format("{} or f32", name(options.dtype)));
  layer::check_weights(weights);
  FUSEDMOE_CHECK_SUPPORTED(!weights.router.custom || options.device.is_cpu(), kDevice,
                           "router.custom", core::format("set on {}", to_string(options.device)),
                           "unset: the callback of a custom routing runs on the cpu");
  impl_ = std::make_unique<Impl>(weights, options, layer::select_routed(weights, options));
}

MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;

const MoeLayer::Impl& MoeLayer::impl() const {
  FUSEDMOE_CHECK(impl_, "layer", "moved from", "a layer that still holds its weights");
  return *impl_;
}

const MoeConfig& MoeLayer::config() const {
  return impl().config;
}
const Selection& MoeLayer::selection() const {
  return impl().selection;
}
const RouterConfig& MoeLayer::router() const {
  return impl().router;
}
const PackedWeights& MoeLayer::packed_weights() const {
  return *impl().packed;
}

std::string MoeLayer::plan_line() const {
  const Plan plan = impl().plan();
  std::string line =
      core::format("{}+{} {} {}", plan.experts, plan.prepare_finalize, plan.scheme, plan.dtype);
  if (impl().shared) line += core::format(" shared={}", plan.shared_experts);
  line += core::format(" isa={}", plan.isa);
  if (!impl().config.device.is_cpu()) return line + core::format(" device={}", plan.device);
  return line + core::format(" threads={}", impl().kernel.experts().context().num_threads);
}

std::string MoeLayer::plan_json() const {
  return impl().plan().json();
}

std::size_t MoeLayer::workspace_bytes(std::int64_t num_tokens) const {
  FUSEDMOE_CHECK(num_tokens >= 0, "num_tokens", core::to_string(num_tokens), "not negative");
  return impl().cut(std::min(num_tokens, impl().chunk), nullptr).bytes;
}

void MoeLayer::forward(const TensorView& hidden_states, const TensorView& output,
                       Workspace workspace, const ForwardOptions& options) const {
  const Impl& impl = this->impl();
  FUSEDMOE_CHECK_FAULT(impl.router_weights.weight, kNull, "router_weights.weight",
                       "not given to this layer", "given, or forward_routed() be called");
  const Impl::Call call{hidden_states, output, {}, options, options.stream.value_or(impl.stream)};
  impl.check(call, workspace);
  impl.run(call, workspace.data);
}

void MoeLayer::forward_routed(const TensorView& hidden_states, const Routing& routing,
                              const TensorView& output, Workspace workspace,
                              const ForwardOptions& options) const {
  const Impl& impl = this->impl();
  FUSEDMOE_CHECK_FAULT(routing.topk_ids, kNull, "topk_ids", "undefined", "given");
  FUSEDMOE_CHECK(!options.router_logits && !options.expert_load,
                 options.router_logits ? "options.router_logits" : "options.expert_load", "given",
                 "undefined: the router does not run");
  const Impl::Call call{hidden_states, output, routing, options,
                        options.stream.value_or(impl.stream)};
  impl.check(call, workspace);
  impl.run(call, workspace.data);
}

Tensor MoeLayer::forward(const TensorView& hidden_states) const {
  const Impl& impl = this->impl();
  const Device device = impl.config.device;
  core::check_row_buffer(hidden_states, "hidden_states", impl.config.dtype,
                         {-1, impl.config.hidden}, device);
  Tensor output = Tensor::empty(hidden_states.shape(), impl.output_dtype, device);
  const std::size_t bytes = workspace_bytes(hidden_states.size(0));
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, device);
  forward(hidden_states, output, Workspace{workspace.data(), bytes});
  synchronize(Stream{device});
  return output;
}

}  // namespace fusedmoe
