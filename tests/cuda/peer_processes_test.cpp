// Each rank is a process, and rows go through the memory of the GPUs, of which there is one or
// more. One process is killed or stopped. The others are told in time, and their GPUs work on. One
// test kills a process while experts move over NCCL instead.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "../unit/error_text.h"
#include "moe/peer_memory.h"
#include "moving_layers.h"
#include "rank_processes.h"

namespace fusedmoe::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// How long ranks wait for one that is stopped. Four of them make their layers within this time.
constexpr milliseconds kDeadline{3000};

/// What the processes do, and which of them is lost.
constexpr const char *kScene = "FUSEDMOE_TEST_SCENE", *kLost = "FUSEDMOE_TEST_LOST";

void set_scene(const char* scene, int lost = 1) {
  setenv(kScene, scene, 1);
  setenv(kLost, std::to_string(lost).c_str(), 1);
}

class PeerProcessesTest : public CudaTest {};

/// One of them, with a layer whose forwards are right.
struct Process {
  const int rank = std::atoi(std::getenv(kRank)), size = std::atoi(std::getenv(kSize)),
            lost = std::atoi(std::getenv(kLost));
  const std::string scene = std::getenv(kScene);
  const std::filesystem::path folder = std::getenv(kFolder);
  const GatherCallback gather = gather_by_files(folder, rank, size);
  const Device device{DeviceKind::kCuda, rank % std::min(cuda_device_count(), size)};
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const MoeLayer alone{weights, options_of(device, true)};
  const Tensor x = random_tensor(DType::kBF16, {kTokens, kHidden}, 1, 9);
  const Tensor right = forward(alone, x, 0);  // loads what it needs, before any deadline
  const milliseconds timeout = scene.starts_with("stop") ? kDeadline : kPatient;
  const bool has_peers = !scene.ends_with("NCCL");
  const CommunicatorOptions options{timeout, device, true, has_peers};
  const std::shared_ptr<ControlPlane> control = make_control_plane(rank, size, gather, kPatient);
  const std::shared_ptr<Communicator> communicator =
      has_peers ? std::make_shared<Communicator>(rank, size, control, nullptr, options)
                : make_communicator(rank, size, control, options);
  MoeLayer layer{weights, options_on(communicator, true)};

  void expect_works() const {
    EXPECT_TRUE(bitwise_equal(forward(alone, x, 0), right)) << "the GPU works on";
  }
  void serve() const {
    EXPECT_EQ(rows_travel(layer) == "peer memory", has_peers) << rows_travel(layer);
    for (int i = 0; i < 10; ++i) {
      const Tensor rows = random_tensor(DType::kBF16, {kTokens - rank, kHidden}, 1, 2 * i + rank);
      EXPECT_TRUE(bitwise_equal(forward(layer, rows, kTokens), forward(alone, rows, 0)));
      communicator->check();
    }
    communicator->barrier();
  }
  /// The clock is the same in all processes.
  void write_that_one_is_lost() const {
    std::ofstream(folder / "lost") << steady_clock::now().time_since_epoch().count();
  }
  void expect_in_time(milliseconds deadline = milliseconds(0)) const {
    const steady_clock::time_point now = steady_clock::now();
    steady_clock::rep lost_at = 0;
    std::ifstream(folder / "lost") >> lost_at;
    EXPECT_LT(now - steady_clock::time_point(steady_clock::duration(lost_at)), deadline + kAtOnce);
  }
  void die_soon() const {
    std::this_thread::sleep_for(milliseconds(100));
    write_that_one_is_lost();
    std::raise(SIGKILL);
  }
  /// Rank 0 waits for what the experts of the other leave.
  void wait_for_results() const {
    const PeerBuffers buffers(layer, kTokens, kTokens);
    buffers.fill(random_tensor(DType::kBF16, {kTokens, kHidden}, 1, 3));
    MoeLayer::Step step = layer.begin(buffers.x, buffers.output, buffers.scratch());
    synchronize(Stream{device});
    if (rank == 1) std::raise(SIGKILL);
    step.compute();
    step.finish();
    const auto begin = steady_clock::now();
    synchronize(Stream{device});
    EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(1));
  }
  /// Kernels of rank 0 read the arena of the other, and go on when that has died.
  void read_its_arena() const {
    if (rank == 1) die_soon();
    PeerMemory& peers = *communicator->peers();
    const auto end = steady_clock::now() + kPatient;
    while (communicator->status().empty() && steady_clock::now() < end) peers.time_links();
    expect_in_time();
    for (int i = 0; i < 10; ++i) peers.time_links();
  }
  /// So does its copy engine with a block.
  void copy_its_block() const {
    constexpr std::int64_t kBytes = std::int64_t{64} << 20;
    std::shared_ptr<PeerBlocks> blocks;
    ASSERT_EQ(communicator->map_blocks([&] { return std::size_t{kBytes}; }, blocks), "");
    if (rank == 1) die_soon();
    const Tensor here = Tensor::empty({kBytes}, DType::kU8, device);
    const TensorView there(blocks->begin(1), DType::kU8, {kBytes}, device);
    const OwnedStream stream(device);
    const auto copy_all = [&] {
      copy(there, here, stream);
      synchronize(stream);
    };
    const auto end = steady_clock::now() + kPatient;
    while (communicator->status().empty() && steady_clock::now() < end) copy_all();
    expect_in_time();
    for (int i = 0; i < 10; ++i) copy_all();
  }
  /// Experts move to and fro. Rank 0 has those of its last commit then, and serves on alone.
  void move_experts() {
    std::jthread killer;
    if (rank == 1) killer = std::jthread([&] { die_soon(); });
    ExpertPlacement placement = *layer.placement(), next = other_than_linear();
    const std::string error = error_text([&] {
      while (true) {
        layer.start_move(next);
        layer.commit_move();
        std::swap(placement, next);
      }
    });
    expect_in_time();
    EXPECT_EQ(error, "rank 1 has died or lost its connection");
    EXPECT_EQ(layer.placement(), placement);
    const auto left = make_thread_communicators(1, {kPatient, device});
    layer.rebind(left[0], ExpertPlacement::linear(kExperts, 1), source_of(weights));
    EXPECT_TRUE(bitwise_equal(forward(layer, x, kTokens), right));
  }
  /// All run steps. In the middle of them one gets the signal. If that stops it, it goes on when
  /// another has named it.
  void run_steps(int signal, bool replays) const {
    const PeerBuffers buffers(layer, kTokens, kTokens);
    buffers.fill(x);
    synchronize(Stream{device});
    const OwnedStream stream(device);
    ForwardOptions options;
    options.stream = stream;
    options.max_tokens = kTokens;
    const auto step = [&] { layer.forward(buffers.x, buffers.output, buffers.scratch(), options); };
    std::optional<Graph> graph;
    if (replays) graph.emplace(stream, step);
    const pid_t process =
        std::stoi(communicator->gather(std::to_string(getpid()), "processes")[lost]);
    const bool sends = rank == (lost == 0 ? 1 : 0);
    std::jthread sender;
    if (sends) {
      sender = std::jthread([&] {
        std::this_thread::sleep_for(milliseconds(100));
        write_that_one_is_lost();
        kill(process, signal);
      });
    }
    const std::string error = error_text([&] {
      while (true) {
        graph ? graph->launch(stream) : step();
        synchronize(stream);
        communicator->check();
      }
    });
    if (rank == lost) return;
    expect_in_time(signal == SIGSTOP ? timeout : milliseconds(0));
    expect_works();
    if (sends && signal == SIGSTOP) kill(process, SIGCONT);
  }
};

