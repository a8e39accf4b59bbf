// Ranks of an MPI job: how they meet, share memory and send messages.
#include <gtest/gtest.h>
#include <mpi.h>

#include <utility>

#include "fusedmoe/wait_hook.h"
#include "mpi/flow.h"
#include "mpi_ranks.h"

// As between hosts, pieces of messages are in flight in other numbers.
extern "C" int MPI_Get_processor_name(char* name, int* length) {
  if (!std::getenv("FUSEDMOE_TEST_MESSAGES")) return PMPI_Get_processor_name(name, length);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const std::string host = "host " + std::to_string(rank % 2);
  host.copy(name, host.size() + 1);
  name[host.size()] = '\0';
  *length = static_cast<int>(host.size());
  return MPI_SUCCESS;
}

namespace fusedmoe::messages_test {

using testing::make_ranks;
using testing::shares;
using testing::world;

TEST(MpiMessages, RanksFindEachOther) {
  EXPECT_EQ(world()->backend(), "mpi");
  EXPECT_EQ(static_cast<int>(world()->ranks_of_host().size()), world()->size());
  const std::vector<std::string> texts = world()->gather(std::to_string(world()->rank()), "test");
  for (int r = 0; r < world()->size(); ++r) EXPECT_EQ(texts[r], std::to_string(r));
}

TEST(MpiMessages, ProcessesOfAHostShareMemory) {
  if (world()->size() == 1) GTEST_SKIP() << "nobody to share it with";
  EXPECT_FALSE(world()->can_lend());
  ASSERT_EQ(world()->share_memory(), shares());
  if (!shares()) return;
  auto* block = static_cast<int*>(world()->take_shared(sizeof(int)));
  EXPECT_TRUE(world()->is_shared(block));
  *block = 10 + world()->rank();
  const auto read = [&](std::span<const void* const> lent) {
    for (int r = 0; r < world()->size(); ++r) EXPECT_EQ(*static_cast<const int*>(lent[r]), 10 + r);
  };
  world()->lend("numbers", block, read, "a test");
  const int elsewhere = 0;  // where the others cannot read it
  EXPECT_THROW(world()->lend("numbers", &elsewhere, read, "a test"), Error);
  world()->give_back_shared(block);
  void* const next = world()->take_shared(1);
  EXPECT_EQ(next, block);
  world()->give_back_shared(next);
}

TEST(MpiMessages, LongMessagesArriveWhole) {
  const int size = world()->size(), rank = world()->rank();
  constexpr std::size_t kPiece = mpi::Piece::kMost;  // the first has 8 bytes of its own
  for (const std::size_t bytes : {std::size_t{1}, kPiece - 8, kPiece, (std::size_t{5} << 20) + 3}) {
    // One stream, which the sender cuts in two, and the receiver in three.
    std::vector<std::string> out, in(size, std::string(bytes, ' '));
    std::vector<Message> sends, receives;
    for (int peer = 0; peer < size; ++peer) {
      out.push_back(std::string(bytes, static_cast<char>('a' + rank)));
      out.back().back() = static_cast<char>('A' + peer);
    }
    const auto add = [](std::vector<Message>& messages, int peer, std::string& text, int parts) {
      const std::size_t part = text.size() / parts;
      for (int i = 0; i < parts; ++i) {
        messages.push_back({peer, &text[i * part], i + 1 < parts ? part : text.size() - i * part});
      }
    };
    for (int peer = size; peer-- > 0;) {
      add(sends, peer, out[peer], 2);
      add(receives, peer, in[peer], 3);
    }
    world()->exchange(sends, receives, {}, "long messages");
    for (int peer = 0; peer < size; ++peer) {
      std::string expected(bytes, static_cast<char>('a' + peer));
      expected.back() = static_cast<char>('A' + rank);
      EXPECT_TRUE(in[peer] == expected) << bytes << " bytes from rank " << peer;
    }
  }
}

TEST(MpiMessages, ATimeoutThatNoClockCanTellIsRefusedBeforeJoining) {
  using std::chrono::milliseconds;
  for (const milliseconds timeout : {milliseconds(0), milliseconds(-1), milliseconds::max()}) {
    try {
      make_ranks(timeout);
      ADD_FAILURE() << timeout.count();
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), "timeout: was " + std::to_string(timeout.count()) +
                                  " ms; must be positive, at most a year");
    }
  }
}

bool others_may_join = false;

/// The others join when rank 0's hook was called, which waits for them.
TEST(MpiMessages, JoiningCallsTheWaitHook) {
  if (world()->size() == 1) GTEST_SKIP() << "nobody to wait for";
  if (world()->rank() == 0) {
    set_wait_hook([] {
      if (!std::exchange(others_may_join, true)) world()->barrier();
    });
  } else {
    world()->barrier();
  }
  make_ranks()->barrier();
  set_wait_hook(nullptr);
}

}  // namespace fusedmoe::messages_test
