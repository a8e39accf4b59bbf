// The simulation of ranks against what others and this project have measured on them.
#include "fusedmoe/simulation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "error_text.h"
#include "fusedmoe/error.h"
#include "testing/cases.h"
#include "tools/fit_costs.h"

namespace fusedmoe::simulation_test {

/// Every expert is drawn equally often, and every rank sends equally much to every other.
Tensor even_ids(std::int64_t num_tokens, std::int64_t topk, std::int64_t num_experts) {
  Tensor ids = Tensor::empty({num_tokens, topk}, DType::kI32);
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    const std::int64_t token = i / topk, slot = i % topk;
    ids.as<std::int32_t>()[i] =
        static_cast<std::int32_t>((token * 37 + slot * (num_experts / topk)) % num_experts);
  }
  return ids;
}

RankCosts costs() {
  const RowCosts rows{{10, 300e3, "a"}, {10, 200e3, "b"}, {20, 400e3, "e"}};
  return {.peer_memory = rows,
          .all2all = rows,
          .allgather_reducescatter = rows,
          .between_hosts = {24, 42e3, "c"},
          .beside_experts = {70, 2e6, "f"},
          .quantize = {7, 3e6, "g"},
          .experts = {4e6, 900e6, "d"}};
}

TEST(SimulationTest, CountsWhatLeavesRanks) {
  // Ranks 0 and 1 on one host, 2 and 3 on the other, an expert each; every rank has one token.
  SimulatedLayer layer{.placement = ExpertPlacement::linear(4, 4), .num_hosts = 2};
  layer.tokens_per_rank = 1;
  layer.sent_row_bytes = 3000;
  layer.returned_row_bytes = 2000;
  layer.expert_bytes = 8e6;
  layer.row_flops = 9e6;
  Tensor ids = Tensor::empty({4, 2}, DType::kI32);
  const std::int32_t chosen[] = {0, 1, 1, -1, 1, 3, 3, 1};
  std::copy(std::begin(chosen), std::end(chosen), ids.as<std::int32_t>());
  const SimulatedStep step = simulate(costs(), layer, ids);
  EXPECT_EQ(step.inside_bytes, 3000) << "rank 0 to 1, 2 to 3";
  EXPECT_EQ(step.between_bytes, 2 * 3000) << "ranks 2 and 3 to 1";
  EXPECT_DOUBLE_EQ(step.dispatch_us, 24 + 6000 / 42e3);
  EXPECT_DOUBLE_EQ(step.combine_us, 24 + 4000 / 42e3);
  EXPECT_DOUBLE_EQ(step.experts_us, 2 + 4 * 0.01) << "rank 1";
  EXPECT_DOUBLE_EQ(step.balance, 4 * 4 / 7.0);
}

TEST(SimulationTest, ARowGoesOnceToARankOrToEachExpert) {
  SimulatedLayer layer{.placement = ExpertPlacement::linear(8, 2)};
  layer.tokens_per_rank = 2;
  layer.sent_row_bytes = 1;
  Tensor ids = Tensor::empty({1, 3}, DType::kI32);
  for (int i = 0; i < 3; ++i) ids.as<std::int32_t>()[i] = 4 + i;  // all on rank 1
  EXPECT_EQ(simulate(costs(), layer, ids).inside_bytes, 2);
  layer.to_each_expert = true;
  EXPECT_EQ(simulate(costs(), layer, ids).inside_bytes, 6);
}

TEST(SimulationTest, RowsPerSlotComeBackFromEachExpert) {
  SimulatedLayer layer{.placement = ExpertPlacement::linear(8, 2)};
  layer.tokens_per_rank = 2;
  layer.sent_row_bytes = 1;
  layer.returned_row_bytes = 1000;
  Tensor ids = Tensor::empty({1, 3}, DType::kI32);
  for (int i = 0; i < 3; ++i) ids.as<std::int32_t>()[i] = 4 + i;  // all on rank 1
  EXPECT_DOUBLE_EQ(simulate(costs(), layer, ids).combine_us, 10 + 2 * 1000 / 200e3);
  layer.combine = CombineMode::kPerSlot;
  EXPECT_DOUBLE_EQ(simulate(costs(), layer, ids).combine_us, 20 + 6 * 1000 / 400e3);
}

TEST(SimulationTest, MessagesOfFixedSizesGoToAllRanksWithExperts) {
  SimulatedLayer layer{.placement = ExpertPlacement(2, 4, {0, 1}, {0, 1})};  // 2 and 3 have none
  layer.tokens_per_rank = 5;
  layer.sent_row_bytes = 1;
  Tensor ids = Tensor::empty({1, 1}, DType::kI32);
  ids.as<std::int32_t>()[0] = 0;
  EXPECT_EQ(simulate(costs(), layer, ids).inside_bytes, 15) << "rank 0 gets those of three others";
  layer.path = RowPath::kAllgather;
  EXPECT_EQ(simulate(costs(), layer, ids).inside_bytes, 15);
  layer.placement = ExpertPlacement::linear(4, 4);
  layer.path = RowPath::kPeerMemory;
  layer.fixed_sizes = true;
  EXPECT_EQ(simulate(costs(), layer, ids).inside_bytes, 15);
  ids.as<std::int32_t>()[0] = -1;
  EXPECT_EQ(simulate(costs(), layer, ids).inside_bytes, 0);
  layer.path = RowPath::kAll2all;
  EXPECT_EQ(simulate(costs(), layer, ids).inside_bytes, 15);
}

