// What a layer on GPUs chooses for its rows, from costs that are given.
#include "layer/row_choice.h"

#include <gtest/gtest.h>

#include "fusedmoe/error.h"
#include "fusedmoe/selection.h"

namespace fusedmoe::row_choice_test {

using layer::choose_rows;
using layer::RowChoice;

constexpr std::int64_t kMost = 8192;
constexpr CombineMode kPerRank = CombineMode::kPerRank, kPerSlot = CombineMode::kPerSlot;

MoeConfig config_of(int num_ranks) {
  MoeConfig config;
  config.num_experts = 256;
  config.num_local_experts = 256 / num_ranks;
  config.topk = 8;
  config.hidden = 7168;
  config.intermediate = 2048;
  config.scheme = schemes::unquantized(DType::kBF16);
  config.device = {DeviceKind::kCuda, 0};
  config.compute_capability = 90;
  config.has_expert_map = true;
  config.parallel = ParallelConfig::of({.dp_size = num_ranks, .expert_parallel = true});
  return config;
}

RowChoice choose(const RankCosts& costs, const RankOptions& options = {}, int num_ranks = 2,
                 std::optional<RowPath> messages = RowPath::kAll2all,
                 const MoeConfig* config = nullptr) {
  RankOptions asked = options;
  asked.max_tokens_per_rank = kMost;
  return choose_rows(costs, config ? *config : config_of(num_ranks), asked,
                     ExpertPlacement::linear(256, num_ranks), messages);
}

RowCosts costing(double floor_us, double bytes_per_us) {
  const LinkCost link{floor_us, bytes_per_us, ""};
  return {link, link, link};
}

/// Measured on two and on four H200, up to 8192 tokens.
TEST(RowChoiceTest, PeerMemoryOfH200sServesAllForwards) {
  for (const int num_ranks : {2, 4, 8}) {
    for (const RowPath messages : {RowPath::kAll2all, RowPath::kAllgather}) {
      const RowChoice choice = choose(default_rank_costs(), {}, num_ranks, messages);
      EXPECT_EQ(choice.combine, kPerRank);
      EXPECT_EQ(choice.peer_tokens, kMost) << num_ranks << " " << name(messages);
    }
  }
}

TEST(RowChoiceTest, MessagesServeFromWhereTheyAreFaster) {
  RankCosts costs = default_rank_costs();
  costs.peer_memory = costing(10, 100e3);
  costs.all2all = costing(30, 200e3);
  const RowChoice choice = choose(costs);
  EXPECT_GT(choice.peer_tokens, 1);
  EXPECT_LT(choice.peer_tokens, kMost);
  const auto us = [&](RowPath path, std::int64_t tokens) {
    return layer::predict_rows(costs, config_of(2), {}, ExpertPlacement::linear(256, 2), path,
                               kPerRank, tokens)
        .us();
  };
  const std::int64_t most = choice.peer_tokens;
  EXPECT_LE(us(RowPath::kPeerMemory, most), us(RowPath::kAll2all, most));
  EXPECT_GT(us(RowPath::kPeerMemory, most + 1), us(RowPath::kAll2all, most + 1));
  EXPECT_EQ(choose(costs, {}, 2, std::nullopt).peer_tokens, kMost) << "there are none";
  costs.peer_memory = costing(40, 100e3);
  EXPECT_EQ(choose(costs).peer_tokens, 0);
  costs.peer_memory = costing(40, 300e3);
  EXPECT_EQ(choose(costs).peer_tokens, kMost) << "slower for few tokens alone";
}

TEST(RowChoiceTest, RowsPerSlotWhereTheyAreFasterForFewAndForMany) {
  RankCosts costs = default_rank_costs();
  costs.peer_memory.per_slot = {1, 400e3, ""};
  EXPECT_EQ(choose(costs).combine, kPerRank) << "slower for many";
  costs.peer_memory.per_slot = {1, 4000e3, ""};
  EXPECT_EQ(choose(costs).combine, kPerSlot);
  EXPECT_EQ(choose(costs).peer_tokens, kMost);
  EXPECT_EQ(choose(costs, {.combine = kPerRank}).combine, kPerRank) << "it was asked for";
  EXPECT_EQ(choose(costs, {.combine_dtype = DType::kF32}).combine, kPerRank) << "of rows per rank";
  costs.all2all = costing(1, 4000e3);
  EXPECT_EQ(choose(costs).combine, kPerRank) << "messages are faster still";
}

TEST(RowChoiceTest, RowsPerSlotThatAreAskedForNeverBecomeMessages) {
  RankCosts costs = default_rank_costs();
  costs.peer_memory = costing(1000, 1e3);
  MoeConfig config = config_of(2);
  config.combine = kPerSlot;
  const RowChoice choice = choose(costs, {}, 2, RowPath::kAll2all, &config);
  EXPECT_EQ(choice.combine, kPerSlot);
  EXPECT_EQ(choice.peer_tokens, kMost);
}

TEST(RowChoiceTest, BytesPerRankAreThoseOfWhatIsChosen) {
  const Selection selection = select(config_of(2), "sm90+all2all");
  RankOptions options;
  options.max_tokens_per_rank = 128;
  EXPECT_LT(selection.peer_bytes(options), std::size_t{40} << 20);
  MoeConfig slots = config_of(2);
  slots.combine = kPerSlot;
  EXPECT_GT(select(slots, "sm90+all2all").peer_bytes(options), std::size_t{60} << 20);
}

}  // namespace fusedmoe::row_choice_test
