// MoeLayer's construction: checks, agreement with the other ranks, selection, packing.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "core/exception_text.h"
#include "core/parallel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "layer/agreement.h"
#include "layer/backend.h"
#include "layer/layer_impl.h"
#include "layer/rank_transports.h"
#include "moe/check_args.h"
#include "moe/placement.h"

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
  context.ranks = options.ranks;
  return context;
}

}  // namespace

MoeLayer::Impl::Impl(const LayerWeights& weights, const LayerOptions& options,
                     const Selection& chosen)
    : options(options),
      config(layer::layer_config(weights, options)),
      selection(chosen),
      backend(layer::backend_of(*chosen.experts, options.device)),
      router(weights.router),
      router_weights{own(weights.router_weights.weight, options.device),
                     own(weights.router_weights.bias, options.device),
                     own(weights.router_weights.score_correction_bias, options.device)},
      expert_map(own(weights.expert_map, options.device)),
      hidden(weights.hidden()),
      kernel(chosen.create(layer_context(options))),
      output_dtype(options.output_dtype.value_or(options.dtype)),
      inplace(options.inplace),
      adds_zero_experts(weights.router.num_zero_experts > 0 &&
                        (layer::across_ranks(options) ||
                         (options.parallel.ep_rank == 0 && options.parallel.tp_rank == 0))),
      executor(executor_for(options)),
      stream{options.device} {
  if (weights.latent) {
    latent = {own(weights.latent->down, options.device), own(weights.latent->up, options.device)};
  }
  this->options.progress = {};
  this->options.packed_weights.reset();
  if (executor && options.device.is_cpu()) stream = cpu_stream(*executor);
  config.activation_format = chosen.prepare_finalize->activation_format();
  bind();
  pack(weights, options);
  limit_chunk();
}

MoeLayer::Impl::Impl(const Impl& before, const Rebinding& there)
    : options(there.options),
      config(there.config),
      selection(there.selection),
      backend(before.backend),
      router(before.router),
      router_weights(before.router_weights),
      expert_map(own(options.ranks.placement->expert_map(options.parallel.ep_rank), config.device)),
      latent(before.latent),
      hidden(before.hidden),
      kernel(selection.create(layer_context(options))),
      shared(before.shared),
      output_dtype(before.output_dtype),
      inplace(before.inplace),
      adds_zero_experts(before.adds_zero_experts),
      executor(before.executor),
      stream(before.stream) {
  bind();
  placement = options.ranks.placement;
  limit_chunk();
}

/// What follows from the ranks: kernels of experts that route by themselves, sizes, the placement.
void MoeLayer::Impl::bind() {
  // Across ranks ids travel faster than logits.
  const bool faster = router_weights.weight && selection.experts->routes_faster() &&
                      selection.prepare_finalize != &allgather_reducescatter();
  Selection routing = selection;
  routing.config.monolithic = true;
  if (options.monolithic || faster) {
    Support support = selection.experts->supports(routing.config);
    if (support) support = selection.prepare_finalize->supports(routing.config);
    if (support) monolithic.emplace(routing.create(layer_context(options)));
    if (options.monolithic && !support) {
      throw Error::unsupported(support.reason, "options.monolithic", support.text);
    }
  }
  if (layer::across_ranks(options)) communicator = options.ranks.communicator;
  for (int lane = 1; lane < options.ranks.lanes; ++lane) {
    Context context = layer_context(options);
    if (communicator) context.ranks.communicator = communicator->lane(lane);
    other_lanes.push_back({selection.create(context), std::nullopt});
    if (monolithic) other_lanes.back().monolithic.emplace(routing.create(context));
  }
  if (!communicator) return;
  const ParallelConfig& parallel = options.parallel;
  if (parallel.needs_dispatch()) max_tokens_per_rank = options.ranks.max_tokens_per_rank;
  if (parallel.ep_size == 1) return;
  placement = core::placement_of(options.ranks.placement, config.num_experts, parallel.ep_size);
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
  packed = options.packed_weights ? load_packed(kernel.experts(), *options.packed_weights)
                                  : kernel.experts().pack(weights.experts, progress_from(0));
  if (!weights.shared_experts) return;
  const SharedExperts& source = *weights.shared_experts;
  const Selection choice = layer::select_shared(source.weights, options, selection);
  Context context = layer_context(options);
  context.ranks = {};
  ModularKernel shared_kernel = choice.create(context);
  auto shared_packed = shared_kernel.experts().pack(source.weights, progress_from(num_experts));
  shared.emplace(Shared{choice.pair(), std::move(shared_kernel), std::move(shared_packed),
                        own(source.gate, options.device)});
}