TEST(SimulationTest, WithoutIdsItTellsTheMean) {
  SimulatedLayer layer{.placement = ExpertPlacement::linear(64, 8), .num_hosts = 2};
  layer.tokens_per_rank = 1000;
  layer.sent_row_bytes = layer.returned_row_bytes = 14336;
  layer.expert_bytes = 1e6;
  layer.row_flops = 1e9;
  const SimulatedStep even = simulate(costs(), layer, even_ids(8000, 8, 64));
  const SimulatedStep mean = simulate(costs(), layer, 8);
  EXPECT_NEAR(mean.experts_us, even.experts_us, 0.02 * even.experts_us);
  EXPECT_DOUBLE_EQ(mean.balance, 1);
  testing::Case spec;
  spec.num_tokens = 8000;
  spec.num_experts = 64;
  spec.topk = 8;
  spec.hidden = spec.intermediate = 16;
  const SimulatedStep drawn = simulate(costs(), layer, testing::make_problem(spec).topk_ids);
  EXPECT_NEAR(mean.dispatch_us, drawn.dispatch_us, 0.05 * drawn.dispatch_us);
  EXPECT_NEAR(mean.inside_bytes, drawn.inside_bytes, 0.06 * drawn.inside_bytes);
  EXPECT_NEAR(mean.between_bytes, drawn.between_bytes, 0.06 * drawn.between_bytes);
}

TEST(SimulationTest, CopiesShareTheRows) {
  SimulatedLayer layer{.placement = ExpertPlacement(2, 2, {0, 1, 0}, {0, 0, 1})};
  layer.tokens_per_rank = 1000;
  Tensor ids = Tensor::empty({1, 1}, DType::kI32);
  ids.as<std::int32_t>()[0] = 0;
  EXPECT_NEAR(simulate(costs(), layer, ids).balance, 1, 0.01);
}

// docs/legacy.md of DeepEP: 128 tokens a rank, top-8, FP8 out and bf16 back, 8 ranks a host, us.
// Its rows go to each expert; what stays on the host does not cross the network.
TEST(SimulationTest, OneLatencyAndOneRateReproduceDeepEpsTable) {
  struct Row {
    int ranks;
    double dispatch_us, combine_us;
  };
  for (const Row& row : {Row{16, 118, 195}, Row{32, 155, 273}, Row{64, 173, 314},
                         Row{128, 192, 369}, Row{256, 194, 360}}) {
    SimulatedLayer layer{.placement = ExpertPlacement::linear(256, row.ranks),
                         .num_hosts = row.ranks / 8};
    layer.tokens_per_rank = 128;
    // NOLINTNEXTLINE(bugprone-integer-division)
    layer.sent_row_bytes = 7168 + 4 * 7168 / 128;
    layer.returned_row_bytes = 2 * 7168;
    layer.to_each_expert = true;
    const SimulatedStep step = simulate(costs(), layer, even_ids(128 * row.ranks, 8, 256));
    EXPECT_NEAR(step.dispatch_us, row.dispatch_us, 0.10 * row.dispatch_us) << row.ranks;
    EXPECT_NEAR(step.combine_us, row.combine_us, 0.10 * row.combine_us) << row.ranks;
  }
}

// Costs of peer memory that two GPUs gave predict what four GPUs took. Each time is dispatch and
// combine together, with fixed sizes: hidden 7168, top-8 of 256,
// bf16 (bench/results/ep-4-gpus-89da804.txt).
TEST(SimulationTest, TwoGpusTellOfPeerMemoryOfFour) {
  RankCosts costs;
  costs.peer_memory.dispatch = costs.peer_memory.per_rank =
      each_way(fit_link({0.23e6, 15.3}, {234.882e6, 789.4}, "two H200, fixed sizes"));
  struct Row {
    std::int64_t tokens;
    double us;
  };
  for (const Row& row : {Row{1, 15.4}, Row{8, 16.8}, Row{32, 23.8}, Row{128, 50.8}, Row{512, 151},
                         Row{2048, 535}, Row{8192, 2094}}) {
    SimulatedLayer layer{.placement = ExpertPlacement::linear(256, 4),
                         .path = RowPath::kPeerMemory};
    layer.tokens_per_rank = row.tokens;
    layer.sent_row_bytes = layer.returned_row_bytes = 2 * 7168;
    const SimulatedStep step = simulate(costs, layer, 8);
    EXPECT_NEAR(step.dispatch_us + step.combine_us, row.us, 0.20 * row.us) << row.tokens;
  }
}

