// MoeLayer: router logits -> top-k -> modular kernel, plus shared experts, in one workspace.
#include "fusedmoe/layer.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/device_runtime.h"
#include "core/exception_text.h"
#include "core/workspace.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "layer/backend.h"
#include "layer/checks.h"
#include "layer/layer_impl.h"
#include "moe/check_args.h"

namespace fusedmoe {

Plan MoeLayer::Impl::plan() const {
  Plan plan = selection.plan();
  if (!shared) return plan;
  plan.shared_experts = shared->pair;
  plan.shared_scheme = name(shared->packed->info().scheme);
  return plan;
}

ProblemSize MoeLayer::Impl::problem(const ModularKernel& of, std::int64_t num_tokens,
                                    std::int64_t max_tokens) const {
  ProblemSize size = ProblemSize::of(of.experts().config(), num_tokens);
  size.max_tokens = max_tokens;
  size.output_dtype = output_dtype;
  return size;
}

MoeLayer::Impl::Buffers MoeLayer::Impl::cut(std::int64_t num_tokens, void* workspace,
                                            std::int64_t max_tokens) const {
  Buffers buffers;
  core::WorkspaceCutter cutter(workspace);
  const auto tensor = [&](DType dtype, std::int64_t columns) {
    return cutter.take(dtype, {num_tokens, columns}, config.device);
  };
  buffers.router_logits = tensor(DType::kF32, router.num_choices());
  buffers.routing = {tensor(DType::kI32, router.topk), tensor(DType::kF32, router.topk)};
  std::size_t kernel_bytes = 0;
  const auto make_room_for = [&](const ModularKernel& each) {
    kernel_bytes =
        std::max(kernel_bytes, each.workspace_bytes(problem(each, num_tokens, max_tokens)));
  };
  make_room_for(kernel);
  if (monolithic) make_room_for(*monolithic);
  if (shared) {
    buffers.shared_routing = {tensor(DType::kI32, 1), tensor(DType::kF32, 1)};
    make_room_for(shared->kernel);
  }
  if (router.num_zero_experts > 0) {
    buffers.expert_ids = tensor(DType::kI32, router.topk);
    buffers.zero_weights = tensor(DType::kF32, 1);
  }
  if (adds_beside()) buffers.beside = tensor(output_dtype, hidden);
  if (latent) {
    buffers.latent_input = tensor(config.dtype, config.hidden);
    buffers.latent_output = tensor(output_dtype, config.hidden);
    buffers.projected = tensor(DType::kF32, std::max(hidden, config.hidden)).data();
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
  if (options.hooks && !config.hooks) {
    throw Error::unsupported(
        Reason::kHooks, "hooks",
        "hooks are given to a layer that was made without LayerOptions::hooks");
  }
  core::check_row_buffer(call.hidden_states, "hidden_states", config.dtype, {-1, hidden}, device);
  const std::int64_t num_tokens = call.hidden_states.size(0);
  core::check_row_count(num_tokens, 1);
  core::check_row_count(std::min(num_tokens, chunk),
                        kernel.experts().batched() ? config.num_local_experts : router.topk);
  FUSEDMOE_CHECK(options.max_tokens >= 0, "options.max_tokens", core::to_string(options.max_tokens),
                 "not negative");
  FUSEDMOE_CHECK_FAULT(options.max_tokens == 0 || num_tokens <= options.max_tokens, kShape,
                       "hidden_states", core::format("{} tokens", num_tokens),
                       core::format("at most {}, the most of any rank", options.max_tokens));
  if (max_tokens_per_rank > 0) {
    FUSEDMOE_CHECK(call.max_tokens <= max_tokens_per_rank, "options.max_tokens",
                   core::to_string(call.max_tokens),
                   core::format("at most max_tokens_per_rank, {}", max_tokens_per_rank));
    FUSEDMOE_CHECK_FAULT(num_tokens <= call.max_tokens, kShape, "hidden_states",
                         core::format("{} tokens", num_tokens),
                         core::format("at most {}, the most of any rank", call.max_tokens));
    core::check_row_count(std::min(call.max_tokens, chunk) * communicator->size(), router.topk);
  }
  core::check_row_buffer(call.output, "output", output_dtype, {num_tokens, hidden}, device);
  if (options.hooks && std::max(num_tokens, call.max_tokens) > chunk) {
    throw Error::invalid(
        "hooks", core::format("hooks see all {} tokens at once, but max_workspace_bytes is enough "
                              "for {}",
                              std::max(num_tokens, call.max_tokens), chunk));
  }

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
       {num_tokens, router.num_choices()}},
      {{"options.topk_ids", &options.topk_ids}, DType::kI32, choice},
      {{"options.topk_weights", &options.topk_weights}, DType::kF32, choice},
      {{"options.expert_load", &options.expert_load}, DType::kI32, {router.num_choices()}},
      {{"options.dropped_rows", &options.dropped_rows}, DType::kI32, {1}},
  };
  layer::check_output(call.output, call.hidden_states, inplace);
  layer::check_disjoint(out, {ids, weights});
  layer::check_workspace(
      workspace, cut(std::min(num_tokens, chunk), nullptr, std::min(call.max_tokens, chunk)).bytes,
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
  if (routed && device.is_cpu()) {
    layer::check_ids(call.routing.topk_ids, router.num_choices(), config, expert_map);
  }
}

void MoeLayer::Impl::apply_routed(const Call& call, const Routing& routing,
                                  const Buffers& buffers) const {
  const bool routes = !call.routing.topk_ids;
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
  args.max_tokens = call.max_tokens;
  args.dropped_rows = call.options.dropped_rows;
  const ProblemSize size = problem(kernel, call.hidden_states.size(0), call.max_tokens);
  if (routes && monolithic) {
    args.router = &router;
    args.router_logits = buffers.router_logits;
    args.expert_load = call.options.expert_load;
    args.router_weights = &router_weights;
    return monolithic->run(args, size, buffers.kernel);
  }
  if (routes) {
    backend.router_logits(router_weights, call.hidden_states, buffers.router_logits, call.stream);
    backend.route(router, buffers.router_logits, router_weights.score_correction_bias, routing,
                  call.options.expert_load, call.stream);
  }
  args.topk_ids = apply_zero_experts(call, routing, buffers);
  if (!latent) return kernel.run(args, size, buffers.kernel);
  project(latent->down, call.hidden_states,
          {.target = buffers.latent_input, .accumulate = false, .stream = call.stream}, buffers);
  args.hidden_states = buffers.latent_input;
  args.output = buffers.latent_output;
  args.accumulate = false;
  kernel.run(args, size, buffers.kernel);
  project(latent->up, buffers.latent_output,
          {.target = call.output, .accumulate = call.options.accumulate, .stream = call.stream},
          buffers);
}

void MoeLayer::Impl::project(const Tensor& weight, const TensorView& x, core::AddArgs to,
                             const Buffers& buffers) const {
  to.source =
      TensorView(buffers.projected, DType::kF32, {x.size(0), weight.size(0)}, config.device);
  backend.router_logits({weight, {}, {}}, x, to.source, to.stream);
  backend.add(to);
}

TensorView MoeLayer::Impl::apply_zero_experts(const Call& call, const Routing& routing,
                                              const Buffers& buffers) const {
  if (router.num_zero_experts == 0) return routing.topk_ids;
  backend.split_zero_experts(
      {routing, router.num_experts, router.num_choices(), buffers.expert_ids, buffers.zero_weights},
      call.stream);
  if (adds_zero_experts) {
    backend.add({.target = buffers.beside,
                 .source = call.hidden_states,
                 .scale = buffers.zero_weights,
                 .accumulate = shared.has_value(),
                 .stream = call.stream});
  }
  return buffers.expert_ids;
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
  args.output = buffers.beside;
  args.hidden_states = call.hidden_states;
  args.topk_ids = routing.topk_ids;
  args.topk_weights = routing.topk_weights;
  args.stream = call.stream;
  const ProblemSize size = problem(shared->kernel, call.hidden_states.size(0));
  shared->kernel.run(args, size, buffers.kernel);
}

void MoeLayer::Impl::run_chunk(const Call& call, void* workspace) const {
  const ForwardOptions& options = call.options;
  const Buffers buffers = cut(call.hidden_states.size(0), workspace, call.max_tokens);
  const Routing routing = call.routing.topk_ids ? call.routing : buffers.routing;
  // Shared experts first: the routed ones may overwrite the hidden states.
  if (shared) apply_shared(call, buffers);
  apply_routed(call, routing, buffers);
  if (adds_beside()) {
    backend.add({.target = call.output, .source = buffers.beside, .stream = call.stream});
  }
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
  for (const TensorView& sum : {whole.expert_load, whole.dropped_rows}) {
    if (sum) fill_bytes(sum, 0, call.stream);
  }
  // Every rank runs as many chunks as the one with the most tokens.
  const std::int64_t most = std::max(num_tokens, call.max_tokens);
  if (most <= chunk) return run_chunk(call, workspace);
  for (std::int64_t first = 0; first < most; first += chunk) {
    const std::int64_t begin = std::min(first, num_tokens);
    const std::int64_t end = std::min(num_tokens, first + chunk);
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
               call.stream,
               communicator ? std::min(chunk, most - first) : 0},
              workspace);
  }
}

