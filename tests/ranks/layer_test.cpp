// Layers on several ranks, which are threads: what they compute is what one rank computes.
#include <gtest/gtest.h>

#include <cstdlib>

#include "error_text.h"
#include "fusedmoe/quant.h"
#include "rank_layers.h"

namespace fusedmoe::layer_test {

using testing::bitwise_equal;
using testing::Case;
using testing::communicators_without_data;
using testing::compare;
using testing::error_text;
using testing::forward_exactly;
using testing::has;
using testing::kPatient;
using testing::LayerSpec;
using testing::make_communicators;
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
  const auto comms = make_communicators(how.size, how.lend, {kPatient}, how.cut);
  run_ranks(how.size, [&](int rank) {
    const MoeLayer layer(weights, rank_options(how, dtype, kTokens, comms[rank]));
    EXPECT_EQ(layer.selection().prepare_finalize->name(), how.transport);
    for (const std::int64_t tokens : {tokens_of(rank), std::int64_t{rank == 0 ? 2 : 0}}) {
      const Tensor x = hidden_states_of(rank, tokens, hidden, dtype);
      const Tensor output = forward_exactly(how, layer, x, kTokens);
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

class Transports : public ::testing::TestWithParam<testing::Way> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Transports, ::testing::ValuesIn(testing::kWays), testing::name_of);

TEST_P(Transports, EveryNumberOfRanksGivesTheBitsOfOne) {
  const LayerWeights weights = make_layer_weights({small_case()});
  for (const int size : {2, 3, 4, 7}) {
    RankCase how{.size = size,
                 .transport = GetParam().transport,
                 .lend = GetParam().lend,
                 .batch_invariant = true};
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
    RankCase how{.size = 3, .transport = GetParam().transport, .lend = GetParam().lend};
    expect_as_one_rank(how, weights, DType::kBF16, false);
    if (batch_dependent(scheme)) continue;
    how.batch_invariant = true;
    expect_as_one_rank(how, weights, DType::kBF16, true);
  }
}

/// As over MPI: rows are sent from where they lie.
TEST(RankLayersTest, RowsThatAreNotPackedGiveTheSameBits) {
  for (const char* name : {"bf16", "fp8_block", "fp8_tensor", "nvfp4"}) {
    SCOPED_TRACE(name);
    const QuantScheme scheme = parse_scheme(name);
    const LayerWeights weights = make_layer_weights({small_case(scheme)});
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      RankCase how{.size = 4, .transport = transport, .lend = false, .cut = true};
      expect_as_one_rank(how, weights, DType::kBF16, false);
      how.fixed_sizes = true;
      expect_as_one_rank(how, weights, DType::kBF16, false);
      how.fixed_sizes = false;
      how.batch_invariant = !batch_dependent(scheme);
      expect_as_one_rank(how, weights, DType::kBF16, how.batch_invariant);
    }
  }
  // Rows of the caller's that do not follow each other.
  const LayerWeights weights = make_layer_weights({small_case()});
  const RankCase how{.size = 2, .lend = false, .cut = true, .batch_invariant = true};
  const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
  const auto comms = make_communicators(2, how.lend, {kPatient}, how.cut);
  run_ranks(2, [&](int rank) {
    const MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, comms[rank]));
    const Tensor wide = hidden_states_of(rank, kTokens, 160, DType::kBF16);
    const TensorView x = wide.slice(1, 16, 16 + 128);
    EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), forward_exactly(alone, x, 0)));
  });
}

