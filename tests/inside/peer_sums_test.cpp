// The signals of ranks that have the same tokens and add their parts of each.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <utility>

#include "cuda/peers/sum_layout.h"
#include "peer_protocol.h"

namespace fusedmoe::cuda::peer_protocol_test {

TEST(PeerSumsProtocolTest, NumbersStartAgain) {
  Host host(2);
  for (Host::Arena& arena : host.arenas) {
    constexpr std::uint32_t kLast = 0xFFFFFFFD;
    for (std::uint32_t& before : arena.head.before) before = kLast;
    for (auto& round : arena.head.lines) {
      for (SignalLine& line : round) line.flag = flag_of(kLast, kKey);
    }
  }
  host.run([&](int rank) {
    Rank self(host, rank);
    for (std::uint64_t number = 1; number <= 6; ++number) {
      ASSERT_TRUE(self.step(kKey, number));
      ASSERT_TRUE(self.sum(kSum, number, number == 6));
    }
  });
}

TEST(PeerSumsProtocolTest, NobodyReadsAPartTooEarlyOrWritesItTooEarlyAgain) {
  for (const int size : {2, 3, 5, 8}) {
    Host host(size);
    host.run([&](int rank) {
      Rank self(host, rank);
      std::minstd_rand shots(99);  // the same on all ranks
      for (std::uint64_t number = 1; number <= 1400; ++number) {
        ASSERT_TRUE(self.sum(kSum, number, shots() % 3 == 0)) << self.text();
      }
    });
  }
}

TEST(PeerSumsProtocolTest, PiecesAreReadBeforeTheyAreWrittenAgain) {
  for (const int size : {2, 3, 5, 8}) {
    Host host(size);
    host.run([&](int rank) {
      Rank self(host, rank);
      std::minstd_rand random(5);  // the same on all ranks
      for (std::uint64_t number = 1; number <= 1400;) {
        const int pieces = 1 + static_cast<int>(random() % 4);
        ASSERT_TRUE(self.sum_in_pieces(kSum, number, pieces, random() % 2 == 0)) << self.text();
        number += static_cast<std::uint64_t>(pieces);
      }
    });
  }
}

TEST(PeerSumsProtocolTest, SumsAndStepsComeInAnyOrder) {
  Host host(4);
  host.run([&](int rank) {
    Rank self(host, rank);
    std::minstd_rand kinds(7);  // the same on all ranks
    for (std::uint64_t number = 1; number <= 500; ++number) {
      const auto kind = kinds() % 3;
      ASSERT_TRUE(kind == 0 ? self.step(kKey, number) : self.sum(kSum, number, kind == 1))
          << self.text();
    }
  });
}

// The other has read what this rank left, though it tells of the next sum already.
TEST(PeerSumsProtocolTest, OnlyInASumARankMayBeOneAhead) {
  constexpr std::uint32_t kBefore = 0xFFFFFFFE;
  const StepKey other{5, 8, 0, 128, 0};
  const auto seen = [&](Round round, std::uint32_t step, const StepKey& key) {
    return arrival(round, flag_of(step, key), kBefore, kSum);
  };
  for (const Round round : {Round::kDispatch, Round::kReturn, Round::kParts, Round::kTotals}) {
    EXPECT_EQ(seen(round, kBefore, other), Arrival::kNotYet);
    EXPECT_EQ(seen(round, kBefore + 1, kSum), Arrival::kHere);
    EXPECT_EQ(seen(round, kBefore + 1, other), Arrival::kDifferent);
  }
  EXPECT_EQ(seen(Round::kDispatch, kBefore + 2, other), Arrival::kDifferent);
  EXPECT_EQ(seen(Round::kParts, kBefore + 2, other), Arrival::kHere);
  EXPECT_EQ(seen(Round::kParts, kBefore + 3, kSum), Arrival::kDifferent);
  EXPECT_EQ(seen(Round::kReturn, kBefore - 5, kSum), Arrival::kDifferent);
  EXPECT_EQ(seen(Round::kTotals, kBefore - 5, kSum), Arrival::kNotYet);
}

TEST(PeerSumsProtocolTest, WhoDoesNotComeToASumIsNamed) {
  for (const Round round : {Round::kParts, Round::kTotals}) {
    Host host(3);
    host.run([&](int rank) {
      Rank self(host, rank);
      for (std::uint64_t number = 1; number <= 20; ++number) ASSERT_TRUE(self.sum(kSum, number));
      if (rank == 1) {
        if (round == Round::kTotals) {
          ASSERT_TRUE(self.sum(kSum, 21));  // in one shot
        }
        return self.let_time_pass(3 * 20 + (round == Round::kParts ? 2 : 5), 2);
      }
      EXPECT_FALSE(self.sum(kSum, 21, true));
      EXPECT_EQ(self.record.late, 0b010U);
      EXPECT_EQ(self.record.step, 21U);
      EXPECT_EQ(self.record.round, static_cast<std::uint32_t>(round));
      EXPECT_FALSE(self.sum(kSum, 22)) << "dead for good";
    });
  }
}

TEST(PeerSumsProtocolTest, WhoAddsOtherRowsIsNamedByAll) {
  Host host(3);
  host.run([&](int rank) {
    Rank self(host, rank);
    ASSERT_TRUE(self.sum(kSum, 1));
    EXPECT_FALSE(self.sum(rank == 1 ? StepKey{4, 7, 0, 128, 0} : kSum, 2));
    EXPECT_EQ(self.record.different, rank == 1 ? 0b101U : 0b010U);
    if (rank == 2) {
      EXPECT_EQ(self.text(),
                "rank 1 does not match rank 2 in the sum of layer 4: rank 2 has 8 tokens, it 7 "
                "tokens");
    }
  });
}

/// Though the first pieces have as many.
TEST(PeerSumsProtocolTest, WhoHasMorePiecesIsNamedInTheFirst) {
  Host host(3);
  host.run([&](int rank) {
    Rank self(host, rank);
    EXPECT_FALSE(self.sum_in_pieces(kSum, 1, rank == 1 ? 1 : 3, false));
    EXPECT_EQ(self.record.different, rank == 1 ? 0b101U : 0b010U);
    EXPECT_EQ(self.record.step, 1U);
  });
}

TEST(PeerSumsProtocolTest, SumsOfManyBytesTakeTwoShots) {
  static_assert(kSumsBegin >= static_cast<std::int64_t>(sizeof(ArenaHead)));
  static_assert(parts_begin(0) != parts_begin(1) && parts_begin(0) == parts_begin(0xFFFFFFFE));
  static_assert(totals_begin(0) != totals_begin(1));
  static_assert(totals_begin(0) >= parts_begin(1) + kMostSumBytes);
  for (const std::int64_t bytes : {std::int64_t{4}, std::int64_t{5760}, kMostSumRowBytes}) {
    const std::int64_t rows = most_sum_rows(bytes);
    EXPECT_LE(rows * bytes, kMostSumBytes);
    EXPECT_EQ(rows % 2, 0) << "so that half of fewer rows, rounded up, has its place, too";
    EXPECT_LE(totals_begin(0) + rows / 2 * bytes, totals_begin(1));
  }
  EXPECT_LE(totals_begin(1) + kMostSumBytes / 2, kSumsEnd);
  for (const std::int64_t tokens : {1, 32, 128, 728}) {
    EXPECT_FALSE(takes_two_shots(2, tokens * 5760, false)) << "they move as much";
    EXPECT_TRUE(takes_two_shots(2, tokens * 5760, true));
  }
  EXPECT_FALSE(takes_two_shots(4, 128 * 5760, false));
  EXPECT_TRUE(takes_two_shots(4, 512 * 5760, false));
  EXPECT_FALSE(takes_two_shots(8, 32 * 5760, false));
  EXPECT_TRUE(takes_two_shots(8, 64 * 5760, false));
}

}  // namespace fusedmoe::cuda::peer_protocol_test