// Whole steps of 128 FP8 experts of 7168 x 2048, top-8, on four H200 over NCCL. The link's costs
// are of two H200; those of experts of two of the sizes.
TEST(SimulationTest, TwoGpusTellOfFour) {
  const double expert_weights = 3.0 * 7168 * 2048;
  const auto experts = [&](double tokens, double us) {
    const double rows = tokens * 8;  // of each of the ranks, which share all tokens evenly
    const double hit = 32 * (1 - std::pow(1 - 1.0 / 32, rows));
    return ExpertsSample{hit * expert_weights, rows * 2 * expert_weights, us};
  };
  RankCosts costs;
  RowCosts& messages = costs.all2all;
  messages.dispatch = fit_link({0.115e6, 13.3}, {117.441e6, 484.7}, "two H200, fixed sizes");
  messages.per_rank = fit_link({0.115e6, 14.3}, {117.441e6, 508.4}, "two H200, fixed sizes");
  costs.experts = fit_experts(experts(8, 316.5), experts(8192, 6601.5), "one H200");
  EXPECT_NEAR(messages.dispatch.bytes_per_us, 249e3, 1e3);
  EXPECT_NEAR(messages.dispatch.floor_us, 12.8, 0.1);

  struct Row {
    std::int64_t tokens;
    double step_us;
  };
  for (const Row& row : {Row{8, 356}, Row{128, 469}, Row{1024, 1359}, Row{8192, 8619}}) {
    SimulatedLayer layer{.placement = ExpertPlacement::linear(128, 4)};
    layer.tokens_per_rank = row.tokens;
    layer.sent_row_bytes = layer.returned_row_bytes = 2 * 7168;
    layer.expert_bytes = expert_weights;
    layer.row_flops = 2 * expert_weights;
    testing::Case spec;
    spec.num_tokens = 4 * row.tokens;
    spec.num_experts = 128;
    spec.topk = 8;
    spec.hidden = spec.intermediate = 16;
    const testing::Problem problem = testing::make_problem(spec);
    const SimulatedStep step = simulate(costs, layer, problem.topk_ids);
    EXPECT_NEAR(step.step_us(), row.step_us, 0.15 * row.step_us) << row.tokens << " tokens";
  }
}

TEST(SimulationTest, CostsAreReadAsTheyWereWritten) {
  const RankCosts read = RankCosts::parse(costs().json());
  EXPECT_EQ(read.json(), costs().json());
  EXPECT_EQ(read.between_hosts.source, "c");
  EXPECT_DOUBLE_EQ(read.experts.flops_per_us, 900e6);
  std::string older = costs().json();
  older.replace(older.find("beside_experts"), 6, "before");
  older.replace(older.find("quantize"), 8, "dispatch");
  EXPECT_EQ(RankCosts::parse(older).beside_experts.source,
            default_rank_costs().beside_experts.source);
  EXPECT_EQ(RankCosts::parse(older).quantize.source, default_rank_costs().quantize.source);
  for (const char* wrong :
       {"", "[]", "{}", R"({"dispatch": 1})", R"({"all2all": {"dispatch": {"floor_us": "1"}}})"}) {
    EXPECT_THROW(RankCosts::parse(wrong), Error) << wrong;
  }
  std::string zero = costs().json();
  zero.replace(zero.find("42.0"), 4, "0");
  EXPECT_EQ(testing::error_text([&] { RankCosts::parse(zero); }),
            "between_hosts.gigabytes_per_second: was 0; must be a number above 0");
}

TEST(SimulationTest, HostsShareTheRanksEvenly) {
  SimulatedLayer layer{.placement = ExpertPlacement::linear(4, 4), .num_hosts = 3};
  layer.tokens_per_rank = 1;
  EXPECT_THROW(simulate(costs(), layer, even_ids(4, 2, 4)), Error);
  layer.num_hosts = 2;
  EXPECT_THROW(simulate(costs(), layer, even_ids(4, 2, 8)), Error) << "ids out of range";
  EXPECT_THROW(simulate(costs(), layer, even_ids(0, 2, 4)), Error);
}

TEST(SimulationTest, SamplesThatCostsCannotExplainAreRefused) {
  const LinkCost both = fit_link({100, 14}, {1100, 24}, "both");
  const LinkCost each = each_way(both);
  EXPECT_DOUBLE_EQ(each.us(60) + each.us(40), 14);
  EXPECT_DOUBLE_EQ(each.us(500) + each.us(600), 24);
  EXPECT_EQ(each.source, "both");
  EXPECT_THROW(fit_link({10, 5}, {20, 5}, ""), Error);
  EXPECT_THROW(fit_link({10, 5}, {10, 6}, ""), Error);
  EXPECT_THROW(fit_experts({10, 10, 5}, {10, 10, 5}, ""), Error);
}

}  // namespace fusedmoe::simulation_test
