// Ranks that read each other's memory, as threads that take steps and sums by the functions of
// cuda/peers/protocol.h.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/peers/host_words.h"
#include "cuda/peers/protocol.h"

namespace fusedmoe::cuda::peer_protocol_test {

/// For a thread that waits: a busy machine lets it go on soon, as one that yields it would not.
inline void doze() {
  std::this_thread::sleep_for(std::chrono::microseconds(1));
}

/// The host's words, with a clock that stands still until a test moves it.
struct TestWords : HostWords {
  static void pause() { doze(); }
  static inline std::atomic<std::uint64_t> clock{0};
  static std::uint64_t nanoseconds() { return clock.load(); }
};

inline constexpr std::uint64_t kPatience = 1000000;

/// All that ranks share. Rows are plain words: ThreadSanitizer sees whoever reads them too early or
/// writes them too early again.
struct Host {
  struct Arena {
    ArenaHead head;
    std::uint64_t row = 0;                   // for all to read in the return
    std::uint64_t results[kMostPeers] = {};  // of the rank of the same number
    std::uint64_t parts[2] = {};             // of sums, by turns
    std::uint64_t totals[2] = {};            // of this rank's share, by turns
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
    return sum_in_pieces(key, number, 1, two_shots);
  }
  /// The same in so many pieces of the key's tokens, which have numbers from this one on: the last
  /// in one shot or two.
  bool sum_in_pieces(const StepKey& key, std::uint64_t number, int pieces, bool two_shots) {
    const std::uint32_t before = number_before(Round::kParts);
    const auto key_of = [&](int piece) {
      StepKey of_all_from_there = key;
      of_all_from_there.most_tokens *= static_cast<std::uint32_t>(pieces - piece);
      return of_all_from_there;
    };
    leave(number, before);
    tell(key_of(0), before);
    for (int i = 0; i < pieces; ++i) {
      const StepKey next = key_of(i + 1);
      const StepKey* const told = i + 1 < pieces ? &next : nullptr;
      if (!add(key_of(i), number + i, before + i, two_shots || told, told)) return false;
    }
    return true;
  }

  /// A whole step: every rank reads all rows, and leaves for each rank a result of its row.
  bool step(const StepKey& key, std::uint64_t number) {
    Host::Arena& own = arena(peers_.rank);
    const auto publish = [&] { own.row = row(peers_.rank, number); };
    if (!pass(Round::kDispatch, key, publish)) return false;
    begin_return<TestWords>(peers_);
    for (int of = 0; of < peers_.size; ++of) arena(of).results[peers_.rank] = arena(of).row + 1;
    if (!pass(Round::kReturn, key)) return false;
    for (int from = 0; from < peers_.size; ++from) {
      EXPECT_EQ(own.results[from], row(peers_.rank, number) + 1);
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
  void leave(std::uint64_t number, std::uint32_t before) {
    arena(peers_.rank).parts[before % 2] = row(peers_.rank, number);
  }
  void tell(const StepKey& key, std::uint32_t before) {
    send(Round::kParts, key, before);
    end_sum<TestWords>(peers_, before);
  }
  /// Behind what tells this sum's parts; tells those of the next, if there is one.
  bool add(const StepKey& key, std::uint64_t number, std::uint32_t before, bool two_shots,
           const StepKey* next) {
    if (!await_all(Round::kParts, key, before)) return !++host_.gave_up;
    std::uint64_t sum = 0, expected = 0;
    for (int from = 0; from < peers_.size; ++from) {
      if (random_() % 4 == 0) doze();
      sum += arena(from).parts[before % 2];
      expected += row(from, number);
    }
    EXPECT_EQ(sum, expected);
    if (!two_shots) return true;
    arena(peers_.rank).totals[before % 2] = sum + static_cast<std::uint64_t>(peers_.rank);
    send(Round::kTotals, key, before);
    if (next) leave(number + 1, before + 1);
    if (!await_all(Round::kTotals, key, before)) return !++host_.gave_up;
    if (next) tell(*next, before + 1);
    for (int from = 0; from < peers_.size; ++from) {
      if (random_() % 4 == 0) doze();
      EXPECT_EQ(arena(from).totals[before % 2], expected + static_cast<std::uint64_t>(from));
    }
    return true;
  }

  Host& host_;
  const Peers peers_;
  std::minstd_rand random_;
  const How how_;
};

inline constexpr StepKey kKey{.layer = 4, .most_tokens = 8, .topk = 2, .row_bytes = 128};
inline constexpr StepKey kSum{.layer = 4, .most_tokens = 8, .topk = 0, .row_bytes = 128};

}  // namespace fusedmoe::cuda::peer_protocol_test
