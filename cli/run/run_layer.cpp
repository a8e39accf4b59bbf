// The forwards of fusedmoe run. On several ranks each data-parallel group has a part of the tokens,
// and rank 0 gets the results of all.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/runtime.h"
#include "run/row_check.h"
#include "run/run.h"
#include "support.h"

namespace fusedmoe::cli {

void RunResults::describe(const MoeLayer& layer) {
  plan_line = layer.plan_line();
  experts = layer.selection().experts->name();
  prepare_finalize = layer.selection().prepare_finalize->name();
}

std::optional<double> RunResults::warm_ms() const {
  if (times_ms.size() < 2) return {};
  std::vector<double> sorted(times_ms.begin() + 1, times_ms.end());
  std::nth_element(sorted.begin(), sorted.begin() + sorted.size() / 2, sorted.end());
  return sorted[sorted.size() / 2];
}

void RunResults::fetch() {
  for (Tensor* tensor :
       {&output, &router_logits, &routing.topk_ids, &routing.topk_weights, &expert_load}) {
    if (*tensor) *tensor = to_device(*tensor, {});
  }
}

void warn_of_uncalibrated(const Checkpoint& checkpoint, std::int64_t index) {
  const std::vector<UncalibratedScale> scales = checkpoint.uncalibrated(index);
  if (scales.empty()) return;
  log(Level::kWarning,
      fmt::format("{} is {}{}: such an expert was not calibrated and takes the largest input scale "
                  "of the layer's others; fusedmoe inspect lists them",
                  scales.front().tensor, scales.front().value,
                  scales.size() == 1 ? "" : fmt::format(", and {} more", scales.size() - 1)));
}

LayerWeights load_weights(const RunOptions& options, const Checkpoint& checkpoint,
                          std::int64_t index, const ParallelConfig& parallel) {
  LayerWeights weights = checkpoint.load_layer(index, parallel);
  if (options.scheme.empty()) return weights;
  const QuantScheme stored = weights.experts.scheme, wanted = parse_scheme(options.scheme);
  const auto is_static = [](const QuantScheme& scheme) {
    return scheme.activations && !scheme.activations->dynamic;
  };
  if (wanted.weights != stored.weights || wanted.down != stored.down || is_static(wanted) ||
      is_static(stored)) {
    std::vector<std::string> others;  // that a change of dynamic activations makes of it
    for (const NamedScheme& other : named_schemes()) {
      if (other.scheme.weights == stored.weights && other.scheme.down == stored.down &&
          other.scheme != stored && !is_static(other.scheme)) {
        others.push_back(other.name);
      }
    }
    throw Error("--scheme", options.scheme,
                others.empty() || is_static(stored)
                    ? fmt::format("left out: the weights of {} go with no other", name(stored))
                    : fmt::format("one that has the weights of {}: {}", name(stored),
                                  fmt::join(others, ", ")));
  }
  weights.experts.scheme = wanted;
  weights.experts.scheme_source = "--scheme";
  if (weights.shared_experts && weights.shared_experts->weights.scheme == stored) {
    weights.shared_experts->weights.scheme = wanted;
    weights.shared_experts->weights.scheme_source = "--scheme";
  }
  return weights;
}

namespace {

MoeLayer make_layer(const RunOptions& options, const LayerWeights& weights, DType dtype,
                    const std::function<void(LayerOptions&)>& change) {
  Progress progress("Packing weights");
  LayerOptions layer;
  layer.device = parse_device(options.device);
  layer.dtype = dtype;
  layer.require = options.experts;
  layer.hooks = options.hooks;
  layer.monolithic = options.monolithic;
  layer.batch_invariant = options.batch_invariant;
  layer.max_workspace_bytes = static_cast<std::size_t>(options.max_workspace_mib) << 20;
  if (!options.plan.empty()) layer.plan = read_text(options.plan);
  layer.progress = [&](std::int64_t done, std::int64_t total) { progress.update(done, total); };
  if (change) change(layer);
  return {weights, layer};
}

RunResults make_results(const RunOptions& options, const MoeLayer& layer, const Tensor& x) {
  const std::int64_t num_tokens = x.size(0), topk = layer.router().topk;
  const std::int64_t num_choices = layer.router().num_choices();
  const Device device = layer.config().device;
  RunResults results;
  results.output = Tensor::empty(x.shape(), x.dtype(), device);
  results.replayed = !options.replay_routing.empty();
  if (results.replayed) {
    results.routing = replay_routing(options.replay_routing, num_choices, topk);
    if (results.routing.topk_ids.size(0) != num_tokens) {
      throw Error("--replay-routing", fmt::format("{} rows", results.routing.topk_ids.size(0)),
                  fmt::format("{}, one for each token", num_tokens));
    }
    results.routing = {to_device(results.routing.topk_ids, device),
                       to_device(results.routing.topk_weights, device)};
    return results;
  }
  results.expert_load = Tensor::empty({num_choices}, DType::kI32, device);
  results.router_logits = Tensor::empty({num_tokens, num_choices}, DType::kF32, device);
  results.routing = {Tensor::empty({num_tokens, topk}, DType::kI32, device),
                     Tensor::empty({num_tokens, topk}, DType::kF32, device)};
  return results;
}

void add_statistics(const RouterConfig& router, RunResults& results) {
  const Tensor& ids = results.routing.topk_ids;
  results.load = results.expert_load
                     ? load_statistics(results.expert_load, ids.size(0), router.topk)
                     : load_statistics(ids, router.num_choices());
  results.shared_with_previous = shared_with_previous(ids, router.num_choices());
}

/// Tokens of the largest of so many groups.
std::int64_t most_tokens(std::int64_t total, std::int64_t groups) {
  return std::max<std::int64_t>(1, (total + groups - 1) / groups);
}

/// Room for what a router finds out.
RunResults make_part(const MoeLayer& layer, const Tensor& x) {
  return make_results({}, layer, x);
}

}  // namespace

RunResults forward(const RunOptions& options, const LayerWeights& weights,
                   const Tensor& hidden_states) {
  const MoeLayer layer = make_layer(options, weights, hidden_states.dtype(), {});
  const Stream stream{layer.config().device};
  const Tensor x = to_device(hidden_states, stream.device);
  RunResults results = make_results(options, layer, x);
  const std::size_t bytes = layer.workspace_bytes(x.size(0));
  const Tensor memory =
      Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, stream.device);
  const Workspace workspace{memory.data(), bytes};
  const Routing routing{results.routing.topk_ids, results.routing.topk_weights};
  const ForwardOptions wanted{.router_logits = results.router_logits,
                              .topk_ids = routing.topk_ids,
                              .topk_weights = routing.topk_weights,
                              .expert_load = results.expert_load};
  Progress progress("Running");
  for (int i = 0; i <= options.repeat; ++i) {
    results.times_ms.push_back(time_ms([&] {
      if (results.replayed) {
        layer.forward_routed(x, routing, results.output, workspace);
      } else {
        layer.forward(x, results.output, workspace, wanted);
      }
      synchronize(stream);
    }));
    progress.update(i + 1, options.repeat + 1);
  }
  results.fetch();
  results.describe(layer);
  add_statistics(layer.router(), results);
  return results;
}

