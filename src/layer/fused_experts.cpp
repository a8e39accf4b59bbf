// fused_experts(): packs an engine's own tensors once and runs the experts on them.
#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "moe/check_args.h"

namespace fusedmoe {
namespace pack_cache {

/// What tells one tensor from another.
struct Place {
  Place() = default;
  explicit Place(const TensorView& view)
      : data(view.data()),
        dtype(view.dtype()),
        device(view.device()),
        shape(view.shape()),
        strides(view.strides()) {}

  const void* data = nullptr;
  DType dtype = DType::kF32;
  Device device;
  Shape shape, strides;
  bool operator==(const Place&) const = default;
};

/// Everything that the packed weights and the choice of experts depend on.
struct Key {
  QuantScheme scheme;
  DType dtype;
  Device device;
  std::int64_t topk, num_experts;
  std::string require;
  Activation activation;
  ActivationParams params;
  bool has_expert_map, apply_router_weight_on_input;
  GateUpLayout gate_up_layout;
  bool transposed;
  ScaleLayout scale_layout;
  std::array<Place, 12> weights;
  bool operator==(const Key&) const = default;
};

}  // namespace pack_cache

namespace {

using pack_cache::Key;
using pack_cache::Place;

Key key_of(const FusedExpertsArgs& args) {
  const ExpertWeights::Stacked& w = args.weights;
  Key key{args.scheme ? *args.scheme : schemes::unquantized(w.w13.dtype()),
          args.hidden_states.dtype(),
          args.hidden_states.device(),
          args.topk_ids.size(1),
          args.global_num_experts,
          args.require,
          args.activation,
          args.activation_params,
          args.expert_map.defined(),
          args.apply_router_weight_on_input,
          w.gate_up_layout,
          w.transposed,
          w.scale_layout,
          {}};
  std::size_t i = 0;
  for (const TensorView* view :
       {&w.w13, &w.w13_scales, &w.w13_zero_points, &w.w13_global_scales, &w.w13_input_scales,
        &w.w13_bias, &w.w2, &w.w2_scales, &w.w2_zero_points, &w.w2_global_scales,
        &w.w2_input_scales, &w.w2_bias}) {
    if (view->defined()) key.weights[i] = Place(*view);
    ++i;
  }
  return key;
}

/// Everything that the arguments tell before the weights are packed and memory is allocated.
void check_args(const FusedExpertsArgs& args) {
  const TensorView& x = args.hidden_states;
  core::check_activation_dtype(x, "hidden_states");
  core::check_rows(x, "hidden_states", x.dtype(), {-1, -1});
  FUSEDMOE_CHECK_FAULT(args.weights.w13.defined(), kNull, "weights.w13", "undefined", "given");
  FUSEDMOE_CHECK_FAULT(args.weights.w13.rank() > 0, kShape, "weights.w13", "a number",
                       "(E, 2 * intermediate, hidden)");
  const std::int64_t given = args.global_num_experts, local = args.weights.w13.size(0);
  constexpr std::int64_t kMost = 1 << 20;
  FUSEDMOE_CHECK(given >= 0 && given <= kMost, "global_num_experts", core::to_string(given),
                 core::format("0, for those of w13, or up to {}", kMost));
  const std::int64_t num_experts = given > 0 ? given : local;
  core::check_tensor(args.topk_ids, "topk_ids", DType::kI32, {x.size(0), -1});
  const std::int64_t topk = args.topk_ids.size(1);
  FUSEDMOE_CHECK_FAULT(topk >= 1 && topk <= num_experts, kShape, "topk_ids",
                       core::format("{} experts per token", topk),
                       core::format("1 to {} (num_experts) columns", num_experts));
  core::check_row_count(x.size(0), topk);
  core::check_tensor(args.topk_weights, "topk_weights", DType::kF32, {x.size(0), topk});
  if (args.expert_map) {
    core::check_tensor(args.expert_map, "expert_map", DType::kI32, {num_experts});
  }
  const bool widened = args.output && args.output.dtype() == DType::kF32;
  core::check_rows(args.output, "output", widened ? DType::kF32 : x.dtype(), x.shape());
}

MoeConfig config_of(const FusedExpertsArgs& args, const ExpertWeights& weights) {
  MoeConfig config = moe_config(weights, args.topk_ids.size(1), args.hidden_states.dtype(),
                                args.hidden_states.device());
  if (args.global_num_experts > 0) config.num_experts = args.global_num_experts;
  config.has_expert_map = args.expert_map.defined();
  config.apply_router_weight_on_input = args.apply_router_weight_on_input;
  return config;
}

}  // namespace

struct PackCache::Impl {
  struct Entry {
    pack_cache::Key key;
    ModularKernel kernel;
    std::shared_ptr<const PackedWeights> packed;
  };

