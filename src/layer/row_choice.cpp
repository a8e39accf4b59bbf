#include "layer/row_choice.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/format.h"
#include "fusedmoe/comm.h"
#include "fusedmoe/error.h"
#include "layer/prepared_rows.h"
#include "moe/peer_memory.h"

namespace fusedmoe::layer {
namespace {

constexpr CombineMode kPerRank = CombineMode::kPerRank, kPerSlot = CombineMode::kPerSlot;

/// The most tokens, of at most `most`, that `serves` says yes to: the times that it compares are
/// linear. Where it says no to few tokens alone, it still serves all.
template <typename Serves>
std::int64_t most_served(std::int64_t most, const Serves& serves) {
  if (serves(most)) return most;
  std::int64_t fits = 0, too_many = most;
  while (too_many - fits > 1) {
    const std::int64_t middle = (fits + too_many) / 2;
    (serves(middle) ? fits : too_many) = middle;
  }
  return fits;
}

}  // namespace

SimulatedLayer simulated_rows(const MoeConfig& config, const RankOptions& options,
                              const Preparation& preparation, ExpertPlacement placement) {
  SimulatedLayer layer;
  layer.placement = std::move(placement);
  if (!config.device.is_cpu()) layer.path = RowPath::kPeerMemory;
  layer.combine = config.combine;
  const DType returned =
      config.combine == kPerSlot ? DType::kF32 : options.combine_dtype.value_or(config.dtype);
  layer.sent_row_bytes = static_cast<double>(sent_row_bytes(config, preparation));
  layer.returned_row_bytes = static_cast<double>(bytes(returned, config.hidden));
  return layer;
}

PredictedRows predict_rows(const RankCosts& costs, const MoeConfig& config,
                           const RankOptions& options, const ExpertPlacement& placement,
                           RowPath path, CombineMode combine, std::int64_t tokens_per_rank) {
  MoeConfig asked = config;
  asked.combine = combine;
  SimulatedLayer rows = simulated_rows(asked, options, {}, placement);
  rows.path = path;
  rows.fixed_sizes = true;
  rows.tokens_per_rank = tokens_per_rank;
  const SimulatedStep step = simulate(costs, rows, config.topk);
  return {path, combine, step.dispatch_us, step.combine_us};
}

double saved_beside_experts(const RankCosts& costs, const MoeConfig& config,
                            const RankOptions& options, const ExpertPlacement& placement,
                            std::int64_t tokens_per_rank) {
  const double dispatch_us = predict_rows(costs, config, options, placement, RowPath::kPeerMemory,
                                          kPerRank, tokens_per_rank)
                                 .dispatch_us;
  const auto rows = static_cast<double>(tokens_per_rank * config.topk);  // of a rank's experts
  return dispatch_us - costs.peer_memory.dispatch.floor_us -
         costs.beside_experts.us(rows * static_cast<double>(bytes(config.dtype, config.hidden)));
}

bool may_come_beside_experts(const MoeConfig& config) {
  return config.combine != kPerSlot &&
         bytes(config.dtype, config.hidden) <= RowSources::kMostRowBytes;
}

std::int64_t least_beside_experts(const RankCosts& costs, const MoeConfig& config,
                                  const RankOptions& options, const ExpertPlacement& placement) {
  if (!may_come_beside_experts(config) || options.max_tokens_per_rank == 0) return 0;
  // What is saved grows by as much with each token, from -floor_us on.
  const double floor_us = costs.beside_experts.floor_us;
  const double each_us = saved_beside_experts(costs, config, options, placement, 1) + floor_us;
  const auto most = static_cast<double>(options.max_tokens_per_rank);
  if (each_us <= 0 || each_us * most < floor_us) return 0;
  return std::max(std::int64_t{1}, static_cast<std::int64_t>(std::ceil(floor_us / each_us)));
}

RowChoice choose_rows(const RankCosts& costs, const MoeConfig& config, const RankOptions& options,
                      const ExpertPlacement& placement, std::optional<RowPath> messages) {
  const std::int64_t most = options.max_tokens_per_rank;
  if (config.combine == kPerSlot) return {kPerSlot, most};
  const auto us = [&](RowPath path, CombineMode combine, std::int64_t tokens) {
    return predict_rows(costs, config, options, placement, path, combine, tokens).us();
  };
  const auto slots_are_faster = [&](std::int64_t tokens) {
    const double slots = us(RowPath::kPeerMemory, kPerSlot, tokens);
    return slots < us(RowPath::kPeerMemory, kPerRank, tokens) &&
           (!messages || slots < us(*messages, kPerRank, tokens));
  };
  const bool is_open = most > 0 && !options.combine && !options.combine_dtype;
  if (is_open && slots_are_faster(1) && slots_are_faster(most)) return {kPerSlot, most};
  if (!messages) return {kPerRank, most};
  const auto serves = [&](std::int64_t tokens) {
    return us(RowPath::kPeerMemory, kPerRank, tokens) <= us(*messages, kPerRank, tokens);
  };
  return {kPerRank, most_served(most, serves)};
}

RowChoice choose_rows(const RankCosts& costs, const MoeConfig& config, const RankOptions& options,
                      const ExpertPlacement& placement, RowPath messages,
                      const std::function<void()>& connect) {
  RowChoice choice = choose_rows(costs, config, options, placement, messages);
  if (choice.peer_tokens == options.max_tokens_per_rank) return choice;
  try {
    connect();
  } catch (const Error& error) {
    choice = choose_rows(costs, config, options, placement, std::nullopt);
    choice.no_messages = error.what();
  }
  return choice;
}

bool may_send(const RankOptions& options) {
  const Communicator& ranks = *options.communicator;
  return options.lanes == 1 && !ranks.wants_peer_memory() && ranks.backend() != "none";
}

std::string without_peer_memory(const MoeConfig& config, const RankOptions& options,
                                RowPath messages) {
  const ParallelConfig& parallel = config.parallel;
  const bool adds_sums =
      messages == RowPath::kAllgather && parallel.group_size() > 1 && !parallel.sequence_parallel;
  if (config.monolithic) return "monolithic experts would route the rows that nobody fills";
  if (parallel.ep_size == 1 || adds_sums) {
    return "ranks with slices of the same experts, or with the same tokens, add sums";
  }
  if (config.hooks) return "hooks are told whose each row is, and here are rows of nobody";
  if (options.receive_capacity > 0) return "receive_capacity limits rows that are counted";
  if (options.max_tokens_per_rank == 0) return "max_tokens_per_rank is not given";
  if (parallel.num_ranks() > PeerMemory::most_ranks()) {
    return core::format("{} ranks: at most {} can map each other's memory", parallel.num_ranks(),
                        PeerMemory::most_ranks());
  }
  return {};
}

bool leaves_choice(const MoeConfig& config, const RankOptions& options, RowPath messages) {
  if (config.device.is_cpu() || !config.parallel.needs_dispatch()) return false;
  if (config.combine == kPerSlot || !without_peer_memory(config, options, messages).empty()) {
    return false;
  }
  return !options.combine || may_send(options);
}

}  // namespace fusedmoe::layer
