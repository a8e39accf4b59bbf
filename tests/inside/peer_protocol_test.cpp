// The signals of ranks that read each other's memory in the steps of a layer.
#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <utility>

#include "peer_protocol.h"

namespace fusedmoe::cuda::peer_protocol_test {

TEST(PeerProtocolTest, NobodyReadsTooEarlyOrWritesTooEarlyAgain) {
  // 2 rounds * (2 + 3 + 5 + 8) ranks * 2800 steps: 10^5 delays.
  for (const int size : {2, 3, 5, 8}) {
    Host host(size);
    host.run([&](int rank) {
      Rank self(host, rank);
      for (std::uint64_t number = 1; number <= 2800; ++number) {
        StepKey key = kKey;
        key.layer = static_cast<std::uint32_t>(number % 3);
        ASSERT_TRUE(self.step(key, number)) << self.text();
      }
    });
  }
}

TEST(PeerProtocolTest, AWaitMayBeginBeforeItsRankHasSignalled) {
  for (const int size : {2, 5}) {
    Host host(size);
    host.run([&](int rank) {
      Rank self(host, rank, How::kWaitsEarly);
      for (std::uint64_t number = 1; number <= 300; ++number) {
        ASSERT_TRUE(self.step(kKey, number)) << self.text();
      }
    });
  }
}

/// Of some ranks or of all.
TEST(PeerProtocolTest, ASumMayTellByItself) {
  for (const bool all : {true, false}) {
    for (const int size : {2, 5}) {
      Host host(size);
      host.run([&](int rank) {
        Rank self(host, rank, all || rank % 2 == 0 ? How::kSumTells : How::kInOrder);
        for (std::uint64_t number = 1; number <= 300; ++number) {
          ASSERT_TRUE(self.step(kKey, number)) << self.text();
        }
      });
    }
  }
}

TEST(PeerProtocolTest, WhoDiesOrStopsIsNamedByAllOthers) {
  for (const Round round : {Round::kDispatch, Round::kReturn}) {
    for (const auto& [dead, how] : {std::pair(0, How::kInOrder), std::pair(2, How::kSumTells)}) {
      Host host(4);
      host.run([&, dead = dead, how = how](int rank) {
        Rank self(host, rank, how);
        for (std::uint64_t number = 1; number <= 20; ++number) ASSERT_TRUE(self.step(kKey, number));
        if (rank != dead) {
          EXPECT_FALSE(self.step(kKey, 21));
          EXPECT_EQ(self.record.is_written, 1U);
          EXPECT_EQ(self.record.late, 1U << dead);
          EXPECT_EQ(self.record.step, 21U);
          EXPECT_EQ(self.record.round, static_cast<std::uint32_t>(round));
          EXPECT_FALSE(self.step(kKey, 22)) << "dead for good";
          return;
        }
        if (round == Round::kReturn) {
          ASSERT_TRUE(self.pass(Round::kDispatch, kKey));
        }
        const int rounds = 2 * 20 + static_cast<int>(round);
        self.let_time_pass(4 * rounds + 3, 3);
      });
    }
  }
}

TEST(PeerProtocolTest, WhoIsInAnotherStepIsNamedByAllAndNamesThem) {
  struct Case {
    StepKey other;
    const char* text;
  };
  for (const Case& each : {Case{{5, 8, 2, 128, 0}, "rank 0 has layer 4, it layer 5"},
                           Case{{4, 16, 2, 128, 0}, "at most 8 tokens, it at most 16 tokens"},
                           Case{{4, 8, 1, 128, 0}, "top-2, it top-1"},
                           Case{{4, 8, 2, 64, 0}, "rows of 128 bytes, it rows of 64 bytes"},
                           Case{{4, 8, 2, 128, 1}, "placement 0, it placement 1"}}) {
    Host host(3);
    host.run([&](int rank) {
      Rank self(host, rank);
      ASSERT_TRUE(self.step(kKey, 1));
      EXPECT_FALSE(self.step(rank == 1 ? each.other : kKey, 2));
      EXPECT_EQ(self.record.different, rank == 1 ? 0b101U : 0b010U);
      EXPECT_EQ(self.record.theirs, rank == 1 ? kKey : each.other);
      if (rank == 0) {
        EXPECT_EQ(self.text().find("rank 1 does not match rank 0 in the dispatch of layer 4: "), 0U)
            << self.text();
        EXPECT_NE(self.text().find(each.text), std::string::npos) << self.text();
      }
    });
  }
}

// To a rank that is a step ahead the other is late, or in another step where it sent nothing yet.
TEST(PeerProtocolTest, ALostStepIsNamed) {
  Host host(2);
  end_step<TestWords>(host.peers(1));
  host.run([&](int rank) {
    Rank self(host, rank);
    if (rank == 1) {
      std::jthread time([&] { self.let_time_pass(2, 2); });
      EXPECT_FALSE(self.step(kKey, 1));
      EXPECT_EQ(self.record.late | self.record.different, 1U);
      return;
    }
    EXPECT_FALSE(self.step(kKey, 1));
    EXPECT_EQ(self.record.different, 2U);
    EXPECT_NE(self.text().find("step 1, it step 2"), std::string::npos) << self.text();
  });
}

TEST(PeerProtocolTest, TheHostEndsAWait) {
  Host host(2);
  host.run([&](int rank) {
    if (rank == 1) {
      while (host.rounds_sent < 1) doze();
      HostWords::store(&host.abort, 1);
      return;
    }
    Rank self(host, rank);
    EXPECT_FALSE(self.step(kKey, 1));
    EXPECT_EQ(self.record.told, 1U);
    EXPECT_EQ(self.text(), "rank 0 was told to end the dispatch of layer 4");
  });
}

TEST(PeerProtocolTest, TheDeadSendNothing) {
  Host host(2);
  const Peers peers = host.peers(0);
  peers.own().dead = 1;
  send_signal<TestWords>(peers, Round::kDispatch, kKey, 1);
  EXPECT_EQ(host.arenas[1].head.lines[0][0].flag, 0U);
}

TEST(PeerProtocolTest, TheTextNamesWhoIsLate) {
  FailureRecord record;
  record.round = 1;
  record.late = 0b1001;
  record.mine = kKey;
  EXPECT_EQ(to_string(record, 1, {500000000, nullptr}),
            "rank 1 waited 500 ms for ranks 0, 3 in the return of layer 4");
}

}  // namespace fusedmoe::cuda::peer_protocol_test
