// Layers on several ranks, which are threads: what they compute is what one rank computes.
#include <gtest/gtest.h>

#include "fusedmoe/quant.h"
#include "rank_layers.h"

namespace fusedmoe {
namespace {

using testing::bitwise_equal;
using testing::Case;
using testing::compare;
using testing::forward_exactly;
using testing::kPatient;
using testing::LayerSpec;
using testing::make_layer_weights;
using testing::one_rank_options;
using testing::random_tensor;
using testing::rank_options;
using testing::RankCase;
using testing::run_ranks;

constexpr std::int64_t kTokens = 9;

/// Rank r has r % 3 * 4 + 1 tokens, but rank 1 has none.
std::int64_t tokens_of(int rank) {
  return rank == 1 ? 0 : std::min<std::int64_t>(kTokens, rank % 3 * 4 + 1);
}

Tensor hidden_states_of(int rank, std::int64_t tokens, std::int64_t hidden, DType dtype) {
  return random_tensor(dtype, {tokens, hidden}, 1, 500 + static_cast<std::uint64_t>(rank));
}

/// Every rank's output against one rank's: equal bits, or within what another order of sums does.
void expect_as_one_rank(const RankCase& how, const LayerWeights& weights, DType dtype,
                        bool equal_bits) {
  const std::int64_t hidden = weights.experts.hidden;
  const MoeLayer alone(weights, one_rank_options(how, dtype));
  const auto comms = make_thread_communicators(how.size, {kPatient});
  run_ranks(how.size, [&](int rank) {
    const MoeLayer layer(weights, rank_options(how, dtype, kTokens, comms[rank]));
    EXPECT_EQ(layer.selection().prepare_finalize->name(), how.transport);
    for (const std::int64_t tokens : {tokens_of(rank), std::int64_t{rank == 0 ? 2 : 0}}) {
      const Tensor x = hidden_states_of(rank, tokens, hidden, dtype);
      const Tensor output = forward_exactly(layer, x, kTokens);
      const Tensor expected = forward_exactly(alone, x, 0);
      if (equal_bits) {
        EXPECT_TRUE(bitwise_equal(output, expected)) << "rank " << rank;
      } else {
        // Sums of bf16 parts; with one scale for all activated rows of a rank, other codes too.
        const double tolerance = batch_dependent(weights.experts.scheme) ? 0.1 : 2e-2;
        EXPECT_LE(compare(output, expected).max_norm_relative, tolerance) << "rank " << rank;
      }
    }
  });
}

Case small_case(const QuantScheme& scheme = schemes::unquantized(DType::kBF16)) {
  Case spec;
  spec.num_experts = 7;  // uneven on every number of ranks but 7
  spec.topk = 3;
  spec.hidden = 128;
  spec.intermediate = 128;
  spec.scheme = scheme;
  return spec;
}

class Transports : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Transports, ::testing::Values("all2all", "allgather_reducescatter"),
                         [](const auto& info) { return info.param; });

TEST_P(Transports, EveryNumberOfRanksGivesTheBitsOfOne) {
  const LayerWeights weights = make_layer_weights({small_case()});
  for (const int size : {2, 3, 4, 7}) {
    RankCase how{.size = size, .transport = GetParam(), .batch_invariant = true};
    expect_as_one_rank(how, weights, DType::kBF16, true);
    how.batch_invariant = false;
    expect_as_one_rank(how, weights, DType::kBF16, false);
    how.fixed_sizes = true;
    expect_as_one_rank(how, weights, DType::kBF16, false);
  }
}

TEST_P(Transports, EverySchemeTravels) {
  for (const char* name :
       {"mxfp4_w4a16", "fp8_block", "nvfp4", "w4a8", "fp8_tensor", "fp8_tensor_static",
        "fp8_channel_token", "mxfp8", "mxfp4_mxfp8", "int4_g32_zp", "int8_w8a8"}) {
    SCOPED_TRACE(name);
    const QuantScheme scheme = parse_scheme(name);
    const LayerWeights weights = make_layer_weights({small_case(scheme)});
    RankCase how{.size = 3, .transport = GetParam()};
    expect_as_one_rank(how, weights, DType::kBF16, false);
    if (batch_dependent(scheme)) continue;
    how.batch_invariant = true;
    expect_as_one_rank(how, weights, DType::kBF16, true);
  }
}

TEST_P(Transports, PlacementsAndReplicasChangeNoBit) {
  const LayerWeights weights = make_layer_weights({small_case()});
  const ExpertPlacement placements[] = {
      ExpertPlacement::round_robin(7, 3),
      ExpertPlacement::linear(7, 3, 2),
      ExpertPlacement::linear(7, 3, 14),  // every expert three times
      ExpertPlacement(7, 3, {6, 5, 4, 3, 2, 1, 0}, {2, 2, 2, 2, 2, 2, 2}),  // ranks without any
      ExpertPlacement(7, 3, {0, 1, 2, 3, 4, 5, 6, 0, 0}, {0, 2, 0, 2, 0, 2, 0, 2, 0}),
  };
  for (const ExpertPlacement& placement : placements) {
    SCOPED_TRACE(placement.json());
    for (const ReplicaChoice choice : {ReplicaChoice::kHash, ReplicaChoice::kNearest}) {
      RankCase how{.size = 3,
                   .transport = GetParam(),
                   .placement = placement,
                   .batch_invariant = true,
                   .replica_choice = choice};
      expect_as_one_rank(how, weights, DType::kF32, true);
      how.batch_invariant = false;
      expect_as_one_rank(how, weights, DType::kBF16, false);
    }
    RankCase fixed{.size = 3, .transport = GetParam(), .placement = placement, .fixed_sizes = true};
    expect_as_one_rank(fixed, weights, DType::kBF16, false);
  }
}

TEST_P(Transports, SharedExpertsAndTheReference) {
  LayerSpec spec{small_case()};
  spec.shared_experts = spec.shared_gate = true;
  RankCase how{.size = 2, .transport = GetParam(), .batch_invariant = true};
  expect_as_one_rank(how, make_layer_weights(spec), DType::kBF16, true);
  how.experts = "reference";
  expect_as_one_rank(how, make_layer_weights(spec), DType::kBF16, false);
}

TEST_P(Transports, WeightsOnTheInput) {
  Case spec = small_case();
  spec.topk = 1;
  spec.weight_on_input = true;
  RankCase how{.size = 3, .transport = GetParam(), .batch_invariant = true};
  expect_as_one_rank(how, make_layer_weights({spec}), DType::kBF16, true);
}

}  // namespace
}  // namespace fusedmoe
