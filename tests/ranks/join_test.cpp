// How processes join, over TCP and files: who is late, who is nobody.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "fusedmoe/comm.h"
#include "fusedmoe/error.h"
#include "ranks.h"
#include "raw_sockets.h"

namespace fusedmoe::join_test {

using testing::Communicators;
using testing::errors_of_ranks;
using testing::exchange_numbers;
using testing::expect_late;
using testing::greeting_of;
using testing::kImpatient;
using testing::kPatient;
using testing::kToken;
using testing::RawListener;
using testing::RawSocket;
using testing::run_ranks;
using testing::token_in;

/// An engine's own collective: here that of communicators which exist already.
auto gather_of(Communicator& engine) {
  return [&engine](const std::string& text) { return engine.gather(text, "engine"); };
}

TEST(JoinTest, FilesAndTcpFindTheRanksToo) {
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
    Communicator comm(rank, 3, make_control_plane(rank, 3, gather_of(*engine[rank])), nullptr,
                      {kPatient});
    EXPECT_EQ(comm.gather(std::string(100000, 'a' + rank), "test")[1], std::string(100000, 'b'));
    comm.split(rank == 0)->barrier();
  });
}

TEST(TcpTest, ARankThatDiesIsNoticedOverTcp) {
  expect_late("barrier: rank 1 did not arrive", {0, 2}, [](auto timeout) {
    const Communicators engine = make_thread_communicators(3, {kPatient});
    return errors_of_ranks(3, [&](int rank) {
      const auto control = make_control_plane(rank, 3, gather_of(*engine[rank]));
      Communicator comm(rank, 3, control, nullptr, {timeout});
      if (rank == 1) return;  // leaves in order: then it is only late
      comm.barrier();
    });
  });
}

