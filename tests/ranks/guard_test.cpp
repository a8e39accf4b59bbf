// Who may join ranks over TCP: who knows the token of the job, or is a process of the same host
// where that is all who can.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "fusedmoe/comm.h"
#include "fusedmoe/error.h"
#include "processes.h"
#include "ranks.h"
#include "raw_sockets.h"
#include "variable.h"

namespace fusedmoe::guard_test {

using testing::errors_of_ranks;
using testing::exchange_numbers;
using testing::free_port;
using testing::greeting_of;
using testing::kPatient;
using testing::kToken;
using testing::RawSocket;
using testing::run_ranks;
using testing::Variable;

/// Nobody has set one for this test.
class GuardTest : public ::testing::Test {
  const Variable unset_ = Variable("FUSEDMOE_TOKEN");
};

std::shared_ptr<ControlPlane> join_at(const std::string& address, int port, int rank,
                                      std::string_view token = {}) {
  return make_tcp_control_plane(rank, 2, address, port, kPatient, token);
}

/// Two ranks meet and use both planes.
void meet_at(const std::string& address, std::string_view token = {}) {
  const int port = free_port();
  run_ranks(2, [&](int rank) {
    exchange_numbers(*make_communicator(rank, 2, join_at(address, port, rank, token), {kPatient}));
  });
}

std::string error_of(const std::function<void()>& function) {
  return errors_of_ranks(1, [&](int) { function(); })[0];
}

bool has_ipv6() {
  const int socket = ::socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 place{};
  place.sin6_family = AF_INET6;
  place.sin6_addr = IN6ADDR_LOOPBACK_INIT;
  const bool works = ::bind(socket, reinterpret_cast<sockaddr*>(&place), sizeof place) == 0;
  ::close(socket);
  return works;
}

TEST_F(GuardTest, RanksMeetAtAnyAddressOfThisHost) {
  meet_at("127.0.0.1");
  meet_at("127.0.0.1", kToken);
  meet_at("localhost");
  const Variable token("FUSEDMOE_TOKEN", kToken);
  meet_at("127.0.0.1");
}

TEST_F(GuardTest, RanksMeetOverIpv6) {
  if (!has_ipv6()) GTEST_SKIP() << "this host has no IPv6";
  meet_at("::1");
  meet_at("[::1]", kToken);
}

TEST_F(GuardTest, RankZeroListensWhereItWasTold) {
  const int port = free_port();
  const auto server = join_at("127.0.0.1", port, 0);
  EXPECT_NO_THROW(RawSocket(port, ""));
  EXPECT_THROW(RawSocket(port, "", "127.0.0.2"), std::runtime_error) << "an address of this host";
}

TEST_F(GuardTest, WhatOtherHostsReachWantsAToken) {
  for (const char* address : {"0.0.0.0", "192.0.2.1", "::", "2001:db8::1"}) {
    for (const int rank : {0, 1}) {
      const std::string error = error_of([&] { join_at(address, 29500, rank); });
      EXPECT_EQ(error, "FUSEDMOE_TOKEN is not set: other hosts can reach " + std::string(address) +
                           ", so all ranks need the same secret of 16 to 64 characters");
    }
  }
}

TEST_F(GuardTest, ATokenIsLongEnoughAndNeverPrinted) {
  const std::string wrong[] = {"short", std::string(65, 'x'), "with blanks in it, though long",
                               "not-printable-\x7f-though-long", "not-ascii-\xc3\xa9-though-long"};
  for (const std::string& token : wrong) {
    const Variable set("FUSEDMOE_TOKEN", token.c_str());
    const std::string by_variable = error_of([] { join_at("127.0.0.1", 1, 0); });
    const std::string by_argument = error_of([&] { join_at("127.0.0.1", 1, 0, token); });
    EXPECT_TRUE(by_variable.starts_with("FUSEDMOE_TOKEN: was " + std::to_string(token.size())));
    EXPECT_TRUE(by_argument.starts_with("token: was " + std::to_string(token.size())));
    EXPECT_EQ(by_variable.find(token), std::string::npos) << by_variable;
  }
}

TEST_F(GuardTest, WhoDoesNotKnowTheTokenIsDroppedAndTheOthersJoin) {
  const std::string token = kToken, longer = token + "!", shorter = token.substr(1);
  const int port = free_port();
  const auto server = join_at("127.0.0.1", port, 0, kToken);
  std::vector<RawSocket> strangers;
  for (const std::string& known : {std::string(), longer, shorter}) {
    for (const std::uint32_t rank : {1U, 99U})
      strangers.emplace_back(port, greeting_of(rank, known));
  }
  strangers.emplace_back(port, greeting_of(1, kToken).substr(0, 8));  // and says nothing more
  for (const RawSocket& each : strangers) EXPECT_TRUE(each.is_closed());
  const std::string error = error_of(
      [&] { join_at("127.0.0.1", port, 1, "another-secret-of-a-test")->read("name", kPatient); });
  EXPECT_EQ(error, "rank 0 closed the connection: it has died, or the token differs");
  const auto client = join_at("127.0.0.1", port, 1, kToken);
  client->post("name", "text");
  EXPECT_EQ(server->read("name", kPatient), "text");
  EXPECT_FALSE(server->read("failure", std::chrono::milliseconds(0)));
}

int threads_of_process() {
  const auto tasks = std::filesystem::directory_iterator("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

/// More connections than are listened to at a time, and than ranks that there are.
TEST_F(GuardTest, AFloodTakesNoThreadsAndHoldsNobodyUp) {
  const int before = threads_of_process();
  std::vector<RawSocket> flood;
  std::string place;
  const auto gather_of_zero = [&](const std::string& text) {
    return std::vector<std::string>(2, place = text);
  };
  const auto server = make_control_plane(0, 2, gather_of_zero, kPatient);
  const int port = std::stoi(place);
  for (int i = 0; i < 300; ++i) flood.emplace_back(port, i % 2 ? "" : greeting_of(1, kToken));
  int calls = 0;
  const auto gather_of_one = [&](const std::string& text) {
    return std::vector<std::string>(2, calls++ == 0 ? text : place);
  };
  const auto client = make_control_plane(1, 2, gather_of_one, kPatient);
  client->post("name", "text");
  EXPECT_EQ(server->read("name", kPatient), "text");
  EXPECT_LE(threads_of_process(), before + 2) << "one that accepts, one for rank 1";
}

/// Who knows the token, but is none of the ranks, is told so and not served.
TEST_F(GuardTest, ProcessesThatAreNoRankTakeNoThreads) {
  const int before = threads_of_process();
  const int port = free_port();
  const auto server = join_at("127.0.0.1", port, 0, kToken);
  for (int i = 0; i < 20; ++i) {
    const RawSocket guest(port, greeting_of(99, kToken));
    EXPECT_EQ(guest.text().substr(8), "a process has joined 2 ranks as rank 99");
  }
  EXPECT_LE(threads_of_process(), before + 1);
}

/// How a rank begins to post a text, or says so.
std::string post_of(const std::string& name, std::uint64_t bytes) {
  struct {
    std::uint32_t kind = 0, name_bytes;
    std::uint64_t bytes;
  } const post{.name_bytes = static_cast<std::uint32_t>(name.size()), .bytes = bytes};
  return std::string(reinterpret_cast<const char*>(&post), sizeof post) + name;
}

/// A rank of ours that went wrong, or somebody with its token.
TEST_F(GuardTest, TheTextsOfARankAreBounded) {
  const int port = free_port();
  const auto server = join_at("127.0.0.1", port, 0, kToken);
  const RawSocket rank(port, greeting_of(1, kToken));
  rank.send(post_of("name", std::uint64_t{1} << 40));
  const std::string reason = server->read("failure", kPatient).value_or("");
  EXPECT_TRUE(reason.starts_with("rank 1 has posted 1099511627776 bytes beside 4; must be"))
      << reason;
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need memory themselves
/// Lets this process have so many bytes more.
void limit_memory(std::uint64_t more) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word && word != "VmData:") {
  }
  std::uint64_t kib = 0;
  status >> kib;
  const rlimit limit{kib * 1024 + more, RLIM_INFINITY};
  ASSERT_EQ(setrlimit(RLIMIT_DATA, &limit), 0);
}

/// In a process of its own, as the limit is one of processes.
TEST_F(GuardTest, ToSayThatATextIsLongTakesNoMemory) {
  const auto failure_of_rank = [](int, const auto&) {
    const int port = free_port();
    const auto server = join_at("127.0.0.1", port, 0, kToken);
    {
      const RawSocket rank(port, greeting_of(1, kToken));
      rank.send(post_of("here", 0));  // then it has its thread
      server->read("here", kPatient);
      limit_memory(32 << 20);
      rank.send(post_of("name", 100 << 20));
    }
    return server->read("failure", kPatient).value_or("none");
  };
  EXPECT_EQ(testing::texts_of_processes(1, failure_of_rank)[0],
            "rank 1 has died or lost its connection");
}
#endif

}  // namespace fusedmoe::guard_test
