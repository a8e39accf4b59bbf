// How processes find each other through the C interface, and what they bring of NCCL.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "../ranks/processes.h"
#include "../unit/temporary_directory.h"
#include "capi_ranks.h"
#include "fusedmoe/comm.h"

namespace fusedmoe::testing::rendezvous_test {

/// A port of this host that nobody uses now.
int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in own{};
  own.sin_family = AF_INET;
  own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof own;
  if (::bind(socket, reinterpret_cast<sockaddr*>(&own), sizeof own) != 0 ||
      ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &bytes) != 0) {
    throw std::runtime_error("no free port");
  }
  ::close(socket);
  return ntohs(own.sin_port);
}

/// Two threads that give each a rendezvous.
template <typename Function>
void meet(const Function& rendezvous_of, const char* backend) {
  const auto options = patient();
  fusedmoe_communicator* made[kRanks] = {};
  on_two_threads([&](int rank) {
    const fusedmoe_rendezvous at = rendezvous_of(rank);
    EXPECT_OK(fusedmoe_communicator_create_at(rank, kRanks, &at, &options, &made[rank]));
  });
  const Handle<fusedmoe_communicator> zero(made[0]), one(made[1]);
  ASSERT_TRUE(zero && one);
  expect_as_one_rank(made, backend);
}

TEST(CRendezvousTest, RanksMeetInAFolderOrAtAnAddress) {
  const TemporaryDirectory folder;
  auto at = sized<fusedmoe_rendezvous>();
  at.folder = folder.path().c_str();
  meet([&](int) { return at; }, "tcp");
  at.folder = nullptr;
  at.address = "127.0.0.1";
  at.port = free_port();
  meet([&](int) { return at; }, "tcp");
  at.port = free_port();
  at.token = "the-secret-of-a-test";
  meet([&](int) { return at; }, "tcp");
}

TEST(CRendezvousTest, ProcessesMeetInAFolder) {
  const TemporaryDirectory folder;
  const auto run = [&](int rank, const std::shared_ptr<ControlPlane>&) -> std::string {
    const auto options = patient();
    auto at = sized<fusedmoe_rendezvous>();
    at.folder = folder.path().c_str();
    fusedmoe_communicator* made = nullptr;
    if (fusedmoe_communicator_create_at(rank, kRanks, &at, &options, &made) != FUSEDMOE_OK) {
      return fusedmoe_last_error();
    }
    const Handle<fusedmoe_communicator> communicator(made);
    TinyLayer tiny;
    const Tensor output = forward(tiny, rank, made);
    return fusedmoe_communicator_barrier(made) == FUSEDMOE_OK
               ? std::string(output.as<const char>(), static_cast<std::size_t>(output.nbytes()))
               : fusedmoe_last_error();
  };
  const std::vector<std::string> parts = texts_of_processes(kRanks, run);
  TinyLayer tiny;
  const Tensor expected = forward_alone(tiny);
  EXPECT_TRUE(parts[0] + parts[1] ==
              std::string(expected.as<const char>(), static_cast<std::size_t>(expected.nbytes())));
}

/// Where NCCL cannot be used the rank says why, and those who wait for it learn it at once.
TEST(CRendezvousTest, ARankWithoutNcclTellsTheOthers) {
  char id[FUSEDMOE_NCCL_UNIQUE_ID_BYTES] = {};
  if (nccl_info().problem.empty()) GTEST_SKIP() << "NCCL can be used here";
  EXPECT_NE(fusedmoe_make_nccl_unique_id(id, sizeof id), FUSEDMOE_OK);
  const std::string problem = fusedmoe_last_error();
  EXPECT_NE(problem.find(nccl_info().problem), std::string::npos) << problem;
  auto on_cuda = patient();
  on_cuda.device_type = FUSEDMOE_CUDA;
  for (const bool has_comm : {true, false}) {
    const TemporaryDirectory folder;
    auto at = sized<fusedmoe_rendezvous>();
    at.folder = folder.path().c_str();
    const auto expect_refused = [&](int rank, const fusedmoe_communicator_options& options,
                                    const std::string& text) {
      fusedmoe_communicator* made = nullptr;
      EXPECT_NE(fusedmoe_communicator_create_at(rank, kRanks, &at, &options, &made), FUSEDMOE_OK);
      EXPECT_EQ(made, nullptr);
      EXPECT_NE(std::string(fusedmoe_last_error()).find(text), std::string::npos)
          << fusedmoe_last_error();
    };
    at.nccl_comm = has_comm ? id : nullptr;
    at.nccl_unique_id = has_comm ? nullptr : id;
    expect_refused(1, on_cuda, nccl_info().problem);
    at.nccl_comm = nullptr;
    at.nccl_unique_id = nullptr;
    expect_refused(0, patient(), "rank 1: " + problem);
  }
}

TEST(CRendezvousTest, ARendezvousThatContradictsItselfIsRefused) {
  fusedmoe_communicator* made = nullptr;
  const auto options = patient();
  const auto expect_refused = [&](const fusedmoe_rendezvous* at, const std::string& text) {
    EXPECT_EQ(fusedmoe_communicator_create_at(0, 1, at, &options, &made),
              FUSEDMOE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(fusedmoe_last_error()).find(text), std::string::npos)
        << fusedmoe_last_error();
    EXPECT_EQ(made, nullptr);
  };
  char id[FUSEDMOE_NCCL_UNIQUE_ID_BYTES] = {};
  auto at = sized<fusedmoe_rendezvous>();
  expect_refused(nullptr, "rendezvous: was NULL");
  expect_refused(&at, "rendezvous has 0 of folder, gather and address");
  at.folder = "somewhere";
  at.address = "127.0.0.1";
  expect_refused(&at, "rendezvous has 2 of folder, gather and address");
  at.address = nullptr;
  at.reserved = 1;
  expect_refused(&at, "rendezvous.reserved");
  at.reserved = 0;
  at.token = "the-secret-of-a-test";
  expect_refused(&at, "rendezvous.token is given without address");
  at.folder = nullptr;
  at.address = "127.0.0.1";
  at.port = 1;
  at.token = "short";
  expect_refused(&at, "token: was 5 characters");
  at.folder = "somewhere";
  at.address = nullptr;
  at.token = nullptr;
  at.nccl_unique_id = id;
  expect_refused(&at, "rendezvous.nccl_unique_id cannot be used with options.device cpu");
  at.nccl_comm = id;
  expect_refused(&at, "rendezvous.nccl_unique_id cannot be used with rendezvous.nccl_comm");
  at.nccl_unique_id = nullptr;
  expect_refused(&at, "rendezvous.nccl_comm cannot be used with options.device cpu");
  EXPECT_EQ(fusedmoe_make_nccl_unique_id(id, 64), FUSEDMOE_INVALID_ARGUMENT);
  EXPECT_EQ(fusedmoe_make_nccl_unique_id(nullptr, sizeof id), FUSEDMOE_INVALID_ARGUMENT);
}

}  // namespace fusedmoe::testing::rendezvous_test