TEST_P(Transports, ZeroExpertsStayAtHome) {
  const LayerWeights weights = make_layer_weights({.experts = small_case(), .zero_experts = 4});
  const RankCase how{.size = 3,
                     .transport = GetParam().transport,
                     .lend = GetParam().lend,
                     .batch_invariant = true};
  expect_as_one_rank(how, weights, DType::kBF16, true);
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
                   .transport = GetParam().transport,
                   .lend = GetParam().lend,
                   .placement = placement,
                   .batch_invariant = true,
                   .replica_choice = choice};
      expect_as_one_rank(how, weights, DType::kF32, true);
      how.batch_invariant = false;
      expect_as_one_rank(how, weights, DType::kBF16, false);
    }
    RankCase fixed{.size = 3,
                   .transport = GetParam().transport,
                   .lend = GetParam().lend,
                   .placement = placement,
                   .fixed_sizes = true};
    expect_as_one_rank(fixed, weights, DType::kBF16, false);
  }
}

TEST_P(Transports, SharedExpertsAndTheReference) {
  LayerSpec spec{small_case()};
  spec.shared_experts = spec.shared_gate = true;
  RankCase how{.size = 2,
               .transport = GetParam().transport,
               .lend = GetParam().lend,
               .batch_invariant = true};
  expect_as_one_rank(how, make_layer_weights(spec), DType::kBF16, true);
  how.experts = "reference";
  expect_as_one_rank(how, make_layer_weights(spec), DType::kBF16, false);
}

TEST_P(Transports, WeightsOnTheInput) {
  Case spec = small_case();
  spec.topk = 1;
  spec.weight_on_input = true;
  RankCase how{.size = 3,
               .transport = GetParam().transport,
               .lend = GetParam().lend,
               .batch_invariant = true};
  expect_as_one_rank(how, make_layer_weights({spec}), DType::kBF16, true);
}

TEST_P(Transports, DuplicatesNegativeIdsAndOneRankForAll) {
  const LayerWeights weights = make_layer_weights({small_case()});
  const std::vector<std::vector<std::int32_t>> rows = {{0, 0, 0}, {-1, -1, -1}, {6, -1, 6},
                                                       {5, 6, 5}, {0, 1, 2},    {2, -1, 0}};
  RankCase how{.size = 3,
               .transport = GetParam().transport,
               .lend = GetParam().lend,
               .batch_invariant = true};
  const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
  const auto comms = make_communicators(3, how.lend, {kPatient});
  run_ranks(3, [&](int rank) {
    const MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, comms[rank]));
    for (const auto& row : rows) {
      const std::int64_t tokens = rank + 1;
      const Tensor x = hidden_states_of(rank, tokens, 128, DType::kBF16);
      const Tensor ids = Tensor::empty({tokens, 3}, DType::kI32);
      for (std::int64_t i = 0; i < 3 * tokens; ++i) ids.as<std::int32_t>()[i] = row[i % 3];
      const Tensor factors = random_tensor(DType::kF32, {tokens, 3}, 1, 9);
      const Routing routing{ids, factors};
      EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens, &routing),
                                forward_exactly(alone, x, 0, &routing)));
    }
  });
}

