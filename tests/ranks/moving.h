// Layers whose experts move, for the tests of moves and of survivors.
#pragma once

#include "error_text.h"
#include "rank_layers.h"
#include "same_parts.h"

namespace fusedmoe::testing {

inline constexpr std::int64_t kTokens = 5, kNumExperts = 6;

/// Any order of the experts, and of copies of the first two, on ranks of three, three and two.
inline ExpertPlacement random_placement(std::uint64_t seed) {
  std::vector<std::int32_t> experts{0, 1, 2, 3, 4, 5, 0, 1};
  Random random(seed);
  for (std::size_t i = experts.size(); i > 1; --i) {
    std::swap(experts[i - 1], experts[static_cast<std::size_t>(random.below(i))]);
  }
  return {kNumExperts, 3, experts, {0, 1, 2, 0, 1, 2, 0, 1}};
}

inline Tensor hidden_states_of(int rank, std::int64_t tokens) {
  return random_tensor(DType::kBF16, {tokens, 64}, 1, 30 + static_cast<std::uint64_t>(rank));
}

/// What a layer of these options holds and computes is what a new one does.
inline void expect_as_made_anew(const MoeLayer& layer, const LayerWeights& weights,
                                LayerOptions options) {
  options.ranks.placement = layer.placement();
  const MoeLayer anew(weights, options);
  expect_same_parts(layer.packed_weights(), anew.packed_weights());
  const Tensor x = hidden_states_of(options.ranks.communicator->rank(), 4);
  EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), forward_exactly(anew, x, kTokens)));
}

}  // namespace fusedmoe::testing
