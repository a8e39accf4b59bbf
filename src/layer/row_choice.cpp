#include "layer/row_choice.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/format.h"
#include "fusedmoe/comm.h"
#include "fusedmoe/error.h"
#include "layer/prepared_rows.h"
#include "layer/rank_transports.h"
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

/// The fewest tokens, of at most `most`, with which `each_us` of every token make up for
/// `floor_us`; 0: none do.
std::int64_t fewest_tokens(double floor_us, double each_us, std::int64_t most) {
  if (each_us <= 0 || each_us * static_cast<double>(most) < floor_us) return 0;
  return std::max(std::int64_t{1}, static_cast<std::int64_t>(std::ceil(floor_us / each_us)));
}

}  // namespace

SimulatedLayer simulated_rows(const MoeConfig& config, const RankOptions& options,
                              const Preparation& preparation, ExpertPlacement placement) {
  SimulatedLayer layer;
  layer.placement = std::move(placement);
  const bool can_map = layer.placement.num_ranks() <= PeerMemory::most_ranks();
  if (!config.device.is_cpu() && can_map) layer.path = RowPath::kPeerMemory;
  layer.combine = config.combine;
  const DType returned =
      config.combine == kPerSlot ? DType::kF32 : options.combine_dtype.value_or(config.dtype);
  layer.returned_row_bytes = static_cast<double>(bytes(returned, config.hidden));
  const bool quantizes = config.dispatch_dtype ? *config.dispatch_dtype != config.dtype
                                               : preparation.quant.has_value();
  const auto row_bytes = [&](bool quantized) {
    return static_cast<double>(sent_row_bytes(config, quantized));
  };
  if (config.device.is_cpu()) {  // whose experts read rows quantized anyway
    layer.sent_row_bytes = row_bytes(quantizes);
    return layer;
  }
  layer.sent_row_bytes = row_bytes(false);
  if (quantizes || may_travel_quantized(config)) layer.quantized_row_bytes = row_bytes(true);
  layer.quantizes = quantizes;
  return layer;
}

double quantize_us(const RankCosts& costs, const SimulatedLayer& layer) {
  return costs.quantize.us(static_cast<double>(layer.tokens_per_rank) *
                           (layer.sent_row_bytes + layer.quantized_row_bytes));
}

double saved_by_quantizing(const RankCosts& costs, const SimulatedLayer& layer, std::int64_t topk) {
  SimulatedLayer rows = layer;
  rows.quantized_row_bytes = 0;
  const double unquantized_us = simulate(costs, rows, topk).dispatch_us;
  rows.sent_row_bytes = layer.quantized_row_bytes;
  return unquantized_us - simulate(costs, rows, topk).dispatch_us - quantize_us(costs, layer);
}

bool may_travel_quantized(const MoeConfig& config) {
  if (config.device.is_cpu() || config.hooks || config.dispatch_dtype) return false;
  if (!config.scheme.activations) return false;
  MoeConfig quantized = config;
  quantized.dispatch_dtype = config.scheme.activations->value;
  return static_cast<bool>(supports_dispatch_dtype(quantized));
}

std::int64_t least_quantized(const RankCosts& costs, const MoeConfig& config,
                             const RankOptions& options, const ExpertPlacement& placement) {
  if (!may_travel_quantized(config) || placement.num_ranks() == 1) return 0;
  // What is saved grows by as much with each token, from -floor_us on.
  SimulatedLayer one = simulated_rows(config, options, {}, placement);
  one.tokens_per_rank = 1;
  const double floor_us = costs.quantize.floor_us;
  return fewest_tokens(floor_us, saved_by_quantizing(costs, one, config.topk) + floor_us,
                       options.max_tokens_per_rank);
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
  return {path, combine, step.dispatch_us, step.combine_us, step.quantize_us};
}

std::optional<double> saved_beside_experts(const RankCosts& costs, const MoeConfig& config,
                                           const RankOptions& options,
                                           const ExpertPlacement& placement,
                                           std::int64_t tokens_per_rank) {
  if (config.combine == kPerSlot) return {};
  if (bytes(config.dtype, config.hidden) > RowSources::kMostRowBytes) return {};
  const PredictedRows before = predict_rows(costs, config, options, placement, RowPath::kPeerMemory,
                                            kPerRank, tokens_per_rank);
  const bool quantized = before.quantize_us > 0;
  if (config.scheme.activations && !quantized) return {};
  const double link_us =
      before.dispatch_us - before.quantize_us - costs.peer_memory.dispatch.floor_us;
  const auto rows = static_cast<double>(tokens_per_rank * config.topk);  // of a rank's experts
  return link_us -
         costs.beside_experts.us(rows * static_cast<double>(sent_row_bytes(config, quantized)));
}

std::int64_t least_beside_experts(const RankCosts& costs, const MoeConfig& config,
                                  const RankOptions& options, const ExpertPlacement& placement) {
  MoeConfig quantized = config;
  std::int64_t least = 1;
  if (may_travel_quantized(config)) {
    quantized.dispatch_dtype = config.scheme.activations->value;
    least = least_quantized(costs, config, options, placement);
  }
  const std::optional<double> saved_us =
      saved_beside_experts(costs, quantized, options, placement, 1);
  if (!saved_us || least == 0) return 0;
  // It grows by as much with each token, from -floor_us on.
  const double floor_us = costs.beside_experts.floor_us;
  const std::int64_t fewest =
      fewest_tokens(floor_us, *saved_us + floor_us, options.max_tokens_per_rank);
  return fewest == 0 ? 0 : std::max(fewest, least);
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
  if (!without_peer_memory(config, options, messages).empty()) return false;
  if (may_travel_quantized(config)) return true;
  return config.combine != kPerSlot && (!options.combine || may_send(options));
}

}  // namespace fusedmoe::layer
