// Load statistics on ids whose counts are known.
#include "tools/load_statistics.h"

#include <gtest/gtest.h>

#include "fake_experts.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::load_statistics_test {

using testing::make_ids;

TEST(LoadStatisticsTest, CountsRowsOfEveryExpert) {
  const LoadStatistics load = load_statistics(make_ids({3, 2}, {0, 3, 3, -1, 3, 1}), 4);
  EXPECT_EQ(load.num_tokens, 3);
  EXPECT_EQ(load.topk, 2);
  EXPECT_EQ(load.num_experts(), 4);
  EXPECT_EQ(load.rows_per_expert, (std::vector<std::int64_t>{1, 1, 0, 3}));
  EXPECT_EQ(load.rows, 5);
  EXPECT_EQ(load.most, 3);
  EXPECT_EQ(load.distinct_experts, 3);
  EXPECT_DOUBLE_EQ(load.balance, 3 / (5 / 4.0));
  EXPECT_DOUBLE_EQ(load.expected_distinct_experts, 4 * (1 - 0.5 * 0.5 * 0.5));
}

TEST(LoadStatisticsTest, EvenLoadHasBalanceOne) {
  EXPECT_EQ(load_statistics(make_ids({2, 2}, {0, 1, 2, 3}), 4).balance, 1);
}

TEST(LoadStatisticsTest, NothingChosen) {
  const LoadStatistics no_tokens = load_statistics(Tensor::empty({0, 2}, DType::kI32), 4);
  EXPECT_EQ(no_tokens.rows, 0);
  EXPECT_EQ(no_tokens.balance, 0);
  EXPECT_EQ(no_tokens.expected_distinct_experts, 0);
  const LoadStatistics remote = load_statistics(make_ids({1, 2}, {-1, -1}), 4);
  EXPECT_EQ(remote.distinct_experts, 0);
  EXPECT_EQ(remote.expected_distinct_experts, 2);
}

TEST(LoadStatisticsTest, CountsGiveTheSame) {
  const LoadStatistics load = load_statistics(make_ids({4}, {1, 1, 0, 3}), 3, 2);
  EXPECT_EQ(load.num_experts(), 4);
  EXPECT_EQ(load.rows, 5);
  EXPECT_EQ(load.most, 3);
  EXPECT_EQ(load.distinct_experts, 3);
  EXPECT_DOUBLE_EQ(load.expected_distinct_experts, 4 * (1 - 0.5 * 0.5 * 0.5));
}

TEST(LoadStatisticsTest, ExpertsSharedWithThePreviousToken) {
  // 2, 0 and 1 experts; ids on both sides of a word's end.
  const Tensor ids = make_ids({4, 2}, {0, 33, 33, 0, 31, -1, 32, 31});
  EXPECT_DOUBLE_EQ(shared_with_previous(ids, 40), 1);
  EXPECT_EQ(shared_with_previous(make_ids({1, 2}, {0, 1}), 40), 0);
}

TEST(LoadStatisticsTest, RefusesWhatIsNoRouting) {
  EXPECT_THROW(load_statistics(make_ids({1, 2}, {0, 4}), 4), Error);
  EXPECT_THROW(load_statistics(make_ids({1, 2}, {0, -2}), 4), Error);
  EXPECT_THROW(load_statistics(make_ids({1, 2}, {0, 0}), 1), Error);
  EXPECT_THROW(load_statistics(make_ids({2}, {0, 0}), 4), Error);
  EXPECT_THROW(load_statistics(Tensor::empty({1, 2}, DType::kF32), 4), Error);
}

}  // namespace fusedmoe::load_statistics_test
