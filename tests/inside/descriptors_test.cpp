// File descriptors that go from one process of a host to another.
#include "comm/descriptors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <thread>
#include <vector>

#include "fusedmoe/error.h"

namespace fusedmoe::comm::descriptors_test {

using std::chrono::milliseconds;

constexpr std::chrono::seconds kPatient(60);

struct Pipe {
  Pipe() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::pipe(ends), 0);
    out = Socket(ends[0]);
    in = Socket(ends[1]);
  }
  Socket out, in;
};

TEST(DescriptorSocketTest, AnotherProcessWritesToThePipeItGot) {
  const DescriptorSocket here;
  const Pipe pipe;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    DescriptorSocket().send(here.address(), 3, pipe.in.get());
    _exit(0);
  }
  int rank = -1, status = -1;
  const Socket got = here.receive(rank, SocketClock::now() + kPatient);
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(rank, 3);
  ASSERT_EQ(::write(got.get(), "x", 1), 1);
  char byte = 0;
  EXPECT_EQ(::read(pipe.out.get(), &byte, 1), 1);
  EXPECT_EQ(byte, 'x');
  EXPECT_NE(fcntl(got.get(), F_GETFD) & FD_CLOEXEC, 0);
}

// Every process of the host may write there; only ranks know the token, the first characters.
TEST(DescriptorSocketTest, WhatAStrangerSendsIsDropped) {
  const DescriptorSocket here, other;
  const Pipe pipe;
  std::string wrong = here.address();
  wrong.front() = wrong.front() == '0' ? '1' : '0';
  other.send(wrong, 1, pipe.in.get());
  other.send(here.address(), 2, pipe.in.get());
  int rank = -1;
  const Socket got = here.receive(rank, SocketClock::now() + kPatient);
  EXPECT_EQ(rank, 2);
}

/// Of each rank of `sockets`, that of the others.
std::map<int, std::string> others_of(int rank, const std::vector<DescriptorSocket>& sockets) {
  std::map<int, std::string> others;
  for (int r = 0; r < static_cast<int>(sockets.size()); ++r) {
    if (r != rank) others.emplace(r, sockets[r].address());
  }
  return others;
}

// Linux keeps eleven datagrams for a socket. Here strangers have sent those of rank 0 before.
TEST(DescriptorSocketTest, MoreRanksThanASocketHasRoomFor) {
  constexpr int kRanks = 24;
  const std::vector<DescriptorSocket> sockets(kRanks);
  const Pipe pipe;
  std::string wrong = sockets[0].address();
  wrong.front() = wrong.front() == '0' ? '1' : '0';
  while (sockets[1].send(wrong, 0, pipe.in.get())) {
  }
  std::atomic<int> right{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto got = sockets[rank].exchange(rank, pipe.in.get(), others_of(rank, sockets),
                                              SocketClock::now() + kPatient, [] {});
      right += static_cast<int>(got.size() == kRanks - 1 && !got.contains(rank));
    });
  }
  for (std::thread& each : ranks) each.join();
  EXPECT_EQ(right, kRanks);
}

TEST(DescriptorSocketTest, NobodyWaitsForEver) {
  const DescriptorSocket here, other;
  const Pipe pipe;
  int rank = -1;
  EXPECT_FALSE(here.receive(rank, SocketClock::now() + milliseconds(10)));
  const auto exchange = [&](SocketClock::duration patience,
                            const std::function<void()>& meanwhile) {
    here.exchange(0, pipe.in.get(), {{1, other.address()}}, SocketClock::now() + patience,
                  meanwhile);
  };
  EXPECT_THROW(exchange(milliseconds(10), [] {}), Error);
  EXPECT_THROW(exchange(kPatient, [] { throw Error::communication("a rank has failed"); }), Error);
  std::string gone;
  {
    const DescriptorSocket short_lived;
    gone = short_lived.address();
  }
  EXPECT_THROW(here.send(gone, 0, pipe.in.get()), Error);
  EXPECT_THROW(here.send("short", 0, pipe.in.get()), Error);
}

}  // namespace fusedmoe::comm::descriptors_test
