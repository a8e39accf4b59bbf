// The signals of ranks that read each other's memory, by a thread for each rank.
#include "cuda/peers/protocol.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/peers/host_words.h"
#include "cuda/peers/sum_layout.h"

namespace fusedmoe::cuda::peer_protocol_test {

/// For a thread that waits: a busy machine lets it go on soon, as one that yields it would not.
void doze() {
  std::this_thread::sleep_for(std::chrono::microseconds(1));
}

/// The host's words, with a clock that stands still until a test moves it.
struct TestWords : HostWords {
  static void pause() { doze(); }
  static inline std::atomic<std::uint64_t> clock{0};
  static std::uint64_t nanoseconds() { return clock.load(); }
};

constexpr std::uint64_t kPatience = 1000000;

/// All that ranks share. Rows are plain words: ThreadSanitizer sees whoever reads them too early or
/// writes them too early again.
struct Host {
  struct Arena {
    ArenaHead head;
    std::uint64_t row = 0;                   // for all to read in the return
    std::uint64_t results[kMostPeers] = {};  // for the rank of the same number
    std::uint64_t parts[2] = {};             // of sums, by turns
    std::uint64_t total = 0;                 // of this rank's share
  };

  explicit Host(int size) : size(size), arenas(static_cast<std::size_t>(size)) {
    TestWords::clock = 0;
  }

  Peers peers(int rank) {
    Peers seen{.rank = rank, .size = size};
    for (int i = 0; i < size; ++i) seen.arenas[i] = &arenas[static_cast<std::size_t>(i)].head;
    return seen;
  }
  /// Runs a function as every rank, each in a thread of its own.
  void run(const std::function<void(int)>& rank_main) {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) threads.emplace_back(rank_main, rank);
  }

  int size;
  std::vector<Arena> arenas;
  std::uint32_t abort = 0;
  std::atomic<int> rounds_sent{0}, gave_up{0};
};

/// How a rank takes a round.
enum class How {
  kInOrder,     ///< it waits when it has sent its own signals
  kWaitsEarly,  ///< it may begin to wait before, as kernels in graphs may
  kSumTells,    ///< of the return: one kernel does both, whose first block sends
};

/// One rank of a host.
class Rank {
 public:
  Rank(Host& host, int rank, How how = How::kInOrder)
      : host_(host), peers_(host.peers(rank)), random_(rank + 1U), how_(how) {}

  /// A round as kernels take it, behind what `before` does. False: the step has failed.
  bool pass(
      Round round, const StepKey& key, const std::function<void()>& before = [] {}) {
    const auto send = [&, dozes = random_() % 4] {
      before();
      for (unsigned i = 0; i < dozes; ++i) doze();
      for (int to = 0; to < peers_.size; ++to) {
        if (round == Round::kReturn) {
          tell_return<TestWords>(peers_, key, to);
        } else {
          send_signal<TestWords>(peers_, round, key, to);
        }
      }
      ++host_.rounds_sent;
    };
    bool here = true;
    if (how_ == How::kSumTells && round == Round::kReturn) {
      here = run_sum(key, send);
    } else {
      std::jthread sender;
      if (how_ == How::kWaitsEarly) {
        sender = std::jthread(send);
      } else {
        send();
      }
      here = await_all(round, key);
    }
    if (!here) ++host_.gave_up;
    return here;
  }

  /// A sum as the kernel takes it. Every rank gets the sum of all parts.
  bool sum(const StepKey& key, std::uint64_t number, bool two_shots = false) {
    Host::Arena& own = arena(peers_.rank);
    const std::uint32_t before = number_before(Round::kParts);
    own.parts[before % 2] = row(peers_.rank, number);
    send(Round::kParts, key, before);
    end_sum<TestWords>(peers_, before);
    if (!await_all(Round::kParts, key, before)) return !++host_.gave_up;
    std::uint64_t sum = 0, expected = 0;
    for (int from = 0; from < peers_.size; ++from) {
      if (random_() % 4 == 0) doze();
      sum += arena(from).parts[before % 2];
      expected += row(from, number);
    }
    EXPECT_EQ(sum, expected);
    if (!two_shots) return true;
    own.total = sum + static_cast<std::uint64_t>(peers_.rank);
    send(Round::kTotals, key, before);
    if (!await_all(Round::kTotals, key, before)) return !++host_.gave_up;
    for (int from = 0; from < peers_.size; ++from) {
      if (random_() % 4 == 0) doze();
      EXPECT_EQ(arena(from).total, expected + static_cast<std::uint64_t>(from));
    }
    return true;
  }

