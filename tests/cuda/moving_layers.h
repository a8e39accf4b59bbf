// A layer whose experts move between ranks on GPUs: placements, options, inputs.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../inside/watched_runtime.h"
#include "../ranks/same_parts.h"
#include "peer_ranks.h"
#include "testing/random.h"

namespace fusedmoe::testing {

inline constexpr std::int64_t kExperts = 13;

/// Puts each of the 13 experts once, and the first three twice, on `size` ranks, in a random order:
/// 16 places, so `size` is 2, 4 or 8.
inline ExpertPlacement random_placement(int size, std::uint64_t seed) {
  std::vector<std::int32_t> experts, ranks;
  for (std::int32_t i = 0; i < 16; ++i) {
    experts.push_back(i % static_cast<std::int32_t>(kExperts));
    ranks.push_back(i % size);
  }
  Random random(seed);
  for (std::size_t i = experts.size(); i > 1; --i) {
    std::swap(experts[i - 1], experts[static_cast<std::size_t>(random.below(i))]);
  }
  return {kExperts, size, experts, ranks};
}

/// As many experts on each rank as with ExpertPlacement::linear(13, 2).
inline ExpertPlacement other_than_linear() {
  std::vector<std::int32_t> experts, ranks;
  for (std::int32_t e = 0; e < kExperts; ++e) {
    experts.push_back(e);
    ranks.push_back(e < 6 ? 1 : 0);
  }
  return {kExperts, 2, experts, ranks};
}

inline LayerOptions options_on(const std::shared_ptr<Communicator>& communicator,
                               bool batch_invariant, const char* pair = "sm90+all2all") {
  LayerOptions options = options_of(communicator->device(), batch_invariant);
  options.require = pair;
  options.ranks.communicator = communicator;
  options.ranks.max_tokens_per_rank = kTokens;
  return options;
}

inline Tensor input_of(int rank, int step) {
  return random_tensor(DType::kBF16, {tokens_of(rank), kHidden}, 1, 100 * step + rank);
}

/// How many copies a rank makes to bring the experts of other_than_linear(), where a WatchedRuntime
/// counts them.
inline int copies_of_move(const std::vector<std::unique_ptr<MoeLayer>>& layers, int rank) {
  int copies = 0;
  run_ranks(2, [&](int each) {
    WatchedRuntime::calls = {};
    layers[each]->start_move(other_than_linear());
    if (each == rank) copies = WatchedRuntime::calls.copies;
  });
  return copies;
}

/// What a layer of these options holds and computes is what a new one does.
inline void expect_as_made_anew(const MoeLayer& layer, const LayerWeights& weights,
                                LayerOptions options) {
  options.ranks.placement = layer.placement();
  const MoeLayer anew(weights, options);
  expect_same_parts(layer.packed_weights(), anew.packed_weights());
  const Tensor x = input_of(options.ranks.communicator->rank(), 90);
  EXPECT_TRUE(bitwise_equal(forward(layer, x, kTokens), forward(anew, x, kTokens)));
}

}  // namespace fusedmoe::testing