namespace {

/// Rows of a tensor that belong to a data-parallel group.
Tensor rows_of_group(const Tensor& all, std::int64_t group, std::int64_t groups) {
  const std::int64_t total = all.size(0);
  return {all.slice(0, total * group / groups, total * (group + 1) / groups), all.owner()};
}

/// Brings the results of all data-parallel groups, each from its first rank, to rank 0: there
/// `whole` has room for them.
void gather_results(Communicator& communicator, const ParallelConfig& parallel,
                    const RunResults& mine, const RunResults& whole) {
  const auto members = [](const RunResults& results) {
    return std::array{results.output, results.router_logits, results.routing.topk_ids,
                      results.routing.topk_weights};
  };
  const auto add = [](std::vector<Message>& list, int peer, const Tensor& rows) {
    list.push_back({peer, rows.data(), static_cast<std::size_t>(rows.nbytes())});
  };
  std::vector<Message> sends, receives;
  const int rank = communicator.rank();
  if (rank > 0 && rank % parallel.group_size() == 0) {
    for (const Tensor& rows : members(mine)) add(sends, 0, rows);
  }
  for (int group = 0; rank == 0 && group < parallel.dp_size; ++group) {
    for (std::size_t i = 0; i < members(mine).size(); ++i) {
      const Tensor rows = rows_of_group(members(whole)[i], group, parallel.dp_size);
      if (group > 0) add(receives, group * parallel.group_size(), rows);
      if (group == 0) copy(members(mine)[i], rows, Stream{communicator.device()});
    }
  }
  const Stream stream{communicator.device()};
  communicator.exchange(sends, receives, stream, "results");
  synchronize(stream);
  communicator.check();
}

/// This rank's part of the work. On rank 0 the results of all.
RunResults forward_on_rank(const RunOptions& options, const MoeLayer& layer, const Tensor& all,
                           Communicator& communicator, const ParallelConfig& parallel) {
  const Stream stream{communicator.device()};
  const std::int64_t groups = parallel.dp_size;
  const std::int64_t group = parallel.rank() / parallel.group_size();
  const Tensor x = to_device(rows_of_group(all, group, groups), stream.device);
  RunResults mine = make_part(layer, x);
  const std::size_t bytes = layer.workspace_bytes(most_tokens(all.size(0), groups));
  const Tensor memory =
      Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, stream.device);
  for (int i = 0; i <= options.repeat; ++i) {
    mine.times_ms.push_back(time_ms([&] {
      layer.forward(x, mine.output, {memory.data(), bytes},
                    {.router_logits = mine.router_logits,
                     .topk_ids = mine.routing.topk_ids,
                     .topk_weights = mine.routing.topk_weights});
      synchronize(stream);
    }));
  }
  RunResults whole;
  if (parallel.rank() == 0) {
    whole = make_part(layer, all);
    whole.describe(layer);
    whole.times_ms = mine.times_ms;
  }
  gather_results(communicator, parallel, mine, whole);
  if (parallel.rank() > 0) return whole;
  whole.expert_load = {};  // the load comes from the ids of all ranks
  whole.fetch();
  add_statistics(layer.router(), whole);
  return whole;
}

}  // namespace