/// Random sizes, placements and ids. The bits are those of one rank.
/// FUSEDMOE_RANK_CASES: how many; 10000 take a minute.
TEST(RankLayersTest, RandomConfigurations) {
  testing::Random random(17);
  const char* cases = std::getenv("FUSEDMOE_RANK_CASES");
  for (int round = 0; round < (cases ? std::atoi(cases) : 60); ++round) {
    SCOPED_TRACE(round);
    const int size = static_cast<int>(2 + random.below(4));
    Case spec;
    spec.num_experts = 1 + random.below(12);
    spec.topk = 1 + random.below(std::min<std::int64_t>(spec.num_experts, 5));
    spec.hidden = 16 * (1 + random.below(4)) + random.below(3);
    spec.intermediate = 8 * (1 + random.below(4));
    spec.bias = random.below(2) == 0;
    std::vector<std::int32_t> logical, ranks;
    for (std::int64_t p = 0; p < spec.num_experts + random.below(4); ++p) {
      logical.push_back(static_cast<std::int32_t>(p % spec.num_experts));
      ranks.push_back(static_cast<std::int32_t>(random.below(size)));
    }
    RankCase how{.size = size,
                 .transport = random.below(2) == 0 ? "all2all" : "allgather_reducescatter",
                 .lend = round % 3 == 0,
                 .cut = round % 3 == 1,
                 .placement = ExpertPlacement(spec.num_experts, size, logical, ranks),
                 .combine = CombineMode::kPerSlot,
                 .batch_invariant = true};
    if (random.below(2) == 0) how.replica_choice = ReplicaChoice::kNearest;
    const LayerWeights weights = make_layer_weights({spec});
    const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
    std::vector<std::vector<Tensor>> x(3), ids(3), factors(3);
    for (int step = 0; step < 3; ++step) {
      for (int rank = 0; rank < size; ++rank) {
        const std::int64_t tokens = random.below(6);
        x[step].push_back(hidden_states_of(rank + step, tokens, spec.hidden, DType::kBF16));
        factors[step].push_back(random_tensor(DType::kF32, {tokens, spec.topk}, 1, round));
        ids[step].push_back(Tensor::empty({tokens, spec.topk}, DType::kI32));
        for (std::int64_t i = 0; i < tokens * spec.topk; ++i) {
          ids[step].back().as<std::int32_t>()[i] =
              static_cast<std::int32_t>(random.below(spec.num_experts + 1) - 1);
        }
      }
    }
    const auto comms = make_communicators(size, how.lend, {kPatient}, how.cut);
    run_ranks(size, [&](int rank) {
      const MoeLayer layer(weights, rank_options(how, DType::kBF16, 5, comms[rank]));
      for (int step = 0; step < 3; ++step) {
        const Routing routing{ids[step][rank], factors[step][rank]};
        EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x[step][rank], 5, &routing),
                                  forward_exactly(alone, x[step][rank], 0, &routing)));
      }
    });
  }
}

/// Deployments in which ranks share slices, experts, or tokens.
class Deployments : public ::testing::TestWithParam<bool> {};  // whether ranks lend
INSTANTIATE_TEST_SUITE_P(Ranks, Deployments, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "lending" : "messages");
});

TEST_P(Deployments, EachGivesTheOutputOfOneRank) {
  const struct {
    const char* transport;
    Deployment deployment;
  } rows[] = {
      {"no_ep", {.tp_size = 3}},
      {"no_ep", {.tp_size = 3, .expert_parallel = true}},
      {"allgather_reducescatter", {.dp_size = 3}},
      {"allgather_reducescatter", {.tp_size = 2, .dp_size = 2}},
      {"allgather_reducescatter", {.tp_size = 2, .dp_size = 2, .expert_parallel = true}},
      {"allgather_reducescatter",
       {.tp_size = 2, .dp_size = 2, .expert_parallel = true, .sequence_parallel = true}},
      {"all2all", {.tp_size = 2, .dp_size = 2, .expert_parallel = true}},
      {"all2all", {.tp_size = 2, .dp_size = 2, .expert_parallel = true, .sequence_parallel = true}},
  };
  Case spec = small_case(parse_scheme("mxfp4_w4a16"));
  spec.bias = true;
  const LayerWeights weights = make_layer_weights({spec});
  for (const auto& row : rows) {
    SCOPED_TRACE(std::string(row.transport) + " tp " + std::to_string(row.deployment.tp_size) +
                 " dp " + std::to_string(row.deployment.dp_size));
    const int size = row.deployment.tp_size * row.deployment.dp_size;
    RankCase how{
        .size = size, .transport = row.transport, .lend = GetParam(), .deployment = row.deployment};
    const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
    const auto comms = make_communicators(size, how.lend, {kPatient});
    run_ranks(size, [&](int rank) {
      const LayerOptions options = rank_options(how, DType::kBF16, kTokens, comms[rank]);
      const MoeLayer layer(local_weights(weights, options.parallel), options);
      // Ranks of one data-parallel group have the same tokens, or each its own.
      const int owner = row.deployment.sequence_parallel ? rank : rank / row.deployment.tp_size;
      for (const std::int64_t tokens : {std::int64_t{5}, std::int64_t{1}, std::int64_t{0}}) {
        const Tensor x = hidden_states_of(owner, tokens, 128, DType::kBF16);
        EXPECT_LE(compare(forward_exactly(layer, x, kTokens), forward_exactly(alone, x, 0))
                      .max_norm_relative,
                  2e-2)
            << "rank " << rank;
      }
    });
  }
}

