// What control planes keep and forget, and how long a rank waits while bytes move.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <latch>

#include "fusedmoe/comm.h"
#include "fusedmoe/error.h"
#include "ranks.h"
#include "temporary_directory.h"

namespace fusedmoe::control_plane_test {

using std::chrono::milliseconds;
using testing::Communicators;
using testing::errors_of_ranks;
using testing::exchange_numbers;
using testing::kImpatient;
using testing::kPatient;
using testing::run_ranks;
using testing::TemporaryDirectory;

/// Counts the texts that another plane holds.
class CountingPlane final : public ControlPlane {
 public:
  void post(const std::string& name, std::string_view text) override {
    ++texts;
    plane_->post(name, text);
  }
  void forget(const std::string& name) override {
    --texts;
    plane_->forget(name);
    EXPECT_FALSE(plane_->read(name, milliseconds(0))) << "forgotten twice, or before it was posted";
  }
  std::optional<std::string> read(const std::string& name, milliseconds timeout) override {
    return plane_->read(name, timeout);
  }
  std::atomic<int> texts{0};

 private:
  std::shared_ptr<ControlPlane> plane_ = make_thread_control_plane();
};

TEST(ControlPlaneTest, TextsAreForgottenWhenAllHaveReadThem) {
  const auto plane = std::make_shared<CountingPlane>();
  run_ranks(3, [&](int rank) {
    Communicator comm(rank, 3, plane, nullptr, {kPatient});
    for (int i = 0; i < 100; ++i) {
      comm.barrier();
      const auto part = comm.split(rank == 0);
      part->barrier();
      part->split(0)->barrier();
    }
    comm.barrier();
    comm.barrier();
    EXPECT_LE(plane->texts, 6) << "those of two gathers";
  });
}

/// As one whose keeper has left behind the last barrier.
class UnforgettingPlane final : public ControlPlane {
 public:
  void post(const std::string& name, std::string_view text) override { plane_->post(name, text); }
  void forget(const std::string&) override { throw Error::communication("rank 0 has left"); }
  std::optional<std::string> read(const std::string& name, milliseconds timeout) override {
    return plane_->read(name, timeout);
  }

 private:
  std::shared_ptr<ControlPlane> plane_ = make_thread_control_plane();
};

TEST(ControlPlaneTest, ABarrierThatAllHavePassedIsNoErrorWhereNothingCanBeForgotten) {
  Communicator comm(0, 1, std::make_shared<UnforgettingPlane>(), nullptr, {kPatient});
  for (int i = 0; i < 3; ++i) EXPECT_NO_THROW(comm.barrier());
}

TEST(ControlPlaneTest, FilesAreForgottenToo) {
  const TemporaryDirectory folder;
  run_ranks(2, [&](int rank) {
    Communicator comm(rank, 2, make_file_control_plane(folder.path().string()), nullptr,
                      {kPatient});
    for (int i = 0; i < 20; ++i) comm.barrier();
  });
  const auto files = std::filesystem::directory_iterator(folder.path());
  EXPECT_LE(std::distance(begin(files), end(files)), 4);
}

/// One thread says that a step has failed while another says so, too.
TEST(ControlPlaneTest, ThreadsThatPostOneFileAtOnceLeaveOneWholeText) {
  constexpr int kNames = 200, kThreads = 4;
  const TemporaryDirectory folder;
  const auto control = make_file_control_plane(folder.path().string());
  const auto text_of = [](int thread) {
    return std::string(20000, static_cast<char>('a' + thread));
  };
  std::latch start(kThreads);
  run_ranks(kThreads, [&](int thread) {
    start.arrive_and_wait();
    for (int i = 0; i < kNames; ++i) {
      const std::string name = "name" + std::to_string(i);
      control->post(name, text_of(thread));
      const std::string found = control->read(name, milliseconds(0)).value_or("nothing");
      EXPECT_EQ(found, text_of(found.front() - 'a')) << "torn";
      EXPECT_EQ(control->read(name, milliseconds(0)), found) << "the first text stays";
    }
  });
  const auto files = std::filesystem::directory_iterator(folder.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), kNames);
}

TEST(ControlPlaneTest, FilesAreOfTheirUserAlone) {
  using std::filesystem::perms;
  const TemporaryDirectory folder;
  const auto control = make_file_control_plane(folder.path().string());
  control->post("name", "a token");
  const perms all = std::filesystem::status(folder.path() / "name").permissions();
  EXPECT_EQ(all & (perms::group_all | perms::others_all), perms::none);
}

