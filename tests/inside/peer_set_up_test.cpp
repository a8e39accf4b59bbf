// What ranks on GPUs do before their rows go through the memory of these: when they connect for
// messages, what they ask of each other, and what they say of links that are slow.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../ranks/ranks.h"
#include "comm/communicator_impl.h"
#include "comm/later_data.h"
#include "cuda/nccl/connecting.h"
#include "fusedmoe/error.h"
#include "fusedmoe/wait_hook.h"
#include "watched_runtime.h"

namespace fusedmoe::peer_set_up_test {

using std::chrono::milliseconds;
using testing::exchange_numbers;
using testing::kPatient;
using testing::run_ranks;

/// Counts what is called.
class FakeData final : public DataPlane {
 public:
  std::string_view name() const override { return "fake"; }
  void exchange(std::span<const Message>, std::span<const Message>, Stream, Waiting&) override {
    ++exchanges;
  }
  bool has_collectives() const override { return true; }
  void connect() override {
    if (on_connect) on_connect();
  }
  void abort() noexcept override { ++aborts; }
  int exchanges = 0, aborts = 0;
  std::function<void()> on_connect;
};

/// The control plane of threads, which a test looks into.
class WatchedPlane final : public ControlPlane {
 public:
  void post(const std::string& name, std::string_view text) override {
    real_->post(name, text);
    if (on_post) on_post(name);
  }
  std::optional<std::string> read(const std::string& name, milliseconds timeout) override {
    longest = std::max(longest, timeout);
    return real_->read(name, timeout);
  }
  std::function<void(const std::string& name)> on_post;
  milliseconds longest{0};  // that somebody would have waited

 private:
  const std::shared_ptr<ControlPlane> real_ = make_thread_control_plane();
};

/// A program's own reason to end a wait, as a signal.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

class NoWaiting final : public Waiting {
 public:
  std::string_view what() const override { return "a step"; }
  void check(std::span<const int>) override {}
};

TEST(LaterDataTest, TheFirstMessagesConnect) {
  const auto made = std::make_shared<FakeData>();
  int makes = 0;
  comm::LaterData plane("later", {}, [&] {
    ++makes;
    return made;
  });
  EXPECT_EQ(plane.name(), "later");
  EXPECT_FALSE(plane.has_collectives());
  EXPECT_EQ(makes, 0);
  NoWaiting waiting;
  for (int i = 0; i < 2; ++i) plane.exchange({}, {}, {}, waiting);
  plane.connect();
  EXPECT_EQ(makes, 1);
  EXPECT_EQ(made->exchanges, 2);
  EXPECT_TRUE(plane.has_collectives());
  plane.abort();
  EXPECT_EQ(made->aborts, 1);
}

TEST(LaterDataTest, WhatConnectsBehindAnAbortIsAborted) {
  const auto made = std::make_shared<FakeData>();
  comm::LaterData plane("later", {}, [&] { return made; });
  plane.abort();
  EXPECT_EQ(made->aborts, 0);
  plane.connect();
  EXPECT_EQ(made->aborts, 1);
}

TEST(LaterDataTest, WhoCouldNotConnectDoesNotTryAgain) {
  int makes = 0;
  comm::LaterData plane("later", {}, [&]() -> std::shared_ptr<DataPlane> {
    ++makes;
    throw Error::communication("no cable");
  });
  NoWaiting waiting;
  EXPECT_THROW(plane.connect(), Error);
  EXPECT_THROW(plane.exchange({}, {}, {}, waiting), Error);
  EXPECT_EQ(makes, 1);
}

/// On CPUs rows never go through the memory of GPUs.
TEST(LaterDataTest, RanksThatNeedMessagesConnectWhenTheyJoin) {
  const auto control = make_thread_control_plane();
  const auto planes = make_thread_data_planes(2);
  std::atomic<int> makes{0};
  run_ranks(2, [&](int rank) {
    Communicator ranks(rank, 2, control,
                       std::make_shared<comm::LaterData>("later", Device{},
                                                         [&] {
                                                           ++makes;
                                                           return planes[rank];
                                                         }),
                       {kPatient});
    exchange_numbers(ranks);
    ranks.connect();
  });
  EXPECT_EQ(makes, 2);
}

/// Of three ranks two wait for the third, by a library that would do so for ever.
TEST(LaterDataTest, WhereOneRankCannotConnectAllLearnItAtOnce) {
  constexpr std::chrono::minutes kLong{10};
  for (const bool has_met : {true, false}) {
    const auto control = make_thread_control_plane();
    run_ranks(3, [&](int rank) {
      cuda::Connecting connecting("fake", rank, 3, *control, kLong);
      const auto connect = [&]() -> std::shared_ptr<DataPlane> {
        if (has_met) connecting.meet("here");
        if (rank == 1) throw Error::communication("no cable");
        if (rank == 2) connecting.meet("connected");
        while (true) connecting.check();
      };
      comm::LaterData plane("later", {}, [&] { return connecting.run(connect); });
      for (int i = 0; i < 2; ++i) {
        try {
          plane.connect();
          ADD_FAILURE() << rank;
        } catch (const Error& error) {
          EXPECT_STREQ(error.what(), "fake: rank 1: no cable");
        }
      }
      EXPECT_EQ(control->read("failure", {}), std::nullopt) << "the communicator goes on";
    });
  }
}

TEST(LaterDataTest, WhoDoesNotComeToConnectIsNamedAndLearnsItWhenItComes) {
  const auto control = make_thread_control_plane();
  for (const int rank : {0, 1}) {
    cuda::Connecting connecting("fake", rank, 2, *control, std::chrono::milliseconds(50));
    try {
      connecting.run([&] { connecting.meet("here"); });
      ADD_FAILURE() << rank;
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "fake: rank 0: rank 1 did not arrive within 0.05 s");
    }
  }
}

