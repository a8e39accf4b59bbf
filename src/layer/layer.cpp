// MoeLayer's calls: what they check, how they are cut into chunks, and their one workspace.
#include "fusedmoe/layer.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/device_runtime.h"
#include "core/exception_text.h"
#include "core/workspace.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "layer/checks.h"
#include "layer/layer_impl.h"
#include "moe/check_args.h"

namespace fusedmoe {

Plan MoeLayer::Impl::plan() const {
  Plan plan = selection.plan();
  plan.rows_travel = kernel.rows_travel();
  if (!shared) return plan;
  plan.shared_experts = shared->pair;
  plan.shared_scheme = name(shared->packed->info().scheme);
  return plan;
}

MoeLayer::Impl::Sizes MoeLayer::Impl::sizes(const ModularKernel& routed, std::int64_t num_tokens,
                                            std::int64_t max_tokens, bool fixed_sizes) const {
  const auto sizes_of = [&](const ModularKernel& each, std::int64_t most) {
    ProblemSize problem = ProblemSize::of(each.experts().config(), num_tokens);
    problem.max_tokens = most;
    problem.fixed_sizes = fixed_sizes;
    problem.output_dtype = output_dtype;
    return each.sizes(problem);
  };
  Sizes sizes;
  sizes.num_tokens = num_tokens;
  sizes.routed = sizes_of(routed, max_tokens);
  sizes.kernel_bytes = sizes.routed.bytes;
  if (shared) {
    sizes.shared = sizes_of(shared->kernel, 0);
    core::WorkspaceCutter cutter(nullptr);
    cutter.take(sizes.routed.transport.workspace_bytes);
    cutter.take(sizes.shared.bytes);
    sizes.kernel_bytes = std::max(sizes.kernel_bytes, cutter.used());
  }
  sizes.bytes = cut(sizes, nullptr).bytes;
  return sizes;
}

std::size_t MoeLayer::Impl::workspace_bytes(std::int64_t num_tokens, bool fixed_sizes) const {
  const std::size_t bytes = sizes(kernel, num_tokens, 0, fixed_sizes).bytes;
  return monolithic ? std::max(bytes, sizes(*monolithic, num_tokens, 0, fixed_sizes).bytes) : bytes;
}

MoeLayer::Impl::Buffers MoeLayer::Impl::cut(const Sizes& sizes, void* workspace) const {
  Buffers buffers;
  core::WorkspaceCutter cutter(workspace);
  const auto tensor = [&](DType dtype, std::int64_t columns) {
    return cutter.take(dtype, {sizes.num_tokens, columns}, config.device);
  };
  buffers.router_logits = tensor(DType::kF32, router.num_choices());
  buffers.routing = {tensor(DType::kI32, router.topk), tensor(DType::kF32, router.topk)};
  if (shared) buffers.shared_routing = {tensor(DType::kI32, 1), tensor(DType::kF32, 1)};
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
  buffers.kernel = cutter.take(sizes.kernel_bytes);
  core::WorkspaceCutter kernel_cutter(buffers.kernel);
  kernel_cutter.take(sizes.routed.transport.workspace_bytes);
  buffers.shared_kernel = kernel_cutter.take(sizes.shared.bytes);
  buffers.bytes = cutter.used();
  return buffers;
}

/// How many tokens there are, for what there is room.
void MoeLayer::Impl::check_tokens(const Call& call) const {
  const ForwardOptions& options = call.options;
  const std::int64_t num_tokens = call.hidden_states.size(0);
  const bool travel = max_tokens_per_rank > 0;
  core::check_row_count(num_tokens, 1);
  core::check_row_count(std::min(num_tokens, chunk),
                        kernel.experts().batched() ? config.num_local_experts : router.topk);
  FUSEDMOE_CHECK(options.max_tokens >= 0, "options.max_tokens", core::to_string(options.max_tokens),
                 "not negative");
  const std::int64_t most = travel ? call.max_tokens : options.max_tokens;
  FUSEDMOE_CHECK(!travel || most <= max_tokens_per_rank, "options.max_tokens",
                 core::to_string(most),
                 core::format("at most max_tokens_per_rank, {}", max_tokens_per_rank));
  FUSEDMOE_CHECK_FAULT(most == 0 || num_tokens <= most, kShape, "hidden_states",
                       core::format("{} tokens", num_tokens),
                       core::format("at most {}, the most of any rank", most));
  if (travel) core::check_row_count(std::min(most, chunk) * communicator->size(), router.topk);
  const std::int64_t all = std::max(num_tokens, call.max_tokens);
  if (!options.hooks || all <= chunk) return;
  throw Error::invalid(
      "hooks", core::format("hooks see all {} tokens at once, but max_workspace_bytes is enough "
                            "for {}",
                            all, chunk));
}

/// What a forward writes beside its output lies apart from everything else.
void MoeLayer::Impl::check_results(const Call& call, Workspace workspace) const {
  using layer::NamedView;
  const ForwardOptions& options = call.options;
  const std::int64_t num_tokens = call.hidden_states.size(0);
  const Shape choice{num_tokens, router.topk};
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
  const TensorView block(workspace.data, DType::kU8,
                         {static_cast<std::int64_t>(workspace.data ? workspace.bytes : 0)});
  for (const auto& result : results) {
    if (!result.view.view->defined()) continue;
    core::check_buffer(*result.view.view, result.view.name, result.dtype, result.shape,
                       config.device);
    layer::check_disjoint(result.view, {{"hidden_states", &call.hidden_states},
                                        {"output", &call.output},
                                        {"topk_ids", &call.routing.topk_ids},
                                        {"topk_weights", &call.routing.topk_weights},
                                        {"options.expert_map", &options.expert_map},
                                        {"workspace", &block}});
    for (const auto& other : results) {
      if (&other != &result) layer::check_disjoint(result.view, {other.view});
    }
  }
}

void MoeLayer::Impl::check_map(const TensorView& given) const {
  if (communicator) {
    throw Error::conflict("options.expert_map", "a communicator",
                          "the placement says where experts lie");
  }
  if (!expert_map) {
    throw Error::invalid("options.expert_map",
                         "options.expert_map is given to a layer that was made without "
                         "LayerWeights::expert_map");
  }
  core::check_buffer(given, "options.expert_map", DType::kI32, {router.num_experts}, config.device);
}

MoeLayer::Impl::Sizes MoeLayer::Impl::check(const Call& call, Workspace workspace) const {
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
  check_tokens(call);
  core::check_row_buffer(call.output, "output", output_dtype, {num_tokens, hidden}, device);
  const auto lanes = std::ssize(other_lanes) + 1;
  FUSEDMOE_CHECK(options.lane >= 0 && options.lane < lanes, "options.lane",
                 core::to_string(options.lane),
                 core::format("below {}, the lanes that the layer was made with", lanes));
  const bool routed = call.routing.topk_ids.defined();
  if (routed) {
    const Shape choice{num_tokens, router.topk};
    core::check_buffer(call.routing.topk_ids, "topk_ids", DType::kI32, choice, device);
    core::check_buffer(call.routing.topk_weights, "topk_weights", DType::kF32, choice, device);
  }
  if (options.expert_map) check_map(options.expert_map);
  const NamedView in{"hidden_states", &call.hidden_states}, out{"output", &call.output};
  const NamedView map{"options.expert_map", &options.expert_map};
  const NamedView ids{"topk_ids", &call.routing.topk_ids};
  const NamedView weights{"topk_weights", &call.routing.topk_weights};
  layer::check_output(call.output, call.hidden_states, inplace);
  layer::check_disjoint(out, {ids, weights, map});
  const bool fixed_sizes = layer::has_fixed_sizes(kernel, options.fixed_sizes, call.stream);
  const Sizes needed = sizes(kernel_of(call), std::min(num_tokens, chunk),
                             std::min(call.max_tokens, chunk), fixed_sizes);
  layer::check_workspace(workspace, needed.bytes, {in, out, ids, weights, map});
  check_results(call, workspace);
  if (!device.is_cpu()) return needed;
  if (options.expert_map) layer::check_expert_map(call.expert_map, config.num_local_experts);
  if (routed) {
    layer::check_ids(call.routing.topk_ids, router.num_choices(), config, call.expert_map);
  }
  return needed;
}

MoeLayer::Impl::Call MoeLayer::Impl::Call::chunk(std::int64_t first, std::int64_t count) const {
  const std::int64_t num_tokens = hidden_states.size(0);
  const std::int64_t begin = std::min(first, num_tokens), end = std::min(num_tokens, first + count);
  const auto part = [&](const TensorView& view) {
    return view ? view.slice(0, begin, end) : TensorView();
  };
  Call result = *this;
  result.hidden_states = part(hidden_states);
  result.output = part(output);
  result.routing = {part(routing.topk_ids), part(routing.topk_weights)};
  result.options.router_logits = part(options.router_logits);
  result.options.topk_ids = part(options.topk_ids);
  result.options.topk_weights = part(options.topk_weights);
  if (max_tokens > 0) result.max_tokens = std::min(count, max_tokens - first);
  return result;
}

namespace {

void clear_counts(const ForwardOptions& options, Stream stream) {
  const core::CurrentDevice current(stream.device);
  for (const TensorView& count : {options.expert_load, options.dropped_rows}) {
    if (count) fill_bytes(count, 0, stream);
  }
}

}  // namespace

void MoeLayer::Impl::forward(const Call& call, Workspace workspace) const {
  Sizes needed;
  ending_ranks([&] {
    needed = check(call, workspace);
    clear_counts(call.options, call.stream);
  });
  // Every rank runs as many chunks as the one with the most tokens.
  const std::int64_t most = std::max(call.hidden_states.size(0), call.max_tokens);
  const bool fixed_sizes = needed.routed.transport.caller.fixed_sizes;
  for (std::int64_t first = 0; first == 0 || first < most; first += chunk) {
    const Call part = most <= chunk ? call : call.chunk(first, chunk);
    if (first > 0) {
      needed = sizes(kernel_of(part), part.hidden_states.size(0), part.max_tokens, fixed_sizes);
    }
    Step::Impl step(*this, part, needed, workspace.data);
    ending_ranks([&] {
      step.begin(true);
      step.compute();
      step.finish();
    });
  }
}

MoeLayer::Step MoeLayer::Impl::begin(const Call& call, Workspace workspace) const {
  std::unique_ptr<Step::Impl> step;
  ending_ranks([&] {
    const Sizes needed = check(call, workspace);
    const std::int64_t most = std::max(call.hidden_states.size(0), call.max_tokens);
    FUSEDMOE_CHECK_FAULT(most <= chunk, kShape, "hidden_states", core::format("{} tokens", most),
                         core::format("at most {} in begin(), of which max_workspace_bytes is "
                                      "enough for",
                                      chunk));
    clear_counts(call.options, call.stream);
    step = std::make_unique<Step::Impl>(*this, call, needed, workspace.data);
    step->begin(false);
  });
  return Step(std::move(step));
}

MoeLayer::Impl::Call MoeLayer::Impl::call(const TensorView& hidden_states, const TensorView& output,
                                          const Routing* routing,
                                          const ForwardOptions& options) const {
  if (!routing && !router_weights.weight) {
    throw Error::invalid("router_weights.weight",
                         "the layer was made without router_weights.weight, so it cannot route: "
                         "call forward_routed()",
                         Fault::kNull);
  }
  if (routing) {
    FUSEDMOE_CHECK_FAULT(routing->topk_ids, kNull, "topk_ids", "undefined", "given");
    if (options.router_logits) {
      throw Error::conflict("options.router_logits", "forward_routed()", "the router does not run");
    }
  }
  std::int64_t max_tokens = 0;
  if (max_tokens_per_rank > 0) {
    max_tokens = options.max_tokens > 0 ? options.max_tokens : max_tokens_per_rank;
  }
  return {hidden_states,
          output,
          routing ? *routing : Routing{},
          options,
          options.stream.value_or(stream),
          max_tokens,
          options.expert_map ? options.expert_map : TensorView(expert_map)};
}

MoeLayer::~MoeLayer() = default;
MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;

const MoeLayer::Impl& MoeLayer::impl() const {
  if (!impl_) throw Error::invalid("layer", "the layer was moved from: it has no weights");
  return *impl_;
}

MoeLayer::Impl& MoeLayer::impl() {
  return const_cast<Impl&>(std::as_const(*this).impl());
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
void MoeLayer::save_packed(const std::filesystem::path& path) const {
  fusedmoe::save_packed(impl().kernel.experts(), *impl().packed, path);
}

void MoeLayer::repack(const ExpertWeights& weights, std::int64_t expert) {
  impl().check_not_bringing("repack()");
  impl().check_between_forwards("repack()");
  impl_->kernel.experts().repack(weights, expert, *impl_->packed);
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

std::size_t MoeLayer::workspace_bytes(std::int64_t num_tokens, bool fixed_sizes) const {
  const std::int64_t at_once = std::min(num_tokens, impl().chunk);
  core::check_num_tokens(impl().kernel.experts(), at_once);
  return impl().workspace_bytes(at_once, fixed_sizes);
}

std::size_t MoeLayer::shared_bytes(std::int64_t num_tokens) const {
  const Impl& impl = this->impl();
  const std::int64_t at_once = std::min(num_tokens, impl.chunk);
  core::check_num_tokens(impl.kernel.experts(), at_once);
  const auto bytes_of = [&](const ModularKernel& kernel) {
    return impl.sizes(kernel, at_once, 0, false).routed.transport.shared_bytes;
  };
  const std::size_t bytes = bytes_of(impl.kernel);
  return impl.monolithic ? std::max(bytes, bytes_of(*impl.monolithic)) : bytes;
}

void MoeLayer::forward(const TensorView& hidden_states, const TensorView& output,
                       Workspace workspace, const ForwardOptions& options) const {
  impl().forward(impl().call(hidden_states, output, nullptr, options), workspace);
}

void MoeLayer::forward_routed(const TensorView& hidden_states, const Routing& routing,
                              const TensorView& output, Workspace workspace,
                              const ForwardOptions& options) const {
  impl().forward(impl().call(hidden_states, output, &routing, options), workspace);
}

MoeLayer::Step MoeLayer::begin(const TensorView& hidden_states, const TensorView& output,
                               Workspace workspace, const ForwardOptions& options) const {
  return impl().begin(impl().call(hidden_states, output, nullptr, options), workspace);
}

MoeLayer::Step MoeLayer::begin_routed(const TensorView& hidden_states, const Routing& routing,
                                      const TensorView& output, Workspace workspace,
                                      const ForwardOptions& options) const {
  return impl().begin(impl().call(hidden_states, output, &routing, options), workspace);
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
