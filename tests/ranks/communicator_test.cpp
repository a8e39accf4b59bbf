// Communicators: what ranks tell each other, and how they learn that one is missing.
#include "fusedmoe/comm.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <exception>
#include <functional>
#include <latch>
#include <stdexcept>

#include "fusedmoe/error.h"
#include "fusedmoe/wait_hook.h"
#include "ranks.h"
#include "raw_sockets.h"

namespace fusedmoe::communicator_test {

using testing::Communicators;
using testing::errors_of_ranks;
using testing::exchange_numbers;
using testing::expect_late;
using testing::kImpatient;
using testing::kPatient;
using testing::run_ranks;

TEST(CommunicatorTest, RanksOfThreadsExchangeAndGather) {
  for (const int size : {1, 2, 3, 7}) {
    const Communicators comms = make_thread_communicators(size, {kPatient});
    run_ranks(size, [&](int rank) {
      Communicator& comm = *comms[rank];
      EXPECT_EQ(comm.rank(), rank);
      EXPECT_EQ(comm.size(), size);
      EXPECT_EQ(comm.backend(), "threads");
      EXPECT_EQ(static_cast<int>(comm.ranks_of_host().size()), size);
      EXPECT_TRUE(comm.peer_access(0, size - 1));
      exchange_numbers(comm);
      const std::vector<std::string> texts = comm.gather(std::to_string(rank), "test");
      for (int r = 0; r < size; ++r) EXPECT_EQ(texts[r], std::to_string(r));
      comm.barrier();
      exchange_numbers(comm);
    });
  }
}

TEST(CommunicatorTest, MessagesKeepTheirOrderAndEmptyOnesDoNotTravel) {
  const Communicators comms = make_thread_communicators(2, {kPatient});
  run_ranks(2, [&](int rank) {
    std::array<int, 3> numbers{1, 2, 3}, got{};
    if (rank == 0) {
      const Message sends[] = {{1, &numbers[0], 4}, {1, nullptr, 0}, {1, &numbers[1], 8}};
      comms[0]->exchange(sends, {}, {}, "test");
    } else {
      const Message receives[] = {{0, &got[0], 4}, {0, &got[1], 8}};
      comms[1]->exchange({}, receives, {}, "test");
      EXPECT_EQ(got, numbers);
    }
  });
}

TEST(CommunicatorTest, PartsHaveRanksOfTheirOwn) {
  const Communicators comms = make_thread_communicators(5, {kPatient});
  run_ranks(5, [&](int rank) {
    const std::shared_ptr<Communicator> part = comms[rank]->split(rank % 2);
    EXPECT_EQ(part->rank(), rank / 2);
    EXPECT_EQ(part->size(), rank % 2 == 0 ? 3 : 2);
    // The parts do different numbers of steps, then all go on together.
    for (int i = 0; i <= rank % 2; ++i) exchange_numbers(*part);
    exchange_numbers(*part->split(0));
    exchange_numbers(*comms[rank]);
  });
}

/// Also where only some ranks were in such a part before.
TEST(CommunicatorTest, SharedPartsAreThoseOfTheSameRanks) {
  const Communicators comms = make_thread_communicators(4);
  run_ranks(4, [&](int rank) {
    const auto half = comms[rank]->shared_part(rank / 2);
    EXPECT_EQ(half->size(), 2);
    EXPECT_EQ(comms[rank]->shared_part(rank / 2 + 5), half);
    const auto other = comms[rank]->shared_part(rank < 2 ? 0 : rank);
    EXPECT_EQ(other == half, rank < 2);
    EXPECT_NE(comms[rank]->shared_part(0), half);
    exchange_numbers(*half);
    exchange_numbers(*other);
    comms[rank]->barrier();
  });
}

/// What the ranks of two parts, {1, 2} and {0, 3}, throw when `step` runs on theirs.
std::vector<std::string> errors_of_parts(
    std::chrono::milliseconds timeout,
    const std::function<void(int rank, Communicator& part)>& step) {
  const Communicators comms = make_thread_communicators(4, {timeout});
  return errors_of_ranks(4, [&](int rank) {
    const auto part = comms[rank]->split(rank == 0 || rank == 3 ? 1 : 0);
    EXPECT_EQ(part->rank(), rank < 2 ? 0 : 1);
    EXPECT_EQ(part->global_rank(part->rank()), rank);
    comms[rank]->barrier();
    step(rank, *part);
  });
}

TEST(CommunicatorTest, LanesHaveStepsOfTheirOwnAndEndWithTheWhole) {
  const Communicators comms = make_thread_communicators(2, {kPatient});
  run_ranks(2, [&](int rank) {
    Communicator& all = *comms[rank];
    all.next_step();
    const auto lane = all.lane(1);
    EXPECT_EQ(all.lane(1), lane);
    EXPECT_NE(all.lane(2), lane);
    EXPECT_EQ(lane->rank(), rank);
    EXPECT_EQ(lane->size(), 2);
    EXPECT_EQ(lane->backend(), "none");
    EXPECT_LT(lane->next_step(), all.next_step());
    lane->barrier();
    all.barrier();
    if (rank == 0) lane->abort("enough");
    EXPECT_THROW(all.barrier(), Error);
  });
}

/// Whoever reads an error, in this part or another, knows ranks by their numbers in the whole.
TEST(CommunicatorTest, ErrorsOfPartsNameRanksOfTheWhole) {
  expect_late("barrier: rank 3 did not arrive", {0}, [](auto timeout) {
    return errors_of_parts(timeout, [](int rank, Communicator& part) {
      if (rank != 3) part.barrier();
    });
  });
  expect_late("numbers: rank 2 did not arrive", {1}, [](auto timeout) {
    return errors_of_parts(timeout, [](int rank, Communicator& part) {
      if (rank != 2) exchange_numbers(part);
    });
  });
  std::latch has_aborted(1);
  auto errors = errors_of_parts(kPatient, [&](int rank, Communicator& part) {
    if (rank == 2) {
      part.abort("no memory left");
      has_aborted.count_down();
      return;
    }
    exchange_numbers(*part.split(0));  // a part of a part
    if (rank == 1) return;
    has_aborted.wait();
    part.abort("rank 1 goes on?");
  });
  EXPECT_EQ(errors[1], "rank 2: no memory left");
  errors = errors_of_parts(kPatient, [](int rank, Communicator& part) {
    const int mine = 0;
    part.lend(
        rank == 3 ? "sums" : "rows", &mine, [](auto) {}, "a step");
  });
  EXPECT_NE(errors[0].find("rank 0 lends rows, but rank 3 lends sums"), std::string::npos)
      << errors[0];
}

TEST(CommunicatorTest, AStepThatFailsOnOneRankIsAnErrorOfAllAtOnce) {
  const Communicators comms = make_thread_communicators(4, {kPatient});
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of_ranks(4, [&](int rank) {
    const auto part = comms[rank]->split(rank % 2);
    part->together(
        [&] {
          if (rank == 3) throw std::runtime_error("cannot open layer 7");
        },
        "loading");
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kPatient / 4);
  EXPECT_EQ(errors, (std::vector<std::string>{"", "rank 3: cannot open layer 7", "",
                                              "rank 3: cannot open layer 7"}));
  const auto others = errors_of_ranks(4, [&](int rank) {
    comms[rank]->together(
        [&] {
          if (rank == 0) throw 7;
          if (rank == 2) throw std::runtime_error("");
        },
        "loading");
  });
  for (const auto& error : others) EXPECT_EQ(error, "rank 0: an unknown exception; rank 2: ");
  run_ranks(4, [&](int rank) { exchange_numbers(*comms[rank]); });  // the communicators still work
}

/// Who cannot make its communicator tells those who wait for it.
TEST(CommunicatorTest, ARankThatCannotJoinTellsTheOthers) {
  const auto control = make_thread_control_plane();
  const auto errors = errors_of_ranks(3, [&](int rank) {
    CommunicatorOptions options{kPatient};
    if (rank == 1) options.timeout = std::chrono::milliseconds(0);
    make_communicator(rank, 3, control, options);
  });
  for (const std::string& error : {errors[0], errors[2]}) {
    EXPECT_EQ(error, "rank 1: timeout: was 0 ms; must be positive, at most a year");
  }
}

TEST(CommunicatorTest, AMissingRankHasAName) {
  Communicators comms;
  std::vector<std::string> errors;
  expect_late("numbers: rank 2 did not arrive", {0, 1}, [&](auto timeout) {
    comms = make_thread_communicators(3, {timeout});
    return errors = errors_of_ranks(3, [&](int rank) {
             if (rank != 2) exchange_numbers(*comms[rank]);
           });
  });
  EXPECT_EQ(comms[2]->status(), errors[0]) << "final, also for the one that comes too late";
  EXPECT_THROW(comms[2]->barrier(), Error);
  EXPECT_THROW(exchange_numbers(*comms[2]), Error);
}

TEST(CommunicatorTest, AGatherNamesAllThatAreMissing) {
  expect_late("agreement: ranks 1, 3 did not arrive", {0, 2}, [](auto timeout) {
    const Communicators comms = make_thread_communicators(4, {timeout});
    return errors_of_ranks(4, [&](int rank) {
      if (rank % 2 == 0) comms[rank]->gather("x", "agreement");
    });
  });
}

TEST(CommunicatorTest, AnAbortEndsTheWaitOfTheOthers) {
  const Communicators comms = make_thread_communicators(3, {kPatient});
  const auto errors = errors_of_ranks(3, [&](int rank) {
    if (rank == 1) return comms[1]->abort("no memory left");
    if (rank == 0) exchange_numbers(*comms[0]);
    if (rank == 2) comms[2]->barrier();
  });
  EXPECT_EQ(errors[0], "rank 1: no memory left");
  EXPECT_EQ(errors[2], errors[0]);
  for (const auto& comm : comms) EXPECT_EQ(comm->status(), errors[0]);
}

/// A control plane whose keeper, rank 0, stops or dies.
class FailingPlane final : public ControlPlane {
 public:
  void post(const std::string& name, std::string_view text) override {
    if (dead) throw Error::communication("rank 0 has died");
    if (!silent) plane_->post(name, text);
  }
  std::optional<std::string> read(const std::string& name,
                                  std::chrono::milliseconds timeout) override {
    if (dead) throw Error::communication("rank 0 has died");
    return silent ? std::nullopt : plane_->read(name, timeout);
  }
  std::optional<int> silent_rank() const override {
    return silent ? std::optional(0) : std::nullopt;
  }
  std::atomic<bool> silent{false}, dead{false};

 private:
  std::shared_ptr<ControlPlane> plane_ = make_thread_control_plane();
};

TEST(CommunicatorTest, AFailureIsFinalWithoutTheControlPlaneToo) {
  for (const bool dies : {false, true}) {
    const auto plane = std::make_shared<FailingPlane>();
    Communicator comm(0, 1, plane, nullptr, {kImpatient}), other(0, 1, plane, nullptr);
    (dies ? plane->dead : plane->silent) = true;
    EXPECT_THROW(comm.barrier(), Error);
    const char* reason = dies ? "rank 0 has died" : "barrier: rank 0 did not arrive within 0.15 s";
    EXPECT_EQ(comm.status(), reason);
    other.abort("enough");
    EXPECT_EQ(other.status(), dies ? reason : "rank 0: enough");
    plane->silent = false;
    plane->dead = false;
    EXPECT_THROW(comm.barrier(), Error) << "final";
  }
}

TEST(CommunicatorTest, ASilentKeeperHasItsNumberInEveryPart) {
  expect_late("barrier: rank 0 did not arrive", {1, 2}, [](auto timeout) {
    const auto plane = std::make_shared<FailingPlane>();
    return errors_of_ranks(3, [&](int rank) {
      Communicator comm(rank, 3, plane, nullptr, {timeout});
      const auto part = comm.split(rank > 0);  // {0}, {1, 2}
      comm.barrier();
      if (rank == 0) plane->silent = true;
      while (!plane->silent) std::this_thread::yield();
      if (rank > 0) part->barrier();
    });
  });
}

TEST(CommunicatorTest, AnotherNumberOfBytesIsAnErrorOfAll) {
  const Communicators comms = make_thread_communicators(2, {kPatient});
  const auto errors = errors_of_ranks(2, [&](int rank) {
    char memory[16] = {};
    const Message message{1 - rank, memory, rank == 0 ? std::size_t{8} : std::size_t{16}};
    comms[rank]->exchange({&message, 1}, {&message, 1}, {}, "rows");
  });
  EXPECT_NE(errors[0].find("bytes"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[0], errors[1]);
}

TEST(CommunicatorTest, RanksLendTheirMemory) {
  const Communicators comms = make_thread_communicators(4, {kPatient});
  run_ranks(4, [&](int rank) {
    const auto part = comms[rank]->split(rank % 2);
    for (int round = 0; round < 20; ++round) {
      const int mine = rank * 100 + round;
      std::vector<int> got;
      const auto read = [&](std::span<const void* const> lent) {
        for (const void* each : lent) got.push_back(*static_cast<const int*>(each));
      };
      part->lend("numbers", &mine, read, "a step");
      EXPECT_EQ(got, (std::vector<int>{rank % 2 * 100 + round, (rank % 2 + 2) * 100 + round}));
    }
  });
  const auto errors = errors_of_ranks(4, [&](int rank) {
    const int mine = 0;
    comms[rank]->lend(
        rank == 2 ? "sums" : "rows", &mine, [](auto) {}, "a step");
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("rank 0 lends rows, but rank 2 lends sums"), std::string::npos) << error;
  }
}

TEST(CommunicatorTest, NobodyReadsBeforeAllHaveLent) {
  expect_late("a step: rank 2 did not arrive", {0, 1}, [](auto timeout) {
    const Communicators comms = make_thread_communicators(3, {timeout});
    return errors_of_ranks(3, [&](int rank) {
      if (rank == 2) return;  // never comes
      auto mine = std::make_unique<int>(rank);
      comms[rank]->lend(
          "numbers", mine.get(), [](auto) { FAIL() << "without rank 2"; }, "a step");
    });
  });
}

/// Rank 0 gives up while the others read what it has lent; they read on, and learn why.
TEST(CommunicatorTest, WhatIsLentStaysUntilItIsRead) {
  const Communicators comms = make_thread_communicators(3, {kPatient});
  std::atomic<int> reading{0};
  std::atomic<bool> gives_up{false};
  const auto errors = errors_of_ranks(3, [&](int rank) {
    std::atomic<int> mine{rank + 100};
    const auto read = [&](std::span<const void* const> lent) {
      ++reading;
      while (reading < 3) std::this_thread::yield();
      if (rank == 0) {
        gives_up = true;
        throw std::runtime_error("no memory for sums");
      }
      while (!gives_up) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // rank 0 withdraws meanwhile
      EXPECT_EQ(static_cast<const std::atomic<int>*>(lent[0])->load(), 100);
    };
    try {
      comms[rank]->lend("numbers", &mine, read, "a step");
    } catch (...) {
      mine = -1;  // nobody may see it any more
      throw;
    }
  });
  EXPECT_EQ(errors[0], "no memory for sums");
  EXPECT_EQ(comms[0]->status(), "rank 0: a step: no memory for sums");
  for (const int rank : {1, 2}) {
    EXPECT_TRUE(errors[rank].empty() || errors[rank] == comms[0]->status()) << errors[rank];
  }
  EXPECT_THROW(exchange_numbers(*comms[1]), Error);
}

/// Rank 1 waits for rank 2 when rank 0 fails, which has lent rank 1 its memory.
TEST(CommunicatorTest, WhatIsNotYetReadHoldsNobodyUp) {
  const Communicators comms = make_thread_communicators(3, {kPatient});
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of_ranks(3, [&](int rank) {
    int mine = rank;
    if (rank < 2) {
      comms[rank]->lend(
          "numbers", &mine, [](auto) { FAIL() << "without rank 2"; }, "a step");
    } else {
      // Late, so that the others are waiting.
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const Message message{0, &mine, sizeof mine};
      comms[rank]->exchange({&message, 1}, {}, {}, "another");
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kPatient / 4);
  EXPECT_EQ(errors[0].find("rank 0: a step: message: was 4 bytes from rank 2"), 0) << errors[0];
  EXPECT_EQ(errors[1], errors[0]);
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(CommunicatorTest, BuildFailRebuildAHundredTimes) {
  for (int round = 0; round < 100; ++round) {
    const Communicators comms = make_thread_communicators(2, {kPatient});
    const auto errors = errors_of_ranks(2, [&](int rank) {
      exchange_numbers(*comms[rank]);
      if (rank == round % 2) return comms[rank]->abort("again");
      exchange_numbers(*comms[rank]);
    });
    EXPECT_FALSE(errors[1 - round % 2].empty());
  }
}

/// A program's own reason to end a wait, as a signal.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

/// The hook throws in the thread that has set this.
thread_local bool interrupting = false;

TEST(CommunicatorTest, AProgramEndsAWaitForRanks) {
  set_wait_hook([] {
    if (interrupting) throw Interrupted();
  });
  const testing::RawListener full;  // who connects gets no answer at all
  const testing::RawSocket waits_there(full.port(), "");
  const std::vector<std::function<void(Communicator&)>> waits{
      [](Communicator& comm) { comm.barrier(); },
      [](Communicator& comm) { exchange_numbers(comm); },
      [&](Communicator&) { make_tcp_control_plane(1, 2, "127.0.0.1", full.port(), kPatient); },
      // Nobody listens there.
      [](Communicator&) { make_tcp_control_plane(1, 2, "127.0.0.1", 1, kPatient); }};
  for (const auto& wait : waits) {
    const Communicators ranks = make_thread_communicators(2, {kPatient});
    interrupting = true;
    EXPECT_THROW(wait(*ranks[0]), Interrupted);
    interrupting = false;
    const bool through_ranks = &wait < &waits[2];
    EXPECT_EQ(ranks[1]->status().empty(), !through_ranks) << ranks[1]->status();
  }
  set_wait_hook(nullptr);
}

}  // namespace fusedmoe::communicator_test
