// Experts that route by themselves, across ranks: rows travel with router logits instead of ids.
#include <algorithm>

#include "fusedmoe/quant.h"
#include "rank_layers.h"

namespace fusedmoe::monolithic_test {

using testing::bitwise_equal;
using testing::Case;
using testing::compare;
using testing::errors_of_ranks;
using testing::forward_exactly;
using testing::kPatient;
using testing::make_communicators;
using testing::make_layer_weights;
using testing::one_rank_options;
using testing::random_tensor;
using testing::rank_options;
using testing::RankCase;
using testing::run_ranks;

constexpr std::int64_t kTokens = 6, kHidden = 128, kExperts = 7, kTopk = 3;

LayerWeights weights_of(const char* scheme) {
  Case spec;
  spec.num_experts = kExperts;
  spec.topk = kTopk;
  spec.hidden = kHidden;
  spec.intermediate = 3 * kHidden;  // a slice for each rank
  spec.scheme = parse_scheme(scheme);
  return make_layer_weights({.experts = spec, .shared_experts = true});
}

/// A forward with all its results.
struct Results {
  Tensor output, logits, ids, weights, load;
  Results(const MoeLayer& layer, const Tensor& x, std::int64_t most)
      : output(Tensor::empty(x.shape(), x.dtype())),
        logits(Tensor::empty({x.size(0), kExperts}, DType::kF32)),
        ids(Tensor::empty({x.size(0), kTopk}, DType::kI32)),
        weights(Tensor::empty({x.size(0), kTopk}, DType::kF32)),
        load(Tensor::empty({kExperts}, DType::kI32)) {
    const testing::Scratch scratch(layer, std::max(most, x.size(0)));
    ForwardOptions options;
    options.router_logits = logits;
    options.topk_ids = ids;
    options.topk_weights = weights;
    options.expert_load = load;
    options.max_tokens = most;
    layer.forward(x, output, scratch.workspace, options);
  }
};

struct Way {
  bool lend, cut;
};
class Monolithic : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(
    Ranks, Monolithic, ::testing::Values(Way{true, false}, Way{false, false}, Way{false, true}),
    [](const auto& info) {
      return std::string(info.param.lend ? "lending" : info.param.cut ? "sequences" : "messages");
    });

/// Each rank rounds its part of a sum to bf16 before the parts are added; a layer on one rank does
/// not. One rounding changes a part by up to 2^-9 of it. Parts may cancel, so the sum may be
/// several times smaller than they are: 2e-2 of it is ten such roundings.
constexpr double kTolerance = 2e-2;
/// With one activation scale for the tensor, another batch has another scale: codes of E4M3, which
/// has 3 bits behind the point, differ by up to one step, 1/16, in both GEMMs.
constexpr double kToleranceOfOtherScales = 0.1;

/// Each rank's results are those of its own tokens.
TEST_P(Monolithic, EachDeploymentGivesTheResultsOfOneRank) {
  const Deployment deployments[] = {
      {.dp_size = 3, .expert_parallel = true},
      {.dp_size = 3},
      {.tp_size = 2, .dp_size = 2, .expert_parallel = true},
      {.tp_size = 2, .dp_size = 2, .expert_parallel = true, .sequence_parallel = true},
  };
  for (const char* scheme : {"bf16", "fp8_block", "fp8_tensor"}) {
    const LayerWeights weights = weights_of(scheme);
    for (const Deployment& deployment : deployments) {
      SCOPED_TRACE(std::string(scheme) + " tp " + std::to_string(deployment.tp_size) + " dp " +
                   std::to_string(deployment.dp_size));
      const int size = deployment.tp_size * deployment.dp_size;
      const RankCase how{.size = size,
                         .transport = "allgather_reducescatter",
                         .monolithic = true,
                         .deployment = deployment};
      const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
      const auto comms = make_communicators(size, GetParam().lend, {kPatient}, GetParam().cut);
      run_ranks(size, [&](int rank) {
        const LayerOptions options = rank_options(how, DType::kBF16, kTokens, comms[rank]);
        const MoeLayer layer(local_weights(weights, options.parallel), options);
        const int owner = deployment.sequence_parallel ? rank : rank / deployment.tp_size;
        for (const std::int64_t tokens :
             {owner == 1 ? std::int64_t{0} : kTokens - owner, kTokens}) {
          const Tensor x = random_tensor(DType::kBF16, {tokens, kHidden}, 1, 60 + owner);
          const Results actual(layer, x, kTokens), expected(alone, x, 0);
          const double tolerance =
              batch_dependent(weights.experts.scheme) ? kToleranceOfOtherScales : kTolerance;
          EXPECT_LE(compare(actual.output, expected.output).max_norm_relative, tolerance) << rank;
          EXPECT_TRUE(bitwise_equal(actual.logits, expected.logits)) << rank;
          EXPECT_TRUE(bitwise_equal(actual.ids, expected.ids)) << rank;
          EXPECT_TRUE(bitwise_equal(actual.weights, expected.weights)) << rank;
          EXPECT_TRUE(bitwise_equal(actual.load, expected.load)) << rank;
          // The same bits as with ids that travel.
          LayerOptions modular = options;
          modular.monolithic = false;
          const MoeLayer other(local_weights(weights, options.parallel), modular);
          EXPECT_TRUE(bitwise_equal(forward_exactly(other, x, kTokens), actual.output)) << rank;
        }
      });
    }
  }
}

/// Only the first copy of an expert computes; ranks without experts route their own tokens, too.
TEST_P(Monolithic, CopiesAndRanksWithoutExperts) {
  const LayerWeights weights = weights_of("bf16");
  const ExpertPlacement placements[] = {
      ExpertPlacement::linear(kExperts, 3, 5),
      ExpertPlacement(kExperts, 3, {6, 5, 4, 3, 2, 1, 0}, {2, 2, 0, 2, 0, 2, 2}),
      ExpertPlacement(kExperts, 3, {0, 1, 2, 3, 4, 5, 6, 0, 0}, {0, 0, 0, 2, 0, 2, 0, 2, 1}),
  };
  for (const ExpertPlacement& placement : placements) {
    SCOPED_TRACE(placement.json());
    const RankCase how{.size = 3,
                       .transport = "allgather_reducescatter",
                       .placement = placement,
                       .monolithic = true};
    const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
    const auto comms = make_communicators(3, GetParam().lend, {kPatient}, GetParam().cut);
    run_ranks(3, [&](int rank) {
      const MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, comms[rank]));
      const Tensor x = random_tensor(DType::kBF16, {kTokens - rank, kHidden}, 1, 60 + rank);
      const Results actual(layer, x, kTokens), expected(alone, x, 0);
      EXPECT_LE(compare(actual.output, expected.output).max_norm_relative, kTolerance) << rank;
      EXPECT_TRUE(bitwise_equal(actual.ids, expected.ids)) << rank;
      EXPECT_TRUE(bitwise_equal(actual.load, expected.load)) << rank;
    });
  }
}

