// What a layer on GPUs leaves to predicted times: for how many tokens its rows go through peer
// memory, and what comes back there.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "fusedmoe/simulation.h"

namespace fusedmoe::layer {

/// The rows of such a layer, without its experts: all but tokens_per_rank and num_hosts. The dtype
/// of sums is options.combine_dtype.
SimulatedLayer simulated_rows(const MoeConfig& config, const RankOptions& options,
                              const Preparation& preparation, ExpertPlacement placement);

/// Rows of a forward with fixed sizes, between the GPUs of one host.
struct PredictedRows {
  RowPath path;
  CombineMode combine;
  double dispatch_us, combine_us;
  double quantize_us;  // as in SimulatedStep
  double us() const { return dispatch_us + combine_us; }
};
PredictedRows predict_rows(const RankCosts& costs, const MoeConfig& config,
                           const RankOptions& options, const ExpertPlacement& placement,
                           RowPath path, CombineMode combine, std::int64_t tokens_per_rank);

/// What it takes to quantize the rows of a rank before they travel.
double quantize_us(const RankCosts& costs, const SimulatedLayer& layer);
/// By how much less time the link takes for rows that are quantized than for others, less what it
/// takes to quantize them. Ids are at random.
double saved_by_quantizing(const RankCosts& costs, const SimulatedLayer& layer, std::int64_t topk);
/// Whether the layer leaves it to predicted times if rows that go through peer memory are quantized
/// before they travel: its experts on GPUs would quantize each row by itself, to the same bits.
bool may_travel_quantized(const MoeConfig& config);
/// The fewest tokens with which that saves time; 0: none do.
std::int64_t least_quantized(const RankCosts& costs, const MoeConfig& config,
                             const RankOptions& options, const ExpertPlacement& placement);

/// What such a forward through peer memory saves if the experts begin while rows still come: the
/// link's time for these, less what the experts lose to the few multiprocessors that bring them.
/// Negative: rows had better come first. None: they must, as they are wide, go back per slot, or
/// are quantized by the experts.
std::optional<double> saved_beside_experts(const RankCosts& costs, const MoeConfig& config,
                                           const RankOptions& options,
                                           const ExpertPlacement& placement,
                                           std::int64_t tokens_per_rank);
/// From how many tokens on that saves time; 0: with none. Ranks may differ in it: the others see no
/// difference.
std::int64_t least_beside_experts(const RankCosts& costs, const MoeConfig& config,
                                  const RankOptions& options, const ExpertPlacement& placement);

struct RowChoice {
  CombineMode combine = CombineMode::kPerRank;
  /// Forwards of so many tokens at most go through peer memory, those of more as messages.
  std::int64_t peer_tokens = 0;
  std::string no_messages;  ///< why they serve no forward, though they are predicted to be faster
};
/// Whether some rows may be messages although peer memory could serve: nobody wants that memory in
/// any case, and there is one lane.
bool may_send(const RankOptions& options);
/// Why rows of such a layer on GPUs are messages of this path, whatever GPUs there are; empty: they
/// may go through peer memory.
std::string without_peer_memory(const MoeConfig& config, const RankOptions& options,
                                RowPath messages);
/// Whether a layer, whose rows could be messages of this path, asks what rows cost.
bool leaves_choice(const MoeConfig& config, const RankOptions& options, RowPath messages);
/// For such forwards, of options.max_tokens_per_rank tokens at most. `messages`: the path that they
/// would take; none: rows cannot be messages. The combine mode is chosen where neither `config` nor
/// `options` asks for one: per slot where that is faster for one token and for the most. Rows per
/// slot never become messages, which no graph could hold.
RowChoice choose_rows(const RankCosts& costs, const MoeConfig& config, const RankOptions& options,
                      const ExpertPlacement& placement, std::optional<RowPath> messages);
/// The same, where messages that are chosen need `connect`. If that throws Error, peer memory
/// serves all forwards.
RowChoice choose_rows(const RankCosts& costs, const MoeConfig& config, const RankOptions& options,
                      const ExpertPlacement& placement, RowPath messages,
                      const std::function<void()>& connect);

}  // namespace fusedmoe::layer
