// Which rows go to which rank, and to which copy of an expert.
#include <gtest/gtest.h>

#include "fusedmoe/comm.h"
#include "host/host_backend.h"
#include "layer/rank_step.h"
#include "reference/backend.h"

namespace fusedmoe::dispatch_test {

using Ids = std::vector<std::int32_t>;

/// What one rank of `placement` sends for `ids`, (num_tokens, topk).
struct Planned {
  Ids physical, rows, counts, tokens;

  Planned(const ExpertPlacement& placement, const Ids& ids, std::int64_t topk, int nearest = -1) {
    const auto num_tokens = static_cast<std::int64_t>(ids.size()) / topk;
    const std::int64_t ranks = placement.num_ranks();
    const ExpertPlacement::Table table = placement.table();
    physical.resize(ids.size());
    rows.resize(static_cast<std::size_t>(num_tokens * ranks));
    counts.resize(static_cast<std::size_t>(ranks));
    tokens.assign(rows.size(), -1);
    const auto view = [](const Ids& list, const Shape& shape) {
      return TensorView(list.data(), DType::kI32, shape);
    };
    core::TokenDestinations destinations;
    destinations.topk_ids = view(ids, {num_tokens, topk});
    destinations.replica_offsets = view(table.offsets, {std::ssize(table.offsets)});
    destinations.replicas = view(table.physical, {std::ssize(table.physical)});
    destinations.physical_ranks = view(placement.rank_of(), {placement.num_physical()});
    destinations.nearest_rank = nearest;
    destinations.row_stride = num_tokens;
    destinations.physical_ids = view(physical, {num_tokens, topk});
    destinations.send_rows = view(rows, {num_tokens, ranks});
    destinations.send_counts = view(counts, {ranks});
    destinations.send_tokens = view(tokens, {ranks, num_tokens});
    reference::backend().find_destinations(destinations, {});
  }
};

/// The example of docs/expert-parallel.md: 0 1 2 | 3 4 | 5 6, and a token that chose 1, 4 and 2.
TEST(DispatchTest, ATokenGoesToEachRankOnce) {
  const Planned planned(ExpertPlacement::linear(7, 3), {1, 4, 2, 6, -1, 6, 3, 4, 7}, 3);
  EXPECT_EQ(planned.physical, (Ids{1, 4, 2, 6, -1, 6, 3, 4, -1}));
  EXPECT_EQ(planned.rows, (Ids{0, 3, -1, -1, -1, 6, -1, 4, -1}));
  EXPECT_EQ(planned.counts, (Ids{1, 2, 1}));
  EXPECT_EQ(planned.tokens, (Ids{0, -1, -1, 0, 2, -1, 1, -1, -1}));
}

/// Rank 1 has room for one of its two rows, rank 0 for none: the later tokens stay away from them.
TEST(DispatchTest, RowsWithoutRoomAreDroppedAndCounted) {
  Planned planned(ExpertPlacement::linear(7, 3), {1, 4, 2, 6, -1, 6, 3, 4, 5}, 3);
  const auto view = [](Ids& list, const Shape& shape) {
    return TensorView(list.data(), DType::kI32, shape);
  };
  Ids ranks{0, 0, 0, 1, 1, 2, 2}, dropped{10};
  const std::int64_t room[] = {0, 1, 3};
  reference::backend().limit_rows(
      {view(planned.rows, {3, 3}), 3, room, view(planned.physical, {3, 3}), view(ranks, {7}),
       view(dropped, {1})},
      {});
  EXPECT_EQ(planned.rows, (Ids{-1, 3, -1, -1, -1, 6, -1, -1, 7}));
  EXPECT_EQ(planned.physical, (Ids{-1, 4, -1, 6, -1, 6, -1, -1, 5}));
  EXPECT_EQ(dropped, Ids{12});
}

/// (token * 2654435769 mod 2^32) mod copies, the same for all slots of a token.
TEST(DispatchTest, TheHashOfATokenChoosesItsCopies) {
  const ExpertPlacement placement(2, 3, {0, 1, 0, 1, 0, 1}, {0, 0, 1, 1, 2, 2});
  Ids ids;
  for (int token = 0; token < 100; ++token) ids.insert(ids.end(), {1, 0});
  const Planned hashed(placement, ids, 2), nearest(placement, ids, 2, 1);
  for (std::uint64_t token = 0; token < 100; ++token) {
    const auto copy = static_cast<std::int32_t>(token * 2654435769 % (std::uint64_t{1} << 32) % 3);
    EXPECT_EQ(hashed.physical[2 * token], 2 * copy + 1);
    EXPECT_EQ(hashed.physical[2 * token + 1], 2 * copy);
    EXPECT_EQ(nearest.physical[2 * token], 3);
    EXPECT_EQ(nearest.physical[2 * token + 1], 2);
  }
}

TEST(DispatchTest, RowsThatWereSentNameALocalExpert) {
  using layer::expected_local_slots;
  EXPECT_EQ(expected_local_slots(100, 1, 1.0 / 8), 100) << "the only slot is local";
  EXPECT_EQ(expected_local_slots(100, 8, 1), 800) << "all experts are";
  // A token has 8 slots, each local with a chance of 1/8: one local slot on average. Tokens that
  // have none, (7/8)^8 of all, are not sent; so those that are have 1 / (1 - (7/8)^8) = 1.52.
  EXPECT_EQ(expected_local_slots(100, 8, 1.0 / 8), 152);
  EXPECT_EQ(expected_local_slots(100, 2, 1.0 / 1000), 100);
  EXPECT_EQ(expected_local_slots(0, 2, 0), 0);
}

}  // namespace fusedmoe::dispatch_test
