// What goes wrong on one process of an MPI job is an Error of all. The last cases of the program:
// MPI keeps what was sent to a rank that has gone.
#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>
#include <utility>

#include "leaks.h"
#include "mpi/left_behind.h"
#include "mpi_ranks.h"
#include "rank_layers.h"

namespace {
int mpi_communicators = 0;  // that were made and not freed
}

// Instead of MPI's own, which these call.
extern "C" int MPI_Comm_idup(MPI_Comm comm, MPI_Comm* made, MPI_Request* request) {
  ++mpi_communicators;
  return PMPI_Comm_idup(comm, made, request);
}
extern "C" int MPI_Comm_free(MPI_Comm* comm) {
  --mpi_communicators;
  return PMPI_Comm_free(comm);
}

namespace fusedmoe::failures_test {

using testing::forward_exactly;
using testing::make_layer_weights;
using testing::make_ranks;
using testing::random_tensor;
using testing::rank_options;
using testing::shares;
using testing::world;

constexpr std::int64_t kTokens = 9;

TEST(MpiFailures, WhatDiffersIsNamed) {
  if (world()->size() == 1) GTEST_SKIP() << "one rank agrees with itself";
  LayerWeights weights = make_layer_weights({});
  if (world()->rank() == 1) weights.router.topk = 3;
  try {
    const MoeLayer layer(weights, rank_options({}, DType::kBF16, kTokens, world()));
    ADD_FAILURE() << "ranks differ";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("topk"), std::string::npos) << error.what();
  }
}

/// A failed communicator is freed when the next one is made.
TEST(MpiFailures, AHundredFailuresLeakNothing) {
  if (world()->size() == 1) GTEST_SKIP() << "nothing travels";
  const int before = mpi_communicators;
  testing::expect_no_leaks([&](int round) {
    const auto mine = make_ranks();
    EXPECT_LE(mpi_communicators, before + 1) << round;
    const MoeLayer layer(make_layer_weights({}), rank_options({}, DType::kBF16, kTokens, mine));
    const Tensor x = random_tensor(DType::kBF16, {2, 64}, 1, 3);
    forward_exactly(layer, x, kTokens);
    if (mine->rank() == round % mine->size()) return mine->abort("once more");
    try {
      forward_exactly(layer, x, kTokens);
      ADD_FAILURE() << "a rank has failed";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("once more"), std::string::npos) << error.what();
    }
  });
  const auto last = make_ranks();
  EXPECT_EQ(mpi_communicators, before + 1);
}

/// A rank may go on reading the memory that a failed rank has lent. Where it waits for that rank,
/// it gets an Error with the reason.
TEST(MpiFailures, AFailedRankIsNamedToThoseWhoWaitForItsMemory) {
  if (world()->size() == 1 || !shares()) GTEST_SKIP() << "nothing is lent";
  const auto mine = make_ranks();
  ASSERT_TRUE(mine->share_memory());
  auto* block = static_cast<int*>(mine->take_shared(sizeof(int)));
  if (mine->rank() == 1) {
    mine->abort("no more");
    EXPECT_THROW(mine->take_shared(1), Error);
  } else {
    try {
      mine->lend(
          "numbers", block, [](std::span<const void* const>) {}, "a test");
      ADD_FAILURE() << "a rank has failed";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "rank 1: no more");
    }
  }
  world()->barrier();
}

TEST(MpiFailures, AnotherNumberOfBytesIsAnErrorOfAll) {
  if (world()->size() == 1) GTEST_SKIP() << "nothing travels";
  for (const auto& [fewer, more] : {std::pair(4, 8), std::pair(8, 1 << 20)}) {
    const auto mine = make_ranks();
    std::string out(1 << 20, 'x'), in(1 << 20, ' '), error;
    const int rank = mine->rank(), bytes = rank == 0 ? fewer : more;
    const Message send{1 - rank, out.data(), static_cast<std::size_t>(bytes)};
    const Message receive{1 - rank, in.data(), static_cast<std::size_t>(bytes)};
    try {
      if (rank < 2) mine->exchange({&send, 1}, {&receive, 1}, {}, "rows");
    } catch (const Error& each) {
      error = each.what();
    }
    const std::vector<std::string> errors = world()->gather(error, "a test");
    EXPECT_NE(errors[0].find("message: was"), std::string::npos) << errors[0];
    EXPECT_EQ(errors[0], errors[1]);
  }
}