TEST_P(Monolithic, RowsThatDoNotFitAreDropped) {
  LayerWeights weights = weights_of("bf16");
  weights.shared_experts.reset();
  const RankCase how{.size = 3, .transport = "allgather_reducescatter", .monolithic = true};
  const auto comms = make_communicators(3, GetParam().lend, {kPatient}, GetParam().cut);
  const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
  run_ranks(3, [&](int rank) {
    LayerOptions options = rank_options(how, DType::kBF16, kTokens, comms[rank]);
    options.ranks.receive_capacity = kTokens + 2;
    options.ranks.drop_rows = true;
    const MoeLayer layer(weights, options);
    const Tensor x = random_tensor(DType::kBF16, {kTokens, kHidden}, 1, 60 + rank);
    std::int32_t dropped = 77;
    const Tensor output = forward_exactly(layer, x, kTokens, nullptr, &dropped);
    // All of rank 0's, two of rank 1's, none of rank 2's.
    const std::int64_t kept[] = {kTokens, 2, 0};
    EXPECT_EQ(dropped, 3 * (kTokens - kept[rank]));
    const Tensor expected = forward_exactly(alone, x, 0);
    std::fill_n(expected.as<std::uint16_t>() + kept[rank] * kHidden,
                (kTokens - kept[rank]) * kHidden, std::uint16_t{0});
    EXPECT_LE(compare(output, expected).max_norm_relative, kTolerance) << rank;
  });
}

TEST(MonolithicTest, TheTransportThatBringsLogitsIsChosen) {
  const auto comms = make_communicators(2, true, {kPatient});
  run_ranks(2, [&](int rank) {
    LayerOptions options = rank_options({}, DType::kBF16, kTokens, comms[rank]);
    options.require.clear();
    const LayerWeights weights = weights_of("bf16");
    EXPECT_EQ(MoeLayer(weights, options).selection().prepare_finalize, &all2all());
    options.monolithic = true;
    EXPECT_EQ(MoeLayer(weights, options).selection().prepare_finalize, &allgather_reducescatter());
  });
}

TEST(MonolithicTest, WhatCannotBeIsRefused) {
  const struct {
    const char* error;
    void (*change)(RankCase&);
  } rows[] = {
      {"cpu+all2all cannot serve", [](RankCase& how) { how.transport = "all2all"; }},
      {"per_slot needs a row for each slot",
       [](RankCase& how) { how.combine = CombineMode::kPerSlot; }},
      {"fixed_sizes cannot be used with monolithic experts",
       [](RankCase& how) { how.fixed_sizes = true; }},
  };
  for (const auto& row : rows) {
    RankCase how{.size = 2, .transport = "allgather_reducescatter", .monolithic = true};
    row.change(how);
    const auto comms = make_communicators(2, true, {kPatient});
    const auto errors = errors_of_ranks(2, [&](int rank) {
      const MoeLayer layer(weights_of("bf16"), rank_options(how, DType::kBF16, 4, comms[rank]));
      forward_exactly(how, layer, testing::make_hidden_states(DType::kBF16, 3, 128), 4);
    });
    for (const std::string& error : errors) {
      EXPECT_NE(error.find(row.error), std::string::npos) << error;
    }
  }
}

}  // namespace fusedmoe::monolithic_test
