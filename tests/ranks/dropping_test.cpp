// RankOptions::drop_rows: rows that do not fit into the receive buffers stay at home.
#include "dropping_ranks.h"

#include <cstdlib>
#include <numeric>

namespace fusedmoe::dropping_test {

using testing::bitwise_equal;
using testing::Dropped;
using testing::DropProblem;
using testing::errors_of_ranks;
using testing::forward_exactly;
using testing::kPatient;
using testing::make_communicators;
using testing::make_layer_weights;
using testing::one_rank_options;
using testing::run_ranks;

/// FUSEDMOE_RANK_CASES: how many; 10000 take a minute.
TEST(DroppingTest, RandomProblemsLoseTheRowsThatTheRuleNames) {
  const char* cases = std::getenv("FUSEDMOE_RANK_CASES");
  std::int32_t dropped = 0;
  for (int round = 0; round < (cases ? std::atoi(cases) : 120); ++round) {
    SCOPED_TRACE(round);
    const DropProblem problem(2 + round % 4, 40 + static_cast<std::uint64_t>(round));
    const Dropped expected = drop_rows(problem.how, problem.ids, problem.capacity);
    dropped += std::accumulate(expected.rows.begin(), expected.rows.end(), 0);
    const int way = round % 3;
    const auto comms = make_communicators(problem.how.size, way == 0, {kPatient}, way == 1);
    run_ranks(problem.how.size, [&](int rank) { problem.expect_on_rank(comms[rank]); });
  }
  EXPECT_GT(dropped, 100);
}

/// Bits and all are those of a layer without a capacity; one row less, and one is dropped.
TEST(DroppingTest, ACapacityThatJustFitsDropsNothing) {
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    DropProblem problem(3, seed);
    problem.capacity = drop_rows(problem.how, problem.ids, 0).most_received;
    if (problem.capacity < 2) continue;
    const LayerWeights weights = make_layer_weights({problem.spec});
    const auto comms = make_communicators(3, seed % 2 == 0, {kPatient});
    std::vector<std::int32_t> dropped(3, 77), dropped_of_fewer(3, 77);
    run_ranks(3, [&](int rank) {
      const testing::RankCase& how = problem.how;
      const MoeLayer unlimited(weights,
                               rank_options(how, DType::kF32, problem.max_tokens, comms[rank]));
      LayerOptions options = problem.options(comms[rank]);
      const MoeLayer layer(weights, options);
      --options.ranks.receive_capacity;
      const MoeLayer fewer(weights, options);
      const Routing routing{problem.ids[rank], problem.factors[rank]};
      const auto forward = [&](const MoeLayer& of, std::int32_t* count) {
        return forward_exactly(of, problem.x[rank], problem.max_tokens, &routing, count);
      };
      std::int32_t none = 77;
      EXPECT_TRUE(bitwise_equal(forward(layer, &dropped[rank]), forward(unlimited, &none)));
      EXPECT_EQ(none, 0);
      forward(fewer, &dropped_of_fewer[rank]);
    });
    EXPECT_EQ(dropped, std::vector<std::int32_t>(3, 0));
    EXPECT_GE(std::accumulate(dropped_of_fewer.begin(), dropped_of_fewer.end(), 0), 1);
  }
}

/// The buffers are as small as the capacity, and so is the workspace.
TEST(DroppingTest, WorkspaceFollowsTheCapacity) {
  DropProblem problem(3, 1);
  problem.how.combine = CombineMode::kPerRank;
  const auto comms = make_communicators(3, false, {kPatient});
  run_ranks(3, [&](int rank) {
    const LayerWeights weights = make_layer_weights({problem.spec});
    LayerOptions options = problem.options(comms[rank]);
    options.ranks.max_tokens_per_rank = 1000;
    options.ranks.receive_capacity = 300;
    const MoeLayer small(weights, options);
    options.ranks.receive_capacity = 3000;
    const MoeLayer large(weights, options);
    const auto row_bytes = static_cast<std::size_t>(4 * problem.spec.hidden);
    EXPECT_GE(large.workspace_bytes(1000) - small.workspace_bytes(1000), 2700 * row_bytes);
    EXPECT_EQ(large.workspace_bytes(1000, true), small.workspace_bytes(1000, true));
  });
}