TEST(ControlPlaneTest, AFolderIsWrittenByItsUserAlone) {
  using std::filesystem::perms;
  const TemporaryDirectory parent;
  const std::filesystem::path folder = parent / "new" / "folder";
  make_file_control_plane(folder.string() + "/");
  EXPECT_EQ(std::filesystem::status(folder).permissions(), perms::owner_all);
  for (const perms more : {perms::group_write, perms::others_write}) {
    std::filesystem::permissions(folder, perms::owner_all | more);
    const auto errors = errors_of_ranks(1, [&](int) { make_file_control_plane(folder.string()); });
    EXPECT_EQ(errors[0], "ranks cannot meet in " + folder.string() +
                             ": other users can write there, until chmod go-w");
  }
  std::filesystem::permissions(folder, perms::owner_all | perms::group_read | perms::others_read);
  EXPECT_NO_THROW(make_file_control_plane(folder.string()));
}

TEST(ControlPlaneTest, AFolderIsOfTheUser) {
  const TemporaryDirectory folder;
  if (chown(folder.path().c_str(), 12345, 12345) != 0) GTEST_SKIP() << "only root can give it away";
  const auto errors =
      errors_of_ranks(1, [&](int) { make_file_control_plane(folder.path().string()); });
  EXPECT_EQ(errors[0], "ranks cannot meet in " + folder.path().string() +
                           ": it belongs to user 12345, this is user 0");
}

TEST(ControlPlaneTest, ATextThatIsTooLongIsAnErrorOfAllAndTheCommunicatorLives) {
  const std::string text((std::size_t{1} << 26) + 1, 'x');
  const Communicators comms = make_thread_communicators(2, {kPatient});
  const auto errors = errors_of_ranks(
      2, [&](int rank) { comms[rank]->gather(rank == 1 ? text : "short", "a table"); });
  EXPECT_EQ(errors[1], "text of rank 1 for a table: was 67108865 bytes; must be at most 67108864");
  EXPECT_EQ(errors[0], errors[1]);
  run_ranks(2, [&](int rank) { exchange_numbers(*comms[rank]); });
}

TEST(ControlPlaneTest, TheLongestTextTravelsOverTcp) {
  const std::string text(std::size_t{1} << 26, 'x');
  const Communicators engine = make_thread_communicators(2, {kPatient});
  run_ranks(2, [&](int rank) {
    const auto gather = [&](const std::string& mine) {
      return engine[rank]->gather(mine, "engine");
    };
    const auto control = make_control_plane(rank, 2, gather, kPatient);
    Communicator comm(rank, 2, control, nullptr, {kPatient});
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(comm.gather(rank == 1 ? text : "", "a table")[1].size(), text.size());
    }
    if (rank == 1) {
      EXPECT_THROW(control->post("name", text + "!!"), Error) << "at once";
    }
    comm.barrier();
  });
}

/// An exchange of bytes that trickle for three times the timeout; then none come.
class Trickle final : public DataPlane {
 public:
  std::string_view name() const override { return "trickle"; }
  void exchange(std::span<const Message>, std::span<const Message>, Stream,
                Waiting& waiting) override {
    const auto end = std::chrono::steady_clock::now() + 3 * kImpatient;
    const int peer = 0;
    while (std::chrono::steady_clock::now() < end) {
      waiting.moved();
      waiting.check({&peer, 1});
    }
    trickled = true;
    while (true) waiting.check({&peer, 1});
  }
  std::atomic<bool> trickled{false};
};

TEST(DeadlineTest, RunsFromTheLastByteThatMoved) {
  const auto data = std::make_shared<Trickle>();
  Communicator comm(0, 1, make_thread_control_plane(), data, {kImpatient});
  const auto errors = errors_of_ranks(1, [&](int) { comm.exchange({}, {}, {}, "rows"); });
  EXPECT_EQ(errors[0], "rows: rank 0 did not arrive within 0.15 s");
  EXPECT_TRUE(data->trickled);
}

class CountingWait final : public Waiting {
 public:
  std::string_view what() const override { return "rows"; }
  void check(std::span<const int>) override {}
  void moved() override { ++moves; }
  int moves = 0;
};

TEST(DeadlineTest, TcpSaysWhenBytesHaveMoved) {
  const auto control = make_thread_control_plane();
  run_ranks(2, [&](int rank) {
    const auto data = make_tcp_data_plane(rank, 2, control, kPatient);
    std::vector<int> out(1 << 20, rank), in(1 << 20);  // more than a socket's buffers hold
    const Message send{1 - rank, out.data(), out.size() * sizeof(int)};
    const Message receive{1 - rank, in.data(), in.size() * sizeof(int)};
    CountingWait wait;
    data->exchange({&send, 1}, {&receive, 1}, {}, wait);
    EXPECT_GE(wait.moves, 1);
    EXPECT_EQ(in.back(), 1 - rank);
  });
}

}  // namespace fusedmoe::control_plane_test