/// As many tokens at a time as the rank with the least memory for them.
void MoeLayer::Impl::limit_chunk() {
  if (options.max_workspace_bytes == 0) return;
  limit_chunk(options.max_workspace_bytes);
  if (!communicator) return;
  for (const std::string& text : communicator->gather(core::to_string(chunk), "making a layer")) {
    chunk = std::min<std::int64_t>(chunk, std::stoll(text));
  }
}

/// The most tokens whose workspace stays below the limit.
void MoeLayer::Impl::limit_chunk(std::size_t max_bytes) {
  if (batch_dependent(config.scheme)) {
    throw Error::conflict("options.max_workspace_bytes", name(config.scheme),
                          "one activation scale for all rows of a batch does not allow chunks");
  }
  const auto bytes_for = [&](std::int64_t num_tokens) {
    const std::size_t exact = workspace_bytes(num_tokens, false);
    return max_tokens_per_rank > 0 ? std::max(exact, workspace_bytes(num_tokens, true)) : exact;
  };
  FUSEDMOE_CHECK(bytes_for(1) <= max_bytes, "options.max_workspace_bytes",
                 core::format("{}", max_bytes),
                 core::format("at least {}, for one token", bytes_for(1)));
  std::int64_t fits = 1, too_many = 2;
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  while (too_many < kMost && bytes_for(too_many) <= max_bytes) {
    fits = std::exchange(too_many, 2 * too_many);
  }
  if (too_many >= kMost) return;
  while (too_many - fits > 1) {
    const std::int64_t middle = (fits + too_many) / 2;
    (bytes_for(middle) <= max_bytes ? fits : too_many) = middle;
  }
  chunk = fits;
}