/// Others that meet say nothing about a rank that may have stopped.
TEST(MpiFailures, WhatIsLeftBehindWaitsForItsOwnPeers) {
  world();
  EXPECT_EQ(mpi::world_ranks(MPI_COMM_SELF), std::vector<int>{world()->rank()});
  mpi::LeftBehind left;
  int number = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Irecv(&number, 1, MPI_INT, 0, 0, MPI_COMM_SELF, &request);
  left.add({request, nullptr}, {1, 3});
  const std::vector<int> one{0, 1, 2}, other{0, 3};
  EXPECT_TRUE(left.waits_for_peer());
  left.ranks_have_met(one);
  EXPECT_TRUE(left.waits_for_peer());
  left.ranks_have_met(other);
  EXPECT_FALSE(left.waits_for_peer());
  MPI_Send(&number, 1, MPI_INT, 0, 0, MPI_COMM_SELF);
  left.ranks_have_met(one);
}

/// Rank 1 is stopped while bytes move between it and rank 0, again and again. Rank 0 gives up at
/// its deadline, and from then on MPI may no longer touch what it was given.
TEST(MpiFailures, APeerThatStopsInAnExchangeHoldsNoMemory) {
  if (world()->size() == 1) GTEST_SKIP() << "nobody to stop";
  constexpr std::size_t kBytes = 8 << 20;
  const std::vector<std::string> processes = world()->gather(std::to_string(getpid()), "a test");
  const auto mine = make_ranks(std::chrono::seconds(5));
  const int rank = mine->rank();
  std::string out(kBytes, 'x'), in(kBytes, ' '), error;
  const pid_t peer = std::stoi(processes[rank == 0 ? 1 : 0]);
  std::thread stops;
  std::atomic<bool> over{false};
  if (rank == 0) {
    stops = std::thread([&] {
      const volatile char& first = in.front();
      while (first != 'x' && !over) std::this_thread::yield();
      if (!over) kill(peer, SIGSTOP);
    });
  }
  const Message send{1 - rank, out.data(), kBytes}, receive{1 - rank, in.data(), kBytes};
  try {
    for (int step = 0; rank < 2 && step < 100000; ++step) {
      mine->exchange({&send, 1}, {&receive, 1}, {}, "rows");
    }
  } catch (const Error& each) {
    error = each.what();
  }
  if (rank == 0) {
    over = true;
    stops.join();
    std::fill(out.begin(), out.end(), 'y');
    std::fill(in.begin(), in.end(), 'z');
    kill(peer, SIGCONT);
    EXPECT_EQ(error, "rows: rank 1 did not arrive within 5 s");
    EXPECT_THROW(mine->exchange({&send, 1}, {}, {}, "rows"), Error) << "it is dead";
  }
  const std::vector<std::string> errors = world()->gather(error, "a test");
  EXPECT_EQ(errors[1], errors[0]);
  make_ranks()->barrier();  // MPI goes on meanwhile
  testing::exchange_numbers(*world());
  if (rank == 0) {
    EXPECT_TRUE(in == std::string(kBytes, 'z'));
  }
}

/// The last case: MPI keeps what was sent to rank 1, and nobody takes it.
TEST(MpiFailures, ZAMissingRankIsNamedWithinTheDeadline) {
  if (world()->size() == 1) GTEST_SKIP() << "nobody to miss";
  for (const std::chrono::milliseconds timeout : testing::kDeadlines) {
    const auto begin = std::chrono::steady_clock::now();
    std::string error;
    std::shared_ptr<Communicator> mine;
    try {
      mine = make_ranks(timeout);
      int number = 0, other = 0;
      const Message send{1, &number, sizeof number}, receive{1, &other, sizeof other};
      if (mine->rank() != 1) mine->exchange({&send, 1}, {&receive, 1}, {}, "a step");
    } catch (const Error& each) {
      error = each.what();
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    if (took > timeout + std::chrono::seconds(1)) error += ", more than 1 s later";
    // Nobody leaves before the others have seen it, and all try a longer deadline or none.
    std::vector<std::string> errors = world()->gather(error, "a test");
    errors.erase(errors.begin() + 1);
    const std::string expected = testing::within("a step: rank 1 did not arrive", timeout);
    const bool all = std::count(errors.begin(), errors.end(), expected) == world()->size() - 1;
    if (all) return;
    if (timeout == std::end(testing::kDeadlines)[-1]) ADD_FAILURE() << errors[0];
  }
}

}  // namespace fusedmoe::failures_test
