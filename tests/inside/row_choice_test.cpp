// What a layer on GPUs chooses for its rows, from costs that are given.
#include "layer/row_choice.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "../ranks/ranks.h"
#include "error_text.h"
#include "fusedmoe/error.h"
#include "fusedmoe/selection.h"
#include "layer/agreement.h"
#include "layer/rank_step.h"
#include "row_configs.h"
#include "temporary_directory.h"

namespace fusedmoe::row_choice_test {

using layer::choose_rows;
using layer::RowChoice;

constexpr std::int64_t kMost = testing::kMostRows;
constexpr CombineMode kPerRank = CombineMode::kPerRank, kPerSlot = CombineMode::kPerSlot;

RowChoice choose(const RankCosts& costs, const RankOptions& options = {}, int num_ranks = 2,
                 std::optional<RowPath> messages = RowPath::kAll2all,
                 const MoeConfig* config = nullptr) {
  RankOptions asked = options;
  asked.max_tokens_per_rank = kMost;
  return choose_rows(costs, config ? *config : testing::rank_config(num_ranks), asked,
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
    return layer::predict_rows(costs, testing::rank_config(2), {}, ExpertPlacement::linear(256, 2),
                               path, kPerRank, tokens)
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

/// Measured with 7168 columns in E4M3 and top-8: two H200 gain 110 to 150 us at 8192 tokens, and
/// neither gain nor lose at 2048.
TEST(RowChoiceTest, RowsComeBesideTheExpertsWhereTheLinkTakesLong) {
  RankCosts costs = default_rank_costs();
  const auto from = [&](int num_ranks, const auto& change) {
    MoeConfig config = testing::rank_config(num_ranks);
    RankOptions options;
    options.max_tokens_per_rank = kMost;
    change(config);
    return layer::least_beside_experts(costs, config, options,
                                       ExpertPlacement::linear(256, num_ranks));
  };
  const auto as_is = [](MoeConfig&) {};
  EXPECT_EQ(from(1, as_is), 0);
  EXPECT_GT(from(2, as_is), 1024);
  EXPECT_LT(from(4, as_is), from(2, as_is) / 2);
  EXPECT_GT(from(4, as_is), 256);
  EXPECT_LT(from(8, as_is), from(4, as_is)) << "more rows come from others";
  EXPECT_GT(from(8, as_is), 128);
  const auto in_e4m3 = [](MoeConfig& config) {
    config.scheme = parse_scheme("fp8_block");
    config.dispatch_dtype = DType::kE4M3;
  };
  EXPECT_NEAR(from(2, in_e4m3), 2048, 256);
  EXPECT_GT(from(4, in_e4m3), 3 * from(4, as_is) / 2) << "half as many bytes come";
  EXPECT_EQ(from(4, [](MoeConfig& config) { config.combine = kPerSlot; }), 0);
  EXPECT_EQ(from(4, [](MoeConfig& config) { config.hidden = 40000; }), 0) << "too wide to copy";

  const auto saved = [&](std::int64_t tokens) {
    MoeConfig config = testing::rank_config(2);
    in_e4m3(config);
    return *layer::saved_beside_experts(costs, config, {}, ExpertPlacement::linear(256, 2), tokens);
  };
  EXPECT_LT(saved(from(2, in_e4m3) - 1), 0);
  EXPECT_GE(saved(from(2, in_e4m3)), 0);
  EXPECT_NEAR(saved(kMost), 130, 20);
  costs.beside_experts.floor_us = 0;
  EXPECT_EQ(from(4, as_is), 1);
}

TEST(RowChoiceTest, StepsOfEnoughTokensHaveTheirRowsBesideTheExperts) {
  const auto ranks = make_thread_communicators(2, {testing::kPatient});
  testing::run_ranks(2, [&](int rank) {
    MoeConfig config = testing::rank_config(2);
    config.device = {};
    Context context;
    context.ranks.communicator = ranks[rank];
    context.ranks.max_tokens_per_rank = kMost;
    layer::RankRules rules(config, context, false);
    rules.way = layer::RowWay::kPeerMemory;
    rules.peer_tokens = 4000;
    rules.beside_from = 100;
    const auto is_beside = [&](std::int64_t tokens, bool from_sources = true) {
      ProblemSize problem;
      problem.num_tokens = tokens;
      problem.topk = config.topk;
      problem.hidden = config.hidden;
      problem.dtype = config.dtype;
      Preparation read;
      read.from_sources = from_sources;
      return layer::StepSizes(rules, problem, read).beside;
    };
    EXPECT_FALSE(is_beside(99));
    EXPECT_TRUE(is_beside(100));
    EXPECT_TRUE(is_beside(4000));
    EXPECT_FALSE(is_beside(4001)) << "messages";
    EXPECT_FALSE(is_beside(100, false));
    rules.beside_from = 0;
    EXPECT_FALSE(is_beside(100));
  });
}

TEST(RowChoiceTest, RowsPerSlotThatAreAskedForNeverBecomeMessages) {
  RankCosts costs = default_rank_costs();
  costs.peer_memory = costing(1000, 1e3);
  MoeConfig config = testing::rank_config(2);
  config.combine = kPerSlot;
  const RowChoice choice = choose(costs, {}, 2, RowPath::kAll2all, &config);
  EXPECT_EQ(choice.combine, kPerSlot);
  EXPECT_EQ(choice.peer_tokens, kMost);
}

TEST(RowChoiceTest, PeerMemoryServesAllForwardsWhereMessagesCannotBeSent) {
  RankCosts costs = default_rank_costs();
  RankOptions options;
  options.max_tokens_per_rank = kMost;
  const auto choose_after = [&](const std::function<void()>& connect) {
    return choose_rows(costs, testing::rank_config(2), options, ExpertPlacement::linear(256, 2),
                       RowPath::kAll2all, connect);
  };
  const auto fail = [] { throw Error::communication("there is no libnccl"); };
  EXPECT_EQ(choose_after(fail).no_messages, "") << "nobody needs any";
  costs.all2all = costing(30, 200e3);
  for (const double floor_us : {10, 40}) {  // messages for many, and for all
    costs.peer_memory = costing(floor_us, 100e3);
    const RowChoice without = choose_after(fail);
    EXPECT_EQ(without.peer_tokens, kMost);
    EXPECT_EQ(without.no_messages, "there is no libnccl");
    int connected = 0;
    const RowChoice with = choose_after([&] { ++connected; });
    EXPECT_EQ(with.peer_tokens, choose(costs).peer_tokens);
    EXPECT_EQ(with.no_messages, "");
    EXPECT_EQ(connected, 1);
  }
}

TEST(RowChoiceTest, RanksWhoseCostsDifferAreToldWhichNumber) {
  const auto error_of = [](const std::function<void(RankCosts&)>& change) {
    const auto ranks = make_thread_communicators(2, {testing::kPatient});
    const auto errors = testing::errors_of_ranks(2, [&](int rank) {
      RankCosts costs = default_rank_costs();
      if (rank == 1) change(costs);
      layer::agree(*ranks[rank], [&] { return layer::facts_of(costs); });
    });
    EXPECT_EQ(errors[0], errors[1]);
    return errors[0];
  };
  EXPECT_EQ(error_of([](RankCosts& costs) {
              costs.all2all.per_rank = {21, 300e3, "another"};
            }),
            "the ranks of a layer differ in all2all.per_rank.floor_us of FUSEDMOE_RANK_COSTS: "
            "rank 0 has 20.5, rank 1 has 21");
  EXPECT_EQ(error_of([](RankCosts& costs) { costs.quantize.floor_us = 8; }),
            "the ranks of a layer differ in quantize.floor_us of FUSEDMOE_RANK_COSTS: rank 0 has "
            "7, rank 1 has 8");
}

TEST(RowChoiceTest, LayersThatLeaveNoChoiceDoNotAskForCosts) {
  const auto changed = [](const auto& change) {
    MoeConfig config = testing::rank_config(2);
    RankOptions options;
    options.communicator = make_thread_communicators(1, {testing::kPatient}).front();
    options.max_tokens_per_rank = kMost;
    change(config, options);
    return layer::leaves_choice(config, options, RowPath::kAll2all);
  };
  EXPECT_TRUE(changed([](auto&, auto&) {}));
  EXPECT_TRUE(changed([](auto&, auto& options) { options.combine = kPerRank; }));
  EXPECT_TRUE(changed([](auto&, auto& options) { options.lanes = 2; })) << "but per rank or slot";
  EXPECT_FALSE(changed([](auto&, auto& options) {
    options.combine = kPerRank;
    options.lanes = 2;
  }));
  EXPECT_FALSE(changed([](auto& config, auto&) { config.combine = kPerSlot; }));
  EXPECT_FALSE(changed([](auto& config, auto&) { config.device = {}; }));
  EXPECT_FALSE(changed([](auto& config, auto&) { config.hooks = true; }));
  EXPECT_FALSE(changed([](auto& config, auto&) { config.parallel = {}; }));
  EXPECT_FALSE(changed([](auto&, auto& options) { options.receive_capacity = 8; }));
  EXPECT_FALSE(changed([](auto& config, auto&) { config = testing::rank_config(32); }));
}

TEST(RowChoiceTest, SaysWhyNoGpusCouldReadEachOthersMemory) {
  RankOptions options;
  options.max_tokens_per_rank = kMost;
  const auto why = [&](const MoeConfig& config, RowPath messages = RowPath::kAll2all) {
    return layer::without_peer_memory(config, options, messages);
  };
  EXPECT_EQ(why(testing::rank_config(16)), "");
  EXPECT_EQ(why(testing::rank_config(32)), "32 ranks: at most 16 can map each other's memory");
  MoeConfig pairs = testing::rank_config(4);
  Deployment deployment{.tp_size = 2, .dp_size = 2, .expert_parallel = true};
  pairs.parallel = ParallelConfig::of(deployment);
  EXPECT_EQ(why(pairs), "");
  EXPECT_EQ(why(pairs, RowPath::kAllgather),
            "ranks with slices of the same experts, or with the same tokens, add sums");
  deployment.sequence_parallel = true;
  pairs.parallel = ParallelConfig::of(deployment);
  EXPECT_EQ(why(pairs, RowPath::kAllgather), "");
  options.max_tokens_per_rank = 0;
  EXPECT_EQ(why(testing::rank_config(2)), "max_tokens_per_rank is not given");
}

std::size_t peer_bytes(std::optional<CombineMode> combine) {
  MoeConfig config = testing::rank_config(2);
  RankOptions options;
  options.max_tokens_per_rank = 128;
  options.combine = combine;
  config.combine = combine.value_or(kPerRank);
  return select(config, "sm90+all2all").peer_bytes(options);
}

TEST(RowChoiceTest, RowsPerSlotTakeMoreBytes) {
  EXPECT_LT(peer_bytes(kPerRank), std::size_t{40} << 20);
  EXPECT_GT(peer_bytes(kPerSlot), std::size_t{45} << 20);
}

void check_file_of_the_variable() {
  const testing::TemporaryDirectory folder;
  const std::string path = folder / "costs.json";
  setenv("FUSEDMOE_RANK_COSTS", path.c_str(), 1);
  const auto error = [] { return testing::error_text([] { rank_costs(); }); };
  EXPECT_TRUE(error().starts_with("FUSEDMOE_RANK_COSTS: cannot ")) << error();
  EXPECT_NE(error().find(path), std::string::npos) << error();
  std::ofstream(path) << "{}";
  EXPECT_TRUE(error().starts_with("FUSEDMOE_RANK_COSTS " + path + ": costs: was without "))
      << error();
  RankCosts costs = default_rank_costs();
  costs.peer_memory.per_slot = {1, 4000e3, ""};
  std::ofstream(path) << costs.json();
  EXPECT_EQ(rank_costs().peer_memory.per_slot.floor_us, 1);
  EXPECT_EQ(peer_bytes({}), peer_bytes(kPerSlot)) << "chosen";
  EXPECT_LT(peer_bytes(kPerRank), peer_bytes(kPerSlot));
}

/// In a process of its own, which has read no file yet.
TEST(RowChoiceDeathTest, CostsAreThoseOfTheFileOfTheVariable) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto check_and_exit = [] {
    check_file_of_the_variable();
    std::exit(::testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(check_and_exit(), ::testing::ExitedWithCode(0), "");
}

}  // namespace fusedmoe::row_choice_test