MoeLayer::Impl::Call MoeLayer::Impl::call(const TensorView& hidden_states, const TensorView& output,
                                          const Routing& routing,
                                          const ForwardOptions& options) const {
  std::int64_t max_tokens = 0;
  if (max_tokens_per_rank > 0) {
    max_tokens = options.max_tokens > 0 ? options.max_tokens : max_tokens_per_rank;
  }
  return {hidden_states, output, routing, options, options.stream.value_or(stream), max_tokens};
}

void MoeLayer::Impl::forward(const Call& call, Workspace workspace) const {
  if (!communicator) {
    check(call, workspace);
    return run(call, workspace.data);
  }
  try {
    check(call, workspace);
    run(call, workspace.data);
  } catch (...) {
    communicator->abort(core::current_exception_text());
    throw;
  }
}

MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;

const MoeLayer::Impl& MoeLayer::impl() const {
  if (!impl_) throw Error::invalid("layer", "the layer was moved from: it has no weights");
  return *impl_;
}

const MoeConfig& MoeLayer::config() const {
  return impl().config;
}
std::int64_t MoeLayer::hidden() const {
  return impl().hidden;
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
  const std::int64_t at_once = std::min(num_tokens, impl().chunk);
  core::check_num_tokens(impl().kernel.experts(), at_once);
  return impl().cut(at_once, nullptr).bytes;
}