TEST_F(PeerProcessesTest, DISABLED_OneProcess) {
  if (!std::getenv(kRank)) GTEST_SKIP() << "only as a process of the tests below";
  Process process;
  process.serve();
  const std::string& scene = process.scene;
  if (scene == "results") process.wait_for_results();
  if (scene == "arena") process.read_its_arena();
  if (scene == "block") process.copy_its_block();
  if (scene.starts_with("experts")) process.move_experts();
  if (scene == "kill in replays") process.run_steps(SIGKILL, true);
  if (scene == "stop in forwards") process.run_steps(SIGSTOP, false);
  if (scene == "stop in replays") process.run_steps(SIGSTOP, true);
  const std::string error = error_text([&] { process.communicator->check(); });
  process.expect_works();
  if (scene.starts_with("stop")) {
    for (const std::string& each : process.gather(error)) EXPECT_EQ(each, error);
  }
  if (process.rank != process.lost)
    std::ofstream(error_file(process.folder, process.rank)) << error;
}

TEST_F(PeerProcessesTest, AProcessThatIsKilledWhileTheOtherWaits) {
  set_scene("results");
  expect_that_a_killed_rank_is_told();
}

TEST_F(PeerProcessesTest, AProcessThatIsKilledWhileTheOtherReads) {
  for (const char* scene : {"arena", "block"}) {
    SCOPED_TRACE(scene);
    set_scene(scene);
    expect_that_a_killed_rank_is_told();
  }
}

/// Where each process sees its own GPU alone, too.
TEST_F(PeerProcessesTest, AProcessThatIsKilledWhileExpertsMove) {
  set_scene("experts");
  expect_that_a_killed_rank_is_told();
  if (cuda_device_count() > 1) expect_that_a_killed_rank_is_told("CUDA_VISIBLE_DEVICES");
}

TEST_F(PeerProcessesTest, AProcessThatIsKilledWhileExpertsMoveOverNccl) {
  if (cuda_device_count() < 2) GTEST_SKIP() << "one GPU";
  if (!nccl_info().problem.empty()) GTEST_SKIP() << nccl_info().problem;
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  set_scene("experts over NCCL");
  expect_that_a_killed_rank_is_told();
}

TEST_F(PeerProcessesTest, AProcessThatIsKilledInReplays) {
  for (const int killed : {0, 1}) {
    SCOPED_TRACE(killed);
    set_scene("kill in replays", killed);
    expect_that_a_killed_rank_is_told(kRank, killed);
  }
  if (cuda_device_count() < 2) return;
  set_scene("kill in replays", 2);
  expect_that_a_killed_rank_is_told(kRank, 2, 4);
}

void expect_that_a_stopped_rank_is_named(const char* scene, int stopped, int size = 2) {
  SCOPED_TRACE(stopped);
  set_scene(scene, stopped);
  const TemporaryDirectory folder;
  for (const int status : run_processes(size, folder.path())) EXPECT_TRUE(has_ended_well(status));
  const std::string error = error_in(folder.path(), stopped == 0 ? 1 : 0);
  EXPECT_TRUE(has(error, " waited 3000 ms for rank " + std::to_string(stopped) + " in the "))
      << error;
}

TEST_F(PeerProcessesTest, AProcessThatIsStoppedInForwards) {
  expect_that_a_stopped_rank_is_named("stop in forwards", 1);
}

/// Rank 0 keeps the texts by which ranks tell each other why they end.
TEST_F(PeerProcessesTest, AProcessThatIsStoppedInReplays) {
  for (const int stopped : {0, 1}) expect_that_a_stopped_rank_is_named("stop in replays", stopped);
  if (cuda_device_count() > 1) expect_that_a_stopped_rank_is_named("stop in replays", 2, 4);
}

}  // namespace
}  // namespace fusedmoe::testing