thread_local bool interrupting = false;  // where the hook throws

TEST(ConnectingTest, WhatAWaitHookThrowsStaysAsItIsAndTheOthersLearnIt) {
  set_wait_hook([] {
    if (interrupting) throw Interrupted();
  });
  const auto control = make_thread_control_plane();
  run_ranks(2, [&](int rank) {
    cuda::Connecting connecting("fake", rank, 3, *control, kPatient);
    interrupting = rank == 0;
    try {
      connecting.run([&] { connecting.meet("here"); });
      ADD_FAILURE() << rank;
    } catch (const Interrupted&) {
      EXPECT_EQ(rank, 0);
    } catch (const Error& error) {
      EXPECT_EQ(rank, 1);
      EXPECT_STREQ(error.what(), "fake: rank 0: interrupted");
    }
  });
  set_wait_hook(nullptr);
}

TEST(ConnectingTest, ItEndsTheCommunicator) {
  const auto data = std::make_shared<FakeData>();
  Communicator ranks(0, 1, make_thread_control_plane(), data, {kPatient});
  data->on_connect = [] { throw Interrupted(); };
  EXPECT_THROW(ranks.split(0), Interrupted);
  EXPECT_EQ(ranks.status(), "rank 0: interrupted");
}

TEST(ConnectingTest, AFailureOfTheCommunicatorStaysAsItIs) {
  const auto control = make_thread_control_plane();
  const auto data = std::make_shared<FakeData>();
  Communicator ranks(0, 1, control, data, {kPatient});
  data->on_connect = [&] {
    control->post("failure", "rank 2: no memory");
    cuda::Connecting connecting("fake", 0, 1, *control, kPatient);
    connecting.run([&] { connecting.meet("here"); });
  };
  try {
    ranks.connect("rows of a test");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 2: no memory");
  }
  EXPECT_EQ(control->read("fake/failed", {}), std::nullopt);
}

TEST(ConnectingTest, AnInvalidArgumentStaysOneAndTheOthersLearnIt) {
  const auto control = make_thread_control_plane();
  cuda::Connecting connecting("fake", 1, 2, *control, kPatient);
  try {
    connecting.run([] { throw Error("id", "3 bytes", "128"); });
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "id");
  }
  EXPECT_EQ(control->read("fake/failed", {}), "fake: rank 1: id: was 3 bytes; must be 128");
}

