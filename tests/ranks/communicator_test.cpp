// Communicators: what ranks tell each other, and how they learn that one is missing.
#include "fusedmoe/comm.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>

#include "fusedmoe/error.h"
#include "ranks.h"

namespace fusedmoe {
namespace {

using testing::errors_of_ranks;
using testing::kImpatient;
using testing::kPatient;
using testing::run_ranks;
using Communicators = std::vector<std::shared_ptr<Communicator>>;

/// Every rank sends rank * 100 + peer to every peer, with itself.
void exchange_numbers(Communicator& comm) {
  const int size = comm.size();
  std::vector<int> out(size), in(size, -1);
  std::vector<Message> sends, receives;
  for (int peer = 0; peer < size; ++peer) {
    out[peer] = comm.rank() * 100 + peer;
    sends.push_back({peer, &out[peer], sizeof(int)});
    receives.push_back({peer, &in[peer], sizeof(int)});
  }
  comm.exchange(sends, receives, {}, "numbers");
  for (int peer = 0; peer < size; ++peer) EXPECT_EQ(in[peer], peer * 100 + comm.rank());
}

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

TEST(CommunicatorTest, AMissingRankHasAName) {
  const Communicators comms = make_thread_communicators(3, {kImpatient});
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of_ranks(3, [&](int rank) {
    if (rank != 2) exchange_numbers(*comms[rank]);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kImpatient + std::chrono::seconds(2));
  EXPECT_EQ(errors[0], "numbers: rank 2 did not arrive within 0.15 s");
  EXPECT_EQ(errors[1], errors[0]);
  EXPECT_EQ(comms[2]->status(), errors[0]) << "final, also for the one that comes too late";
  EXPECT_THROW(comms[2]->barrier(), Error);
  EXPECT_THROW(exchange_numbers(*comms[2]), Error);
}

TEST(CommunicatorTest, AGatherNamesAllThatAreMissing) {
  const Communicators comms = make_thread_communicators(4, {kImpatient});
  const auto errors = errors_of_ranks(4, [&](int rank) {
    if (rank % 2 == 0) comms[rank]->gather("x", "agreement");
  });
  EXPECT_EQ(errors[0], "agreement: ranks 1, 3 did not arrive within 0.15 s");
  EXPECT_EQ(errors[2], errors[0]);
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

TEST(CommunicatorTest, FilesAndTcpFindTheRanksToo) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("fusedmoe_control_" + std::to_string(getpid()));
  run_ranks(3, [&](int rank) {
    Communicator comm(rank, 3, make_file_control_plane(folder.string()), nullptr, {kPatient});
    EXPECT_EQ(comm.gather("f" + std::to_string(rank), "test")[2], "f2");
    EXPECT_EQ(comm.backend(), "none");
    comm.split(rank == 0)->barrier();
    comm.barrier();
  });
  std::filesystem::remove_all(folder);

  // An engine's own collective tells the address; here that of other communicators.
  const Communicators engine = make_thread_communicators(3, {kPatient});
  run_ranks(3, [&](int rank) {
    const auto gather = [&](const std::string& text) {
      return engine[rank]->gather(text, "engine");
    };
    Communicator comm(rank, 3, make_control_plane(rank, 3, gather), nullptr, {kPatient});
    EXPECT_EQ(comm.gather(std::string(100000, 'a' + rank), "test")[1], std::string(100000, 'b'));
    comm.split(rank == 0)->barrier();
  });
}

TEST(CommunicatorTest, ARankThatDiesIsNoticedOverTcp) {
  const Communicators engine = make_thread_communicators(3, {kPatient});
  const auto errors = errors_of_ranks(3, [&](int rank) {
    const auto gather = [&](const std::string& text) {
      return engine[rank]->gather(text, "engine");
    };
    const auto control = make_control_plane(rank, 3, gather);
    Communicator comm(rank, 3, control, nullptr, {kImpatient});
    if (rank == 1) return;  // leaves in order: then it is only late
    comm.barrier();
  });
  EXPECT_EQ(errors[0], "barrier: rank 1 did not arrive within 0.15 s");
  EXPECT_EQ(errors[2], errors[0]);
}

TEST(CommunicatorTest, MessagesTravelOverTcp) {
  const Communicators engine = make_thread_communicators(3, {kPatient});
  const auto errors = errors_of_ranks(3, [&](int rank) {
    const auto gather = [&](const std::string& text) {
      return engine[rank]->gather(text, "engine");
    };
    const auto control = make_control_plane(rank, 3, gather);
    Communicator comm(rank, 3, control, make_tcp_data_plane(rank, 3, control), {kPatient});
    EXPECT_EQ(comm.backend(), "tcp");
    EXPECT_FALSE(comm.can_lend());
    exchange_numbers(comm);
    // More than a socket's buffers hold, to both others at once.
    std::vector<int> out(1 << 20, rank), in(2 << 20);
    const auto half = out.size() * sizeof(int);
    const int a = (rank + 1) % 3, b = (rank + 2) % 3;
    const Message sends[] = {{a, out.data(), half}, {b, out.data(), half}};
    const Message receives[] = {{a, in.data(), half}, {b, in.data() + out.size(), half}};
    comm.exchange(sends, receives, {}, "rows");
    EXPECT_TRUE(in.front() == a && in[out.size() - 1] == a && in[out.size()] == b);
    exchange_numbers(*comm.split(rank == 0));
    comm.barrier();
    const std::size_t bytes = rank == 1 ? 8 : 4;
    const Message wrong{rank == 1 ? 0 : 1, out.data(), bytes};
    if (rank < 2) comm.exchange({&wrong, 1}, {&wrong, 1}, {}, "rows");
  });
  EXPECT_NE(errors[0].find("bytes from rank"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[0], errors[1]);
}

/// A text that comes after 1.5 s is read: a client asks the server several times until then, and
/// lets its other threads post in between.
TEST(TcpControlTest, AReadLastsUntilItsOwnDeadline) {
  const Communicators engine = make_thread_communicators(2, {kPatient});
  run_ranks(2, [&](int rank) {
    const auto gather = [&](const std::string& text) {
      return engine[rank]->gather(text, "engine");
    };
    const auto control = make_control_plane(rank, 2, gather);
    if (rank == 0) {  // keeps the texts meanwhile
      EXPECT_EQ(control->read("late", kPatient), "here");
      return;
    }
    EXPECT_FALSE(control->read("never", kImpatient));
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      control->post("late", "here");
    });
    EXPECT_EQ(control->read("late", kPatient), "here");
    other.join();
  });
}

TEST(TcpControlTest, APortThatIsNoneHasARank) {
  for (const char* text : {"", "port", "80x", "0", "65536", "99999999999"}) {
    const auto gather = [&](const std::string&) { return std::vector<std::string>(2, text); };
    const auto errors = errors_of_ranks(2, [&](int rank) {
      if (rank == 1) make_control_plane(1, 2, gather, kImpatient);
    });
    EXPECT_EQ(errors[1],
              "rank 0 has told \"" + std::string(text) + "\" as its port; must be in [1, 65535]");
  }
}

/// What rank 0 of three throws when it makes its data plane; `others` gets the function that
/// connects to it and sends a text.
std::string error_of_joining(
    std::chrono::milliseconds timeout, const std::shared_ptr<ControlPlane>& control,
    const std::function<void(const std::function<void(std::string_view)>&)>& others) {
  std::vector<int> sockets;
  const auto connect_and_send = [&](std::string_view text) {
    const std::string place = control->read("tcp data/0", kPatient).value();
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(static_cast<std::uint16_t>(std::stoi(place.substr(place.rfind(':') + 1))));
    sockets.push_back(::socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(::connect(sockets.back(), reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
    EXPECT_EQ(::send(sockets.back(), text.data(), text.size(), 0),
              static_cast<ssize_t>(text.size()));
  };
  const auto errors = errors_of_ranks(2, [&](int thread) {
    if (thread == 0) make_tcp_data_plane(0, 3, control, timeout);
    if (thread == 1) others(connect_and_send);
  });
  for (const int each : sockets) ::close(each);
  EXPECT_EQ(errors[1], "");
  return errors[0];
}

std::string as_bytes(std::uint32_t rank) {
  return {reinterpret_cast<const char*>(&rank), sizeof rank};
}

TEST(TcpDataTest, APeerThatSaysNothingDoesNotHoldUpTheJoinForEver) {
  const auto error =
      error_of_joining(kImpatient, make_thread_control_plane(), [](const auto& send) { send(""); });
  EXPECT_EQ(error, "joining over TCP: ranks 1, 2 did not connect within 0.15 s");
}

TEST(TcpDataTest, ARankThatDoesNotConnectHasAName) {
  const auto error = error_of_joining(std::chrono::seconds(1), make_thread_control_plane(),
                                      [](const auto& send) { send(as_bytes(1)); });
  EXPECT_EQ(error, "joining over TCP: rank 2 did not connect within 1 s");
}

TEST(TcpDataTest, ASecondProcessWithTheSameRankIsRefused) {
  const auto error = error_of_joining(kPatient, make_thread_control_plane(), [](const auto& send) {
    send(as_bytes(1));
    send(as_bytes(1));
  });
  EXPECT_EQ(error, "rank: was 1, which has connected already; must be that of one process");
}

TEST(TcpDataTest, WhoGivesUpEndsTheJoinOfTheOthers) {
  const auto control = make_thread_control_plane();
  const auto error = error_of_joining(
      kPatient, control, [&](const auto&) { control->post("failure", "rank 2: no memory left"); });
  EXPECT_EQ(error, "rank 2: no memory left");
  const auto unposted = make_thread_control_plane();
  unposted->post("failure", "rank 0: no memory left");
  const auto errors =
      errors_of_ranks(1, [&](int) { make_tcp_data_plane(1, 2, unposted, kPatient); });
  EXPECT_EQ(errors[0], "rank 0: no memory left") << "nor waits a rank for another's place";
}

TEST(TcpDataTest, APlaceThatIsNoneHasARank) {
  for (const char* place : {"nowhere", "host:", "host:80x"}) {
    const auto control = make_thread_control_plane();
    control->post("tcp data/0", place);
    const auto errors =
        errors_of_ranks(1, [&](int) { make_tcp_data_plane(1, 2, control, kImpatient); });
    EXPECT_TRUE(errors[0].starts_with("rank 0 has told \"")) << errors[0];
  }
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
  const Communicators comms = make_thread_communicators(3, {kImpatient});
  const auto errors = errors_of_ranks(3, [&](int rank) {
    if (rank == 2) return;  // never comes
    auto mine = std::make_unique<int>(rank);
    comms[rank]->lend(
        "numbers", mine.get(), [](auto) { FAIL() << "without rank 2"; }, "a step");
  });
  EXPECT_EQ(errors[0], "a step: rank 2 did not arrive within 0.15 s");
  EXPECT_EQ(errors[1], errors[0]);
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

/// Sets a variable of the environment for a while.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};

TEST(LaunchTest, EveryLauncherIsUnderstood) {
  const struct {
    const char *launcher, *rank, *size, *local;
  } launchers[] = {
      {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
      {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
      {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
      {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
  };
  for (const auto& each : launchers) {
    if (std::getenv(each.rank)) GTEST_SKIP() << "started by a launcher";
    const Variable rank(each.rank, "5"), size(each.size, "8"), local(each.local, "1");
    const Variable address("MASTER_ADDR", "node7"), port("MASTER_PORT", "29500");
    const auto launch = launch_from_environment();
    ASSERT_TRUE(launch) << each.launcher;
    EXPECT_EQ(launch->launcher, each.launcher);
    EXPECT_EQ(launch->rank, 5);
    EXPECT_EQ(launch->size, 8);
    EXPECT_EQ(launch->local_rank, 1);
    EXPECT_EQ(launch->address, "node7");
    EXPECT_EQ(launch->port, 29500);
  }
  EXPECT_FALSE(launch_from_environment());
  {
    const Variable tasks("SLURM_NTASKS", "4");
    EXPECT_FALSE(launch_from_environment()) << "an allocation, but no srun";
  }
  const Variable rank("RANK", "8");
  EXPECT_THROW(launch_from_environment(), Error) << "no size";
  const Variable size("WORLD_SIZE", "8");
  EXPECT_THROW(launch_from_environment(), Error) << "rank 8 of 8";
  const Variable first("RANK", "0"), port("MASTER_PORT", "29500"),
      agent("TORCHELASTIC_USE_AGENT_STORE", "True");
  EXPECT_EQ(launch_from_environment()->port, 29501) << "torchrun itself listens at the other";
}

TEST(LaunchTest, JoiningNeedsAnAddressAndATimeout) {
  if (launch_from_environment()) GTEST_SKIP() << "started by a launcher";
  EXPECT_THROW(join_processes(), Error) << "no launcher";
  EXPECT_THROW(join_processes(Launch{0, 1, 0, "", 29500, ""}), Error) << "no address";
  using std::chrono::milliseconds;
  for (const milliseconds timeout : {milliseconds(0), milliseconds(-1), milliseconds::max()}) {
    EXPECT_THROW(make_thread_communicators(1, {timeout}), Error);
    EXPECT_THROW(join_processes(Launch{1, 2, 0, "127.0.0.1", 1, ""}, {timeout}), Error);
    const auto gather = [](const std::string&) { return std::vector<std::string>(2); };
    EXPECT_THROW(make_control_plane(1, 2, gather, timeout), Error);
  }
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

}  // namespace
}  // namespace fusedmoe
