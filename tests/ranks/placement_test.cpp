// Who shares what: parallel groups, slices, and where experts lie.
#include <gtest/gtest.h>

#include <algorithm>

#include "fusedmoe/comm.h"
#include "fusedmoe/error.h"

namespace fusedmoe::placement_test {

using Combine = ParallelConfig::Combine;
using Ranks = std::vector<int>;

/// The rows of the table in docs/expert-parallel.md.
TEST(ParallelConfigTest, EveryDeploymentHasItsGroups) {
  const struct {
    int tp, dp;
    bool ep;
    int moe_tp, moe_ep;
    bool dispatch;
  } rows[] = {
      {1, 1, false, 1, 1, false}, {2, 1, false, 2, 1, false}, {1, 2, false, 2, 1, true},
      {2, 2, false, 4, 1, true},  {2, 1, true, 1, 2, false},  {1, 2, true, 1, 2, true},
      {2, 2, true, 1, 4, true},   {4, 2, true, 1, 8, true},
  };
  for (const auto& row : rows) {
    for (int rank = 0; rank < row.tp * row.dp; ++rank) {
      const auto config = ParallelConfig::of({row.tp, row.dp, row.ep, false, rank});
      EXPECT_EQ(config.tp_size, row.moe_tp);
      EXPECT_EQ(config.ep_size, row.moe_ep);
      EXPECT_EQ(config.dp_size, row.dp);
      EXPECT_EQ(config.rank(), rank);
      EXPECT_EQ(config.num_ranks(), row.tp * row.dp);
      EXPECT_EQ(config.needs_dispatch(), row.dispatch);
    }
  }
}

/// Section "who adds the rest" of the same page: what a rank holds after finalize, and who adds.
TEST(ParallelConfigTest, WhoStillHasToReduce) {
  const auto group = [](Deployment deployment, Combine combine) {
    return ParallelConfig::of(deployment).reduce_group(combine);
  };
  EXPECT_EQ(group({2, 1, false, false, 1}, Combine::kNone), Ranks({0, 1})) << "tp only";
  EXPECT_EQ(group({2, 1, true, false, 1}, Combine::kNone), Ranks({0, 1})) << "tp + ep, no dp";
  EXPECT_EQ(group({1, 2, false, false, 1}, Combine::kReduceScatter), Ranks({1})) << "dp only";
  EXPECT_EQ(group({2, 2, false, false, 2}, Combine::kReduceScatter), Ranks({2, 3})) << "dp + tp";
  EXPECT_EQ(group({2, 2, true, false, 1}, Combine::kReduceScatter), Ranks({0, 1})) << "dp + ep";
  EXPECT_EQ(group({1, 2, true, false, 1}, Combine::kReduceScatter), Ranks({1}));
  EXPECT_EQ(group({2, 2, true, true, 3}, Combine::kReduceScatter), Ranks({3})) << "sequence";
  EXPECT_EQ(group({2, 2, true, false, 3}, Combine::kComplete), Ranks({3})) << "all-to-all";
}

TEST(ParallelConfigTest, TokensAreGatheredWhereTheyDiffer) {
  EXPECT_EQ(ParallelConfig::of({2, 3, true, false, 3}).gather_group(), Ranks({1, 3, 5}));
  EXPECT_EQ(ParallelConfig::of({2, 3, true, true, 3}).gather_group(), Ranks({0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(ParallelConfig::of({3, 1, true, false, 1}).gather_group(), Ranks({1}));
}

TEST(ParallelConfigTest, WhatContradictsItselfIsAnError) {
  EXPECT_THROW(ParallelConfig::of({0, 1, false, false, 0}), Error);
  EXPECT_THROW(ParallelConfig::of({2, 2, false, false, 4}), Error);
  EXPECT_THROW(ParallelConfig::of({2, 2, false, true, 0}), Error) << "sequence parallel without ep";
  EXPECT_THROW((ParallelConfig{.tp_size = 2, .ep_size = 2}.validate()), Error);
  EXPECT_THROW((ParallelConfig{.dp_size = 2, .ep_size = 3}.validate()), Error);
}

TEST(SliceTest, CutsOnUnitsAndMayBeUneven) {
  const std::int64_t groups[] = {23, 23, 22, 22};
  std::int64_t begin = 0;
  for (int rank = 0; rank < 4; ++rank) {
    const Slice slice = slice_of(2880, 32, 4, rank);
    EXPECT_EQ(slice.begin, begin);
    EXPECT_EQ(slice.size(), groups[rank] * 32);
    begin = slice.end;
  }
  EXPECT_EQ(begin, 2880);
  EXPECT_EQ(slice_of(100, 32, 4, 3), (Slice{96, 100})) << "the last group is cut short";
  EXPECT_THROW(slice_of(64, 32, 3, 0), Error);
}

TEST(ExpertPlacementTest, LinearAndRoundRobin) {
  const auto linear = ExpertPlacement::linear(7, 3);
  EXPECT_EQ(linear.rank_of(), (std::vector<std::int32_t>{0, 0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(linear.local_experts(1), (std::vector<std::int32_t>{3, 4}));
  const Tensor map = linear.expert_map(2);
  for (int e = 0; e < 7; ++e) EXPECT_EQ(map.as<std::int32_t>()[e], e < 5 ? -1 : e - 5);
  const auto round = ExpertPlacement::round_robin(5, 2);
  EXPECT_EQ(round.local_experts(0), (std::vector<std::int32_t>{0, 2, 4}));
  EXPECT_EQ(round.local_experts(1), (std::vector<std::int32_t>{1, 3}));
  EXPECT_TRUE(ExpertPlacement::linear(2, 4).local_experts(3).empty()) << "a rank without experts";
}

TEST(ExpertPlacementTest, ReplicasAreCountedInPhysicalOrder) {
  const auto placement = ExpertPlacement::linear(4, 3, 2);  // 0 1 | 2 3 | 0 1
  EXPECT_TRUE(placement.has_replicas());
  using Replica = ExpertPlacement::Replica;
  EXPECT_EQ(placement.replicas(1), (std::vector<Replica>{{0, 1}, {2, 1}}));
  EXPECT_EQ(placement.replicas(2), (std::vector<Replica>{{1, 0}}));
  int named = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const Tensor map = placement.expert_map(rank);
    named += static_cast<int>(std::count_if(map.as<std::int32_t>(), map.as<std::int32_t>() + 4,
                                            [](std::int32_t local) { return local >= 0; }));
  }
  EXPECT_EQ(named, 4) << "every expert once over all ranks";
}

TEST(ExpertPlacementTest, JsonGoesThereAndBack) {
  const ExpertPlacement placement(3, 2, {2, 0, 1, 2}, {1, 1, 0, 0});
  EXPECT_EQ(ExpertPlacement::parse(placement.json()), placement);
  for (const char* bad :
       {"", "[]", "{}", R"({"num_experts": 2, "num_ranks": 1, "physical_to_logical": [0, 1]})",
        R"({"num_experts": 2, "num_ranks": 1, "physical_to_logical": [0], "rank_of": [0]})",
        R"({"num_experts": 2, "num_ranks": 1, "physical_to_logical": [0, 0], "rank_of": [0, 0]})",
        R"({"num_experts": 2, "num_ranks": 1, "physical_to_logical": [0, 2], "rank_of": [0, 0]})",
        R"({"num_experts": 2, "num_ranks": 1, "physical_to_logical": [0, 1], "rank_of": [0, 1]})",
        R"({"num_experts": 2, "num_ranks": 1, "physical_to_logical": [0, 1.5], "rank_of": [0, 0]})",
        R"({"num_experts": 2, "num_ranks": 1, "physical_to_logical": [0, 1], "rank_of": 0})",
        R"({"num_experts": 2, "num_ranks": 1, "physical_to_logical": [0, 1], "rank_of": [0, 0],
               "more": 1})",
        R"({"num_experts": -2, "num_ranks": 1, "physical_to_logical": [], "rank_of": []})"}) {
    EXPECT_THROW(ExpertPlacement::parse(bad), Error) << bad;
  }
}

}  // namespace fusedmoe::placement_test