/// Forwards with fixed sizes have room for every row.
TEST(DroppingTest, FixedSizesDropNothing) {
  for (const bool lend : {true, false}) {
    DropProblem problem(3, 5);
    problem.how.combine = CombineMode::kPerRank;
    problem.capacity = 1;
    const LayerWeights weights = make_layer_weights({problem.spec});
    const MoeLayer alone(weights, one_rank_options(problem.how, DType::kF32));
    const auto comms = make_communicators(3, lend, {kPatient});
    run_ranks(3, [&](int rank) {
      const MoeLayer layer(weights, problem.options(comms[rank]));
      const Routing routing{problem.ids[rank], problem.factors[rank]};
      const Tensor& x = problem.x[rank];
      std::int32_t dropped = 77;
      const Tensor output = forward_exactly(layer, x, problem.max_tokens, &routing, &dropped, true);
      EXPECT_EQ(dropped, 0);
      const Tensor expected = forward_exactly(alone, x, 0, &routing);
      EXPECT_LE(testing::compare(output, expected).max_norm_relative, 1e-5) << "rank " << rank;
    });
  }
}

TEST(DroppingTest, WhatCannotBeIsRefused) {
  const struct {
    const char* error;
    void (*change)(LayerOptions&);
  } rows[] = {
      {"ranks.drop_rows needs ranks.receive_capacity",
       [](LayerOptions& o) { o.ranks.receive_capacity = 0; }},
      {"ranks.drop_rows cannot be used with batch_invariant",
       [](LayerOptions& o) { o.batch_invariant = true; }},
      {"ranks.drop_rows cannot be used with all2all: ranks with the same tokens",
       [](LayerOptions& o) {
         o.parallel = ParallelConfig::of({.tp_size = 2,
                                          .dp_size = 2,
                                          .expert_parallel = true,
                                          .rank = o.ranks.communicator->rank()});
       }},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.error);
    DropProblem problem(4, 2);
    problem.how.transport = "all2all";
    problem.how.combine.reset();
    problem.capacity = 9;
    const auto comms = make_communicators(4, true, {kPatient});
    const auto errors = errors_of_ranks(4, [&](int rank) {
      LayerOptions options = problem.options(comms[rank]);
      row.change(options);
      const MoeLayer layer(make_layer_weights({problem.spec}), options);
    });
    for (const std::string& error : errors) {
      EXPECT_NE(error.find(row.error), std::string::npos) << error;
    }
    EXPECT_EQ(comms[0]->status(), "") << "the communicator stays usable";
  }
}

/// Ranks of tensor parallelism, in two data-parallel groups, drop the same tokens, so their outputs
/// stay equal.
TEST(DroppingTest, RanksWithTheSameTokensDropTheSame) {
  DropProblem problem(4, 3);
  problem.spec.num_experts = 8;
  problem.how.transport = "allgather_reducescatter";
  problem.how.combine = CombineMode::kPerRank;
  problem.how.placement.reset();
  problem.how.deployment = Deployment{.tp_size = 2, .dp_size = 2, .expert_parallel = true};
  problem.capacity = 7;
  const LayerWeights weights = make_layer_weights({problem.spec});
  const auto comms = make_communicators(4, true, {kPatient});
  std::vector<Tensor> outputs(4);
  std::vector<std::int32_t> dropped(4, 77);
  const Tensor x = testing::random_tensor(DType::kF32, {5, problem.spec.hidden}, 1, 8);
  run_ranks(4, [&](int rank) {
    const MoeLayer layer(weights, problem.options(comms[rank]));
    outputs[rank] = forward_exactly(layer, x, problem.max_tokens, nullptr, &dropped[rank]);
  });
  // Rank 0's five tokens and two of rank 2's; each of the latter's three others stays away from
  // both ranks of its group.
  EXPECT_EQ(dropped, (std::vector<std::int32_t>{0, 0, 6, 6}));
  EXPECT_TRUE(bitwise_equal(outputs[0], outputs[1]));
  EXPECT_TRUE(bitwise_equal(outputs[2], outputs[3]));
  EXPECT_TRUE(bitwise_equal(outputs[2].slice(0, 0, 2), outputs[0].slice(0, 0, 2)));
  EXPECT_TRUE(bitwise_equal(outputs[2].slice(0, 2, 5), Tensor::zeros({3, x.size(1)}, DType::kF32)));
}

}  // namespace fusedmoe::dropping_test