TEST(RankLayersTest, SlicesOfEverySchemeAddUp) {
  for (const char* name : {"bf16", "mxfp4_w4a16", "fp8_block", "fp8_channel_token", "nvfp4", "w4a8",
                           "int4_g32_zp", "int8_channel", "mxfp8"}) {
    SCOPED_TRACE(name);
    Case spec = small_case(parse_scheme(name));
    spec.intermediate = 3 * slice_unit(spec.scheme);
    if (spec.intermediate < 48) spec.intermediate = 48;
    spec.bias = true;
    const LayerWeights weights = make_layer_weights({spec});
    RankCase how{.size = 2, .transport = "no_ep", .deployment = Deployment{.tp_size = 2}};
    const MoeLayer alone(weights, one_rank_options(how, DType::kF32));
    const auto comms = make_communicators(2, how.lend, {kPatient});
    run_ranks(2, [&](int rank) {
      const LayerOptions options = rank_options(how, DType::kF32, 0, comms[rank]);
      const MoeLayer layer(local_weights(weights, options.parallel), options);
      const Tensor x = hidden_states_of(0, 5, 128, DType::kF32);
      // Activations with a scale a token are quantized in slices, with other scales.
      EXPECT_LE(
          compare(forward_exactly(layer, x, 0), forward_exactly(alone, x, 0)).max_norm_relative,
          5e-2);
    });
  }
}

/// It says so when it is made.
TEST(RankLayersTest, WhatNeedsMessagesNeedsADataPlane) {
  const LayerWeights weights = make_layer_weights({small_case()});
  for (const char* transport : {"all2all", "allgather_reducescatter", "no_ep"}) {
    const bool sums = std::string(transport) == "no_ep";
    RankCase how{.size = 2, .transport = transport};
    if (sums) how.deployment = Deployment{.tp_size = 2, .expert_parallel = true};
    const auto comms = communicators_without_data(2);
    run_ranks(2, [&](int rank) {
      const std::string error = error_text([&] {
        MoeLayer(weights, rank_options(how, DType::kBF16, sums ? 0 : kTokens, comms[rank]));
      });
      EXPECT_TRUE(has(error, sums ? "communicator: was without a data plane; must be one with it, "
                                    "for sums of ranks with the same tokens"
                                  : "communicator: was without a data plane; must be one with it, "
                                    "for rows that travel"))
          << error;
    });
  }
}

TEST(RankLayersTest, ChunksAndCapacities) {
  constexpr std::int64_t kMany = 50;
  const LayerWeights weights = make_layer_weights({small_case()});
  RankCase how{.size = 2, .batch_invariant = true};
  const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
  const auto comms = make_communicators(2, how.lend, {kPatient});
  run_ranks(2, [&](int rank) {
    LayerOptions options = rank_options(how, DType::kBF16, kMany, comms[rank]);
    const std::size_t whole = MoeLayer(weights, options).workspace_bytes(kMany);
    options.max_workspace_bytes = whole / 4 * 3;
    const MoeLayer layer(weights, options);
    EXPECT_LE(layer.workspace_bytes(kMany), options.max_workspace_bytes);
    const Tensor x = hidden_states_of(rank, rank == 0 ? kMany : 1, 128, DType::kBF16);
    EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kMany), forward_exactly(alone, x, 0)));
    EXPECT_TRUE(bitwise_equal(layer.forward(x), alone.forward(x)));
  });
}

}  // namespace fusedmoe::layer_test