RunResults forward_on_ranks(const RunOptions& options, const Checkpoint& checkpoint,
                            std::int64_t index, const Tensor& x) {
  RunResults results;
  run_on_ranks(
      options.ranks.num_ranks(), options.device,
      [&](const std::shared_ptr<Communicator>& rank) {
        const auto parallel = ParallelConfig::of(options.ranks.deployment(rank->rank()));
        const LayerWeights weights = load_weights(options, checkpoint, index, parallel);
        if (rank->rank() == 0) warn_of_uncalibrated(checkpoint, index);
        const MoeLayer layer = make_layer(options, weights, x.dtype(), [&](LayerOptions& of_rank) {
          of_rank.device = rank->device();
          of_rank.parallel = parallel;
          of_rank.ranks.communicator = rank;
          of_rank.ranks.max_tokens_per_rank = most_tokens(x.size(0), parallel.dp_size);
          of_rank.ranks.dispatch_dtype = options.ranks.dispatched();
          of_rank.num_threads = threads_of_rank(*rank);
        });
        RunResults mine = forward_on_rank(options, layer, x, *rank, parallel);
        if (rank->rank() == 0) results = std::move(mine);
      },
      kRankTimeout, options.ranks.peer_memory());
  return results;
}

}  // namespace fusedmoe::cli