  std::multimap<const void*, Entry> entries;  // by address of w13
  // Ascending for each device. CUDA graphs may use those that became too small.
  std::vector<Tensor> workspaces;

  const Entry& find_or_pack(const FusedExpertsArgs& args, Stream stream);
  Workspace workspace_of(std::size_t bytes, Stream stream);
};

const PackCache::Impl::Entry& PackCache::Impl::find_or_pack(const FusedExpertsArgs& args,
                                                            Stream stream) {
  Key key = key_of(args);
  const void* const address = args.weights.w13.data();
  const auto [begin, end] = entries.equal_range(address);
  const auto found =
      std::find_if(begin, end, [&](const auto& entry) { return entry.second.key == key; });
  if (found != end) return found->second;
  const ExpertWeights weights = ExpertWeights::from_stacked(
      args.weights, key.scheme, args.activation, args.activation_params);
  const MoeConfig config = config_of(args, weights);
  const Selection selection = select(config, args.require);
  if (is_capturing(stream)) {
    throw Error::invalid("stream",
                         "the stream is being captured, but these weights are not packed yet: a "
                         "call before the capture packs them (torch.compile copies tensors that "
                         "are neither parameters nor buffers, so that each of its graphs sees "
                         "others)");
  }
  ModularKernel kernel = selection.create(make_context());
  PackOptions options;
  options.stream = args.stream;
  auto packed = kernel.experts().pack(weights, options);
  return entries.emplace(address, Entry{std::move(key), std::move(kernel), std::move(packed)})
      ->second;
}

Workspace PackCache::Impl::workspace_of(std::size_t bytes, Stream stream) {
  std::size_t size = bytes;
  for (const Tensor& memory : workspaces) {
    const auto given = static_cast<std::size_t>(memory.nbytes());
    if (memory.device() != stream.device) continue;
    if (given >= bytes) return {memory.data(), given};
    // At least twice the last one, so that those kept are no more than the one in use.
    size = std::max(bytes, 2 * given);
  }
  if (stream.device.is_cpu()) {
    // A graph of the CPU is a function that calls fused_experts() again.
    std::erase_if(workspaces, [](const Tensor& memory) { return memory.device().is_cpu(); });
    size = bytes;
  }
  if (is_capturing(stream)) {
    throw Error::invalid(
        "stream",
        core::format("the stream is being captured, but {} bytes of scratch memory are missing: "
                     "make a call with as many tokens before, or give a workspace",
                     size));
  }
  workspaces.push_back(Tensor::empty({static_cast<std::int64_t>(size)}, DType::kU8, stream.device));
  return {workspaces.back().data(), size};
}

PackCache::PackCache() : impl_(std::make_unique<Impl>()) {}
PackCache::~PackCache() = default;
PackCache::PackCache(PackCache&&) noexcept = default;
PackCache& PackCache::operator=(PackCache&&) noexcept = default;

void PackCache::clear() {
  if (impl_) *impl_ = {};
}

std::size_t PackCache::size() const {
  return impl_ ? impl_->entries.size() : 0;
}

void fused_experts(const FusedExpertsArgs& args, PackCache& cache) {
  if (!cache.impl_) throw Error::invalid("cache", "the cache was moved from: it is empty");
  check_args(args);
  const Stream stream = args.stream.value_or(Stream{args.hidden_states.device()});
  const PackCache::Impl::Entry& entry = cache.impl_->find_or_pack(args, stream);
  ForwardArgs forward;
  forward.weights = entry.packed.get();
  forward.hidden_states = args.hidden_states;
  forward.output = args.output;
  forward.topk_ids = args.topk_ids;
  forward.topk_weights = args.topk_weights;
  forward.expert_map = args.expert_map;
  forward.inplace = true;
  forward.stream = stream;
  ProblemSize problem =
      ProblemSize::of(entry.kernel.experts().config(), args.hidden_states.size(0));
  if (args.output) problem.output_dtype = args.output.dtype();
  const std::size_t bytes = entry.kernel.workspace_bytes(problem);
  entry.kernel.apply(
      forward, args.workspace ? args.workspace(bytes) : cache.impl_->workspace_of(bytes, stream));
}

}  // namespace fusedmoe