namespace {

/// Static activation scales per tensor: experts take the largest of all they hold, and here of all
/// ranks, so that the placement changes nothing.
void share_input_scales(Communicator& communicator, ExpertWeights& weights) {
  const std::vector<layer::InputScale> scales = layer::static_input_scales(weights);
  if (scales.empty()) return;
  std::array<float, 2> largest{};
  for (const auto& [scale, gemm] : scales) {
    const Tensor host = to_device(Tensor(*scale, nullptr), {});
    largest[gemm] = std::max(largest[gemm], *host.as<const float>());
  }
  const std::string mine(reinterpret_cast<const char*>(largest.data()), sizeof largest);
  for (const std::string& text : communicator.gather(mine, "making a layer")) {
    std::array<float, 2> others{};
    std::memcpy(others.data(), text.data(), sizeof others);
    for (const int gemm : {0, 1}) largest[gemm] = std::max(largest[gemm], others[gemm]);
  }
  layer::set_input_scales(weights, largest);
}

/// Of weights that came from files: ranks quantize rows for each other.
void check_same_scales(Communicator& communicator, const PackedWeights::Info& info) {
  const float mine[] = {info.a1_scale.value_or(0), info.a2_scale.value_or(0)};
  const std::string text(reinterpret_cast<const char*>(mine), sizeof mine);
  for (const std::string& other : communicator.gather(text, "making a layer")) {
    if (other == text) continue;
    throw Error::invalid("options.packed_weights",
                         "options.packed_weights of the ranks have static activation scales that "
                         "differ: save them from layers of one communicator");
  }
}

/// A layer whose rows stay on this rank: what is said of other ranks would be ignored.
void check_one_rank(const LayerWeights& weights, const LayerOptions& options) {
  const ParallelConfig& parallel = options.parallel;
  const RankOptions& ranks = options.ranks;
  parallel.validate();
  if (ranks.communicator) {
    FUSEDMOE_CHECK(parallel.num_ranks() == 1, "options.ranks.communicator", "of one rank",
                   core::format("of {} ranks, as options.parallel says", parallel.num_ranks()));
    layer::check_number_of_lanes(ranks.lanes);
    return;
  }
  const std::pair<bool, const char*> given[] = {
      {ranks.max_tokens_per_rank != 0, "max_tokens_per_rank"},
      {ranks.receive_capacity != 0, "receive_capacity"},
      {ranks.drop_rows, "drop_rows"},
      {ranks.replica_choice != ReplicaChoice::kHash, "replica_choice"},
      {ranks.combine.has_value(), "combine"},
      {ranks.combine_dtype.has_value(), "combine_dtype"},
      {ranks.lanes != 1, "lanes"},
      {ranks.dispatch_dtype.has_value(), "dispatch_dtype"}};
  for (const auto& [is_given, name] : given) {
    if (!is_given) continue;
    throw Error::invalid(core::format("options.ranks.{}", name),
                         core::format("options.ranks.{} cannot be used without a communicator: no "
                                      "rows travel",
                                      name));
  }
  if (weights.shared_experts && parallel.rank() > 0) {
    throw Error::invalid(
        "shared_experts",
        core::format("shared_experts are for rank 0 alone, not for rank {} of {}, without a "
                     "communicator: the outputs of all ranks are added",
                     parallel.rank(), parallel.num_ranks()));
  }
}

void check_options(const LayerWeights& weights, const LayerOptions& options) {
  FUSEDMOE_CHECK_FAULT(core::is_activation_dtype(options.dtype), kDType, "options.dtype",
                       std::string(name(options.dtype)), "f32, bf16 or f16");
  const DType output = options.output_dtype.value_or(options.dtype);
  FUSEDMOE_CHECK_FAULT(output == options.dtype || output == DType::kF32, kDType,
                       "options.output_dtype", std::string(name(output)),
                       core::format("{} or f32", name(options.dtype)));
  core::check_num_threads(options.num_threads);
  // Before ranks tell each other of their weights; else pack() reads them.
  layer::check_weights(weights, options.ranks.communicator != nullptr);
  core::check_custom_routing(weights.router, options.device);
}

}  // namespace

MoeLayer::MoeLayer(LayerWeights weights, LayerOptions options) {
  if (!layer::across_ranks(options)) {
    check_one_rank(weights, options);
    if (options.ranks.placement) weights = layer::complete(std::move(weights), options);
    check_options(weights, options);
    impl_ = std::make_unique<Impl>(weights, options, layer::select_routed(weights, options));
    return;
  }
  const std::shared_ptr<Communicator> communicator = options.ranks.communicator;
  Selection selection;
  layer::agree(*communicator, [&] {
    options = layer::complete(std::move(options));
    weights = layer::complete(std::move(weights), options);
    check_options(weights, options);
    selection = layer::select_routed(weights, options);
    MoeConfig config = layer::layer_config(weights, options);
    if (selection.prepare_finalize == &batched()) {
      throw Error::unsupported(Reason::kParallelConfig, "options.require",
                               "options.require names batched, which does not run across ranks");
    }
    config.monolithic = options.monolithic;
    layer::check_rank_options(*selection.prepare_finalize, config, {.ranks = options.ranks});
    return layer::facts_of(config, weights, options, selection);
  });
  try {
    share_input_scales(*communicator, weights.experts);
    impl_ = std::make_unique<Impl>(weights, options, selection);
    check_same_scales(*communicator, impl_->packed->info());
  } catch (...) {
    communicator->abort(core::current_exception_text());
    throw;
  }
}

}  // namespace fusedmoe