std::size_t MoeLayer::shared_bytes(std::int64_t num_tokens) const {
  const Impl& impl = this->impl();
  const std::int64_t at_once = std::min(num_tokens, impl.chunk);
  core::check_num_tokens(impl.kernel.experts(), at_once);
  const auto bytes_of = [&](const ModularKernel& kernel) {
    return kernel.shared_bytes(impl.problem(kernel, at_once));
  };
  const std::size_t bytes = bytes_of(impl.kernel);
  return impl.monolithic ? std::max(bytes, bytes_of(*impl.monolithic)) : bytes;
}

void MoeLayer::forward(const TensorView& hidden_states, const TensorView& output,
                       Workspace workspace, const ForwardOptions& options) const {
  const Impl& impl = this->impl();
  if (!impl.router_weights.weight) {
    throw Error::invalid("router_weights.weight",
                         "the layer was made without router_weights.weight, so it cannot route: "
                         "call forward_routed()",
                         Fault::kNull);
  }
  impl.forward(impl.call(hidden_states, output, {}, options), workspace);
}

void MoeLayer::forward_routed(const TensorView& hidden_states, const Routing& routing,
                              const TensorView& output, Workspace workspace,
                              const ForwardOptions& options) const {
  const Impl& impl = this->impl();
  FUSEDMOE_CHECK_FAULT(routing.topk_ids, kNull, "topk_ids", "undefined", "given");
  if (options.router_logits || options.expert_load) {
    throw Error::conflict(options.router_logits ? "options.router_logits" : "options.expert_load",
                          "forward_routed()", "the router does not run");
  }
  impl.forward(impl.call(hidden_states, output, routing, options), workspace);
}

Tensor MoeLayer::forward(const TensorView& hidden_states) const {
  const Impl& impl = this->impl();
  const Device device = impl.config.device;
  core::check_row_buffer(hidden_states, "hidden_states", impl.config.dtype, {-1, impl.hidden},
                         device);
  Tensor output = Tensor::empty(hidden_states.shape(), impl.output_dtype, device);
  const std::size_t bytes =
      workspace_bytes(std::max(hidden_states.size(0), impl.max_tokens_per_rank));
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, device);
  forward(hidden_states, output, Workspace{workspace.data(), bytes});
  synchronize(Stream{device});
  return output;
}

}  // namespace fusedmoe