TEST(ConnectingTest, WhoFindsAllTextsLooksOnceMoreWhetherOneHasFailed) {
  WatchedPlane control;
  control.post("fake/connected/0", "here");
  control.on_post = [&](const std::string& name) {
    if (name == "fake/connected/1") control.post("fake/failed", "fake: rank 0: rank 1 is late");
  };
  cuda::Connecting connecting("fake", 1, 2, control, kPatient);
  EXPECT_THROW(connecting.run([&] { connecting.meet("connected"); }), Error);
}

TEST(ConnectingTest, AllWaitsTogetherHaveOneDeadline) {
  WatchedPlane control;
  cuda::Connecting connecting("fake", 0, 2, control, milliseconds(5));
  while (!connecting.is_late()) std::this_thread::yield();
  EXPECT_THROW(connecting.run([&] { connecting.meet("connected"); }), Error);
  EXPECT_EQ(control.longest.count(), 0);
}

TEST(LaterDataTest, WithoutADataPlaneRanksDoNotConnectAndGoOn) {
  Communicator ranks(0, 1, make_thread_control_plane(), nullptr, {kPatient});
  for (int i = 0; i < 2; ++i) {
    try {
      ranks.connect("rows of a test");
      FAIL();
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(),
                   "communicator: was without a data plane; must be one with it, for rows of a "
                   "test");
    }
  }
  EXPECT_EQ(ranks.backend(), "none");
  ranks.barrier();
}

TEST(MapPeersTest, RanksThatAskForDifferentBytesAllLearnIt) {
  const testing::WatchedRuntime gpu(DeviceKind::kCuda, core::cpu_runtime());
  const auto control = make_thread_control_plane();
  CommunicatorOptions options{kPatient, {DeviceKind::kCuda, 0}};
  options.peer_memory = true;  // of a GPU that both have
  run_ranks(2, [&](int rank) {
    Communicator ranks(rank, 2, control, nullptr, options);
    try {
      ranks.map_peers(rank == 0 ? 1000 : 2000);
      ADD_FAILURE() << rank;
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(),
                   "mapping GPU memory: rank 0 asks for 1000 bytes, but rank 1 for 2000");
    }
    ranks.barrier();
  });
}

/// There is no GPU that lends so much, here none at all.
TEST(MapPeersTest, WhereARankCannotMapAllLearnWhy) {
  const testing::WatchedRuntime gpu(DeviceKind::kCuda, core::cpu_runtime());
  const auto control = make_thread_control_plane();
  CommunicatorOptions options{kPatient, {DeviceKind::kCuda, 0}};
  options.peer_memory = true;
  std::array<std::string, 2> reasons;
  run_ranks(2, [&](int rank) {
    Communicator ranks(rank, 2, control, nullptr, options);
    std::shared_ptr<PeerBlocks> blocks;
    const auto refuse = []() -> std::size_t { throw Error::communication("no block"); };
    EXPECT_EQ(ranks.map_blocks(refuse, blocks), "rank 0: no block");
    EXPECT_EQ(blocks, nullptr);
    reasons[rank] = ranks.map_peers(std::size_t{1} << 60);
    EXPECT_EQ(ranks.map_peers(1), reasons[rank]) << "is not tried again";
    EXPECT_EQ(ranks.peers(), nullptr);
    ranks.barrier();
  });
  EXPECT_EQ(reasons[0].find("rank 0: "), 0U) << reasons[0];
  EXPECT_EQ(reasons[0], reasons[1]);
}

TEST(SlowLinkTest, TheSlowestIsNamedWhereItIsAbsurd) {
  const std::array names{2, 5, 7};
  EXPECT_EQ(comm::slow_link(std::vector<PeerLink>{{300e9, 1}, {2e9, 1}, {25e9, 2}}, 0, names), "");
  EXPECT_EQ(comm::slow_link(std::vector<PeerLink>{{300e9, 1}, {1.2e9, 1}, {0.4e9, 2}}, 1, names),
            "rank 5 reads the memory of rank 7 at 400 MB/s; below 2000 something is wrong");
}

}  // namespace fusedmoe::peer_set_up_test