  /// A whole step: every rank reads all rows, and leaves for each a result of it.
  bool step(const StepKey& key, std::uint64_t number) {
    Host::Arena& own = arena(peers_.rank);
    const auto publish = [&] { own.row = row(peers_.rank, number); };
    if (!pass(Round::kDispatch, key, publish)) return false;
    begin_return<TestWords>(peers_);
    for (int from = 0; from < peers_.size; ++from) own.results[from] = arena(from).row + 1;
    if (!pass(Round::kReturn, key)) return false;
    for (int from = 0; from < peers_.size; ++from) {
      EXPECT_EQ(arena(from).results[peers_.rank], row(peers_.rank, number) + 1);
    }
    return true;
  }

  /// When so many signals of a round are sent, nobody waits any more: until so many
  /// ranks have given up, each of which may begin to wait only now.
  void let_time_pass(int rounds_sent, int others) {
    while (host_.rounds_sent < rounds_sent) doze();
    while (host_.gave_up < others) {
      TestWords::clock += 2 * kPatience;
      doze();
    }
  }
  std::string text() const { return to_string(record, peers_.rank, {kPatience, nullptr}); }

  FailureRecord record;

 private:
  std::uint32_t number_before(Round round) const {
    return TestWords::load(&peers_.own().before[static_cast<int>(round)]);
  }
  /// By a block. False: the step has failed.
  bool await_all(Round round, const StepKey& key, std::uint32_t before) {
    const Patience patience{kPatience, &host_.abort};
    bool here = true;
    for (int from = 0; from < peers_.size; ++from) {
      here &= await_signal<TestWords>(peers_, round, key, from, before, patience);
    }
    if (!here) give_up<TestWords>(peers_, round, key, before, record);
    return here;
  }
  bool await_all(Round round, const StepKey& key) {
    return await_all(round, key, number_before(round));
  }
  /// The kernel that sums, which also tells that the experts have ended.
  bool run_sum(const StepKey& key, const std::function<void()>& send) {
    std::atomic<int> blocks_here{0};
    const auto block = [&](int index) {
      if (index == 0) send();
      blocks_here += await_all(Round::kReturn, key) ? 1 : 0;
    };
    constexpr int kBlocks = 3;
    std::vector<std::jthread> blocks;
    for (int index = 0; index < kBlocks; ++index) blocks.emplace_back(block, index);
    blocks.clear();
    return blocks_here == kBlocks;
  }

  static std::uint64_t row(int rank, std::uint64_t number) {
    return number * kMostPeers + static_cast<std::uint64_t>(rank);
  }
  Host::Arena& arena(int rank) { return host_.arenas[static_cast<std::size_t>(rank)]; }
  void send(Round round, const StepKey& key, std::uint32_t before) {
    for (unsigned dozes = random_() % 4; dozes > 0; --dozes) doze();
    for (int to = 0; to < peers_.size; ++to) send_signal<TestWords>(peers_, round, key, to, before);
    ++host_.rounds_sent;
  }

  Host& host_;
  const Peers peers_;
  std::minstd_rand random_;
  const How how_;
};

const StepKey kKey{.layer = 4, .most_tokens = 8, .topk = 2, .row_bytes = 128};
const StepKey kSum{.layer = 4, .most_tokens = 8, .topk = 0, .row_bytes = 128};

TEST(PeerProtocolTest, NobodyReadsTooEarlyOrWritesTooEarlyAgain) {
  // 2 * 2 * (2 + 3 + 5 + 8) * 1400: 10^5 delays.
  for (const int size : {2, 3, 5, 8}) {
    Host host(size);
    host.run([&](int rank) {
      Rank self(host, rank);
      for (std::uint64_t number = 1; number <= 1400; ++number) {
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

TEST(PeerProtocolTest, NumbersStartAgain) {
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

TEST(PeerProtocolTest, NobodyReadsAPartTooEarlyOrWritesItTooEarlyAgain) {
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

TEST(PeerProtocolTest, SumsAndStepsComeInAnyOrder) {
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
TEST(PeerProtocolTest, OnlyInASumARankMayBeOneAhead) {
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

TEST(PeerProtocolTest, WhoDoesNotComeToASumIsNamed) {
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

TEST(PeerProtocolTest, WhoAddsOtherRowsIsNamedByAll) {
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

TEST(PeerProtocolTest, SumsOfManyBytesTakeTwoShots) {
  static_assert(kSumsBegin >= static_cast<std::int64_t>(sizeof(ArenaHead)));
  static_assert(parts_begin(0) != parts_begin(1) && parts_begin(0) == parts_begin(0xFFFFFFFE));
  for (const std::int64_t tokens : {1, 32, 128, 728}) {
    EXPECT_FALSE(takes_two_shots(2, tokens * 5760)) << "they move as much";
  }
  EXPECT_FALSE(takes_two_shots(4, 128 * 5760));
  EXPECT_TRUE(takes_two_shots(4, 512 * 5760));
  EXPECT_FALSE(takes_two_shots(8, 32 * 5760));
  EXPECT_TRUE(takes_two_shots(8, 64 * 5760));
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