TEST(TcpTest, MessagesTravelOverTcp) {
  const Communicators engine = make_thread_communicators(3, {kPatient});
  const auto errors = errors_of_ranks(3, [&](int rank) {
    const auto control = make_control_plane(rank, 3, gather_of(*engine[rank]));
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
    const auto control = make_control_plane(rank, 2, gather_of(*engine[rank]));
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

TEST(TcpControlTest, WhoIsNoRankTakesNoPlace) {
  const Communicators engine = make_thread_communicators(3, {kPatient});
  run_ranks(3, [&](int rank) {
    std::vector<RawSocket> strangers;
    const auto gather = [&](const std::string& text) {
      std::vector<std::string> texts = engine[rank]->gather(text, "engine");
      const bool port = texts[1].empty();  // only rank 0 has one
      for (const char* says : {"", "", "GET / HTTP/1.1"}) {
        if (port && rank > 0) strangers.emplace_back(std::stoi(texts[0]), says);
      }
      engine[rank]->barrier();
      return texts;
    };
    Communicator(rank, 3, make_control_plane(rank, 3, gather), nullptr, {kPatient}).barrier();
  });
}

TEST(TcpControlTest, ARankThatIsNoneEndsTheJoin) {
  for (const std::uint32_t rank : {1, 7}) {
    std::vector<RawSocket> others;
    int calls = 0;
    const auto gather = [&](const std::string& text) {
      ++calls;  // the second one tells rank 0's port
      for (int i = 0; i < 2 && calls == 2; ++i) {
        others.emplace_back(std::stoi(text), greeting_of(rank, token_in(text)));
      }
      return std::vector<std::string>(3, text);
    };
    const auto control = make_control_plane(0, 3, gather, kPatient);
    const std::string reason = control->read("failure", kPatient).value_or("");
    EXPECT_EQ(reason, rank == 7 ? "a process has joined 3 ranks as rank 7"
                                : "a second process has joined as rank 1");
    others.clear();
  }
}

/// The system closes the connections of a process that is killed.
TEST(TcpControlTest, ARankThatIsKilledIsNoticedAtOnce) {
  int calls = 0;
  const auto gather = [&](const std::string& text) {
    // Rank 0 has told its port.
    if (++calls == 2) RawSocket(std::stoi(text), greeting_of(1, token_in(text)));
    return std::vector<std::string>(2, text);
  };
  const auto control = make_control_plane(0, 2, gather, kPatient);
  EXPECT_EQ(control->read("failure", kPatient), "rank 1 has died or lost its connection");
  RawListener rank_zero;
  const auto client = make_tcp_control_plane(1, 2, "127.0.0.1", rank_zero.port(), kPatient);
  rank_zero.accept();
  const auto errors =
      errors_of_ranks(1, [&](int) { Communicator(1, 2, client, nullptr, {kPatient}); });
  EXPECT_EQ(errors[0], "rank 0 has died or lost its connection");
}

/// Rank 0 was stopped meanwhile, and has the question of a rank to answer that has said why it
/// goes.
TEST(TcpControlTest, TheReasonOfARankThatHasGoneIsRead) {
  const auto request = [](std::uint32_t kind, std::string_view name, std::uint64_t value) {
    const std::uint32_t words[] = {kind, static_cast<std::uint32_t>(name.size())};
    std::string text(reinterpret_cast<const char*>(words), sizeof words);
    text.append(reinterpret_cast<const char*>(&value), sizeof value);
    return text.append(name);
  };
  const std::string_view reason = "rank 1: waited for rank 0";
  int calls = 0;
  const auto gather = [&](const std::string& text) {
    if (++calls == 2) {
      const std::string question = request(1, "never", 100);  // milliseconds
      std::string says = greeting_of(1, token_in(text));
      for (int i = 0; i < 3; ++i) says += question;
      says += request(0, "failure", reason.size());
      RawSocket(std::stoi(text), says.append(reason));
    }
    return std::vector<std::string>(2, text);
  };
  const auto control = make_control_plane(0, 2, gather, kPatient);
  EXPECT_EQ(control->read("failure", kPatient), reason);
}

/// A rank that computes for longer than rank 0 waits for it learns why that one has ended.
TEST(TcpControlTest, TheReasonOutlivesRankZero) {
  const Communicators engine = make_thread_communicators(2, {kPatient});
  std::shared_ptr<ControlPlane> client, server;
  run_ranks(2, [&](int rank) {
    (rank == 0 ? server : client) = make_control_plane(rank, 2, gather_of(*engine[rank]));
  });
  server->post("joined", "");
  client->read("joined", kPatient);
  server->post("failure", "rank 0: no memory left");
  server.reset();
  for (const char* name : {"failure", "step"}) {
    const auto errors = errors_of_ranks(1, [&](int) { client->read(name, kPatient); });
    EXPECT_EQ(errors[0], "rank 0: no memory left");
  }
}

/// Rank 0, a process that was stopped: its port takes connections, but nobody answers.
TEST(TcpControlTest, ARankZeroThatIsStoppedHasAName) {
  RawListener listener;
  const auto control = make_tcp_control_plane(1, 3, "127.0.0.1", listener.port(), kPatient);
  const auto errors =
      errors_of_ranks(1, [&](int) { Communicator(1, 3, control, nullptr, {kImpatient}); });
  EXPECT_EQ(errors[0], "joining: rank 0 did not arrive within 0.15 s");
  EXPECT_EQ(control->silent_rank(), 0);
}

TEST(TcpControlTest, AnAnswerThatComesLateIsRead) {
  RawListener listener;
  const auto control = make_tcp_control_plane(1, 2, "127.0.0.1", listener.port(), kPatient);
  EXPECT_FALSE(control->read("name", kImpatient));
  EXPECT_EQ(control->silent_rank(), 0);
  const std::uint32_t found[] = {1, 4};  // and how many bytes
  const std::string answer(reinterpret_cast<const char*>(found), sizeof found);
  const RawSocket server = listener.accept();
  server.send(answer + "here");
  EXPECT_EQ(control->read("name", kPatient), "here");
  EXPECT_FALSE(control->silent_rank());
}

/// Who connects to a full queue gets no answer at all.
TEST(TcpControlTest, APortThatDoesNotAnswerIsGivenUpAtTheDeadline) {
  RawListener listener;
  const RawSocket waits(listener.port(), "");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(make_tcp_control_plane(1, 2, "127.0.0.1", listener.port(), kImpatient), Error);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kImpatient + std::chrono::seconds(2));
}

TEST(TcpControlTest, APortThatIsNoneHasARank) {
  for (const char* text : {"", "port", "80x", "0", "65536", "99999999999"}) {
    const auto gather = [&](const std::string&) {
      return std::vector<std::string>(2, text + std::string(" ") + kToken);
    };
    const auto errors = errors_of_ranks(2, [&](int rank) {
      if (rank == 1) make_control_plane(1, 2, gather, kImpatient);
    });
    EXPECT_EQ(errors[1],
              "rank 0 has told \"" + std::string(text) + "\" as its port; must be in [1, 65535]");
  }
}

/// Where rank 0 takes the others' connections, and what it wants to be told.
struct Place {
  int port;
  std::string token;
};
using Others = std::function<void(const Place& place)>;

/// The ranks behind rank 0 say that they are on its host.
void post_hosts(ControlPlane& control) {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  for (const char* rank : {"1", "2"}) {
    control.post(std::string("tcp data/host/") + rank, host.data());
  }
}

/// What rank 0 of three throws when it makes its data plane, and what `others` throws.
std::vector<std::string> errors_of_joining(std::chrono::milliseconds timeout,
                                           const std::shared_ptr<ControlPlane>& control,
                                           const Others& others) {
  post_hosts(*control);
  return errors_of_ranks(2, [&](int thread) {
    if (thread == 0) make_tcp_data_plane(0, 3, control, timeout);
    if (thread == 0) control->post("joined", "");
    if (thread == 1) {
      const std::string place = control->read("tcp data/0", kPatient).value();
      others({std::stoi(place), token_in(place)});
    }
  });
}

/// The first, where nobody else throws.
std::string error_of_joining(const std::shared_ptr<ControlPlane>& control, const Others& others) {
  const auto errors = errors_of_joining(kPatient, control, others);
  EXPECT_EQ(errors[1], "");
  return errors[0];
}

/// Throws unless the others have connected, which takes them too long on a loaded machine.
std::vector<std::string> errors_of_late_joining(std::chrono::milliseconds timeout,
                                                const Others& others) {
  auto errors = errors_of_joining(timeout, make_thread_control_plane(), others);
  if (!errors[1].empty()) throw std::runtime_error(errors[1]);
  return errors;
}

TEST(TcpDataTest, WhoIsNoRankHoldsNobodyUp) {
  const auto control = make_thread_control_plane();
  const auto error = error_of_joining(control, [&](const Place& at) {
    { const RawSocket goes(at.port, ""); }
    const RawSocket silent(at.port, ""), other(at.port, "GET / HTTP/1.1"), half(at.port, "eo");
    const RawSocket thief(at.port, greeting_of(1, kToken)), nobody(at.port, greeting_of(2, ""));
    const RawSocket one(at.port, greeting_of(1, at.token)), two(at.port, greeting_of(2, at.token));
    EXPECT_TRUE(control->read("joined", kPatient));
  });
  EXPECT_EQ(error, "");
}

TEST(TcpDataTest, APeerThatSaysNothingDoesNotHoldUpTheJoinForEver) {
  std::optional<RawSocket> silent;
  expect_late("joining over TCP: ranks 1, 2 did not connect", {0}, [&](auto timeout) {
    return errors_of_late_joining(timeout, [&](const Place& at) { silent.emplace(at.port, ""); });
  });
}

TEST(TcpDataTest, ARankThatDoesNotConnectHasAName) {
  std::optional<RawSocket> one;
  expect_late("joining over TCP: rank 2 did not connect", {0}, [&](auto timeout) {
    return errors_of_late_joining(
        timeout, [&](const Place& at) { one.emplace(at.port, greeting_of(1, at.token)); });
  });
}

TEST(TcpDataTest, ASecondProcessWithTheSameRankIsRefused) {
  std::optional<RawSocket> first, second;
  const auto error = error_of_joining(make_thread_control_plane(), [&](const Place& at) {
    first.emplace(at.port, greeting_of(1, at.token));
    second.emplace(at.port, greeting_of(1, at.token));
  });
  EXPECT_EQ(error, "rank: was 1, which has connected already; must be that of one process");
}

TEST(TcpDataTest, WhoGivesUpEndsTheJoinOfTheOthers) {
  const auto control = make_thread_control_plane();
  const auto error = error_of_joining(
      control, [&](const Place&) { control->post("failure", "rank 2: no memory left"); });
  EXPECT_EQ(error, "rank 2: no memory left");
  const auto unposted = make_thread_control_plane();
  unposted->post("failure", "rank 0: no memory left");
  const auto errors =
      errors_of_ranks(1, [&](int) { make_tcp_data_plane(1, 2, unposted, kPatient); });
  EXPECT_EQ(errors[0], "rank 0: no memory left") << "nor waits a rank for another's place";
}

TEST(TcpDataTest, APlaceThatIsNoneHasARank) {
  const std::pair<const char*, const char*> places[] = {
      {"", "rank 0 has told \"\" as its port; must be in [1, 65535]"},
      {"80x secret", "rank 0 has told \"80x\" as its port; must be in [1, 65535]"},
      {"80", "token of rank 0: was 0 characters; must be 16 to 64"},
      {"80 secret", "token of rank 0: was 6 characters; must be 16 to 64"},
  };
  for (const auto& [place, expected] : places) {
    const auto control = make_thread_control_plane();
    control->post("tcp data/host/0", "here");
    control->post("tcp data/0", place);
    const auto errors =
        errors_of_ranks(1, [&](int) { make_tcp_data_plane(1, 2, control, kImpatient); });
    EXPECT_TRUE(errors[0].starts_with(expected)) << errors[0];
  }
}

/// A host's name may become known while others try it; here nobody gives it one.
TEST(TcpDataTest, ANameThatIsNotKnownYetIsTriedAgain) {
  const auto control = make_thread_control_plane();
  control->post("tcp data/host/0", "host.invalid");
  control->post("tcp data/0", std::string("80 ") + kToken);
  control->post("failure", "rank 0: no memory left");
  const auto errors =
      errors_of_ranks(1, [&](int) { make_tcp_data_plane(1, 2, control, kPatient); });
  EXPECT_EQ(errors[0], "rank 0: no memory left") << "which a rank looks for between two tries";
}

}  // namespace fusedmoe::join_test
