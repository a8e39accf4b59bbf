// What goes wrong on one rank on GPUs is an Error of all, within the deadline; the GPUs work on,
// and so does a new communicator. As tests/ranks/failure_test.cpp on the CPU.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <latch>

#include "../unit/layer_problem.h"
#include "fusedmoe/quant.h"
#include "gpu_ranks.h"
#include "rank_processes.h"
#include "testing/compare.h"

namespace fusedmoe::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Long enough to make a layer, and to connect over NCCL, before it passes.
constexpr milliseconds kDeadline{2500};

/// How the ranks talk and what they send.
struct Way {
  Setting setting;
  const char* transport;
  bool fixed_sizes;
};

/// `fixed_sizes`: with these, too.
std::vector<Way> ways(bool fixed_sizes) {
  std::vector<Way> list;
  for (const Setting& setting : settings()) {
    if (setting.size == 8) continue;
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      list.push_back({setting, transport, false});
      if (!setting.nccl && setting.size == 4) break;  // one suffices to name one rank of many
      if (fixed_sizes) list.push_back({setting, transport, true});
    }
  }
  return list;
}

/// Calls a function when a scope is left.
class OnExit {
 public:
  explicit OnExit(std::function<void()> function) : function_(std::move(function)) {}
  ~OnExit() { function_(); }
  OnExit(const OnExit&) = delete;
  OnExit& operator=(const OnExit&) = delete;

 private:
  std::function<void()> function_;
};

/// One rank with two layers.
struct Rank {
  Communicator& communicator;
  const MoeLayer &first, &second;
  const bool fixed_sizes;
  /// A forward; throws what the ranks have failed with, if they have by its end.
  void step(const MoeLayer& layer, std::int64_t tokens = kTokens, std::int64_t most = kTokens,
            const ExpertsHooks* hooks = nullptr) const {
    const Tensor x = random_tensor(DType::kBF16, {tokens, kHidden}, 1, 5);
    forward(layer, x, most, hooks, fixed_sizes);
    communicator.check();
  }
};

LayerOptions options_of(const Way& way, const std::shared_ptr<Communicator>& communicator) {
  LayerOptions options = testing::options_of(communicator->device(), false);
  options.require += std::string("+") + way.transport;
  options.hooks = true;
  options.ranks.communicator = communicator;
  options.ranks.max_tokens_per_rank = kTokens;
  return options;
}

using Disturb = std::function<void(const Rank&)>;

struct Outcome {
  std::vector<std::string> errors;  ///< what each rank has thrown
  steady_clock::duration took{};    ///< from when rank 1 began to disturb until all others ended
};

/// Every rank makes two layers and does a step of the first. `disturb` is what rank 1 does then,
/// while the others do three more steps. It keeps its communicator until they have ended.
Outcome outcome_of_steps(const Way& way, milliseconds timeout, const Disturb& disturb) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  Ranks ranks(way.setting, timeout);
  steady_clock::time_point begin;
  std::latch others(way.setting.size - 1);
  Outcome outcome;
  outcome.errors = errors_of_ranks(way.setting.size, [&](int number) {
    const OnExit count_down([&] {
      if (number != 1) others.count_down();
    });
    const auto communicator = ranks.join(number);
    const LayerOptions options = options_of(way, communicator);
    const MoeLayer first(weights, options), second(weights, options);
    const Rank rank{*communicator, first, second, way.fixed_sizes};
    rank.step(first);
    communicator->barrier();
    if (number == 1) {
      const OnExit wait([&] {
        others.wait();
        outcome.took = steady_clock::now() - begin;
      });
      begin = steady_clock::now();
      disturb(rank);
      communicator->check();
    } else {
      for (int step = 0; step < 3; ++step) rank.step(first);
      communicator->barrier();
    }
  });
  return outcome;
}

/// The GPUs and a new communicator work.
void expect_works_again(const Way& way) {
  const Outcome outcome = outcome_of_steps(way, kPatient, [](const Rank& rank) {
    for (int step = 0; step < 3; ++step) rank.step(rank.first);
    rank.communicator.barrier();
  });
  for (const std::string& error : outcome.errors) EXPECT_EQ(error, "");
}

std::string trace(const Way& way) {
  return way.setting.name() + " " + way.transport + (way.fixed_sizes ? " fixed" : "");
}

/// Rank 1 misses the deadline of `step`: the others say so, within it and 1 s.
void expect_late(const Way& way, int step, const Disturb& disturb) {
  SCOPED_TRACE(trace(way));
  const Outcome outcome = outcome_of_steps(way, kDeadline, disturb);
  EXPECT_LT(outcome.took, kDeadline + std::chrono::seconds(1));
  const std::string expected = " of step " + std::to_string(step) +
                               " of layer 0: " + within("rank 1 did not arrive", kDeadline);
  for (int number = 0; number < way.setting.size; ++number) {
    const std::string& error = outcome.errors[number];
    if (number == 1) continue;
    EXPECT_TRUE(error.ends_with(expected)) << "rank " << number << ": " << error;
  }
  expect_works_again(way);
}

/// Rank 1 fails: all ranks say so at once, with these texts.
void expect_failure(const Way& way, const std::vector<std::string>& parts, const Disturb& disturb) {
  SCOPED_TRACE(trace(way));
  const Outcome outcome = outcome_of_steps(way, kPatient, disturb);
  EXPECT_LT(outcome.took, std::chrono::seconds(2)) << "at once";
  for (const std::string& error : outcome.errors) {
    for (const std::string& part : parts) {
      EXPECT_TRUE(error.find(part) != std::string::npos) << part << ", expected; " << error;
    }
  }
  expect_works_again(way);
}

TEST(CudaRankFailuresTest, ARankThatIsGone) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Way& way : ways(false)) expect_late(way, 1, [](const Rank&) {});
}

TEST(CudaRankFailuresTest, ARankWithOneCallFewer) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Way& way : ways(true)) {
    expect_late(way, 2, [](const Rank& rank) { rank.step(rank.first); });
  }
}

/// It learns so when it wakes.
TEST(CudaRankFailuresTest, ARankThatSleeps) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Way& way : ways(false)) {
    bool awake = false;
    expect_late(way, 1, [&](const Rank& rank) {
      std::this_thread::sleep_for(kDeadline + milliseconds(300));
      try {
        rank.step(rank.first);
      } catch (const Error& error) {
        awake = std::string(error.what()).find("rank 1 did not arrive") != std::string::npos;
      }
    });
    EXPECT_TRUE(awake);
  }
}

/// With fixed sizes its rows fit, so the step ends. The ranks learn by their labels that they were
/// mixed.
TEST(CudaRankFailuresTest, ARankInAnotherLayer) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Way& way : ways(true)) {
    expect_failure(way, {"layer 0", "layer 1"}, [](const Rank& rank) {
      rank.step(rank.second);
      rank.communicator.barrier();  // where the others never come
    });
  }
}

/// It does one step of the same layer more than the others. A replay's label has no step, so this
/// is not noticed there.
TEST(CudaRankFailuresTest, ARankInAnotherStep) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Way& way : ways(true)) {
    expect_failure(way, {"step 1 of layer 0", "step 2 of layer 0"}, [](const Rank& rank) {
      rank.communicator.next_step();
      rank.step(rank.first);
      rank.communicator.barrier();
    });
  }
}

TEST(CudaRankFailuresTest, ARankThatReplaysAnotherLayer) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const Way& way : ways(true)) {
    if (!way.setting.nccl || !way.fixed_sizes) continue;
    SCOPED_TRACE(trace(way));
    Ranks ranks(way.setting);
    const auto errors = errors_of_ranks(way.setting.size, [&](int number) {
      const auto communicator = ranks.join(number);
      LayerOptions options = options_of(way, communicator);
      options.hooks = false;
      const MoeLayer first(weights, options), second(weights, options);
      const MoeLayer& layer = number == 1 ? second : first;
      const Device device = communicator->device();
      const auto bytes = static_cast<std::int64_t>(layer.workspace_bytes(kTokens, true));
      const Tensor workspace = Tensor::empty({bytes}, DType::kU8, device);
      const Tensor x = Tensor::zeros({kTokens, kHidden}, DType::kBF16, device);
      const Tensor output = Tensor::empty(x.shape(), x.dtype(), device);
      const OwnedStream stream(device);
      ForwardOptions forward;
      forward.stream = stream;
      forward.fixed_sizes = true;
      const auto run = [&](const MoeLayer& which) {
        which.forward(x, output, {workspace.data(), static_cast<std::size_t>(bytes)}, forward);
      };
      run(first);
      synchronize(stream);
      communicator->barrier();
      const Graph graph(stream, [&] { run(layer); });
      graph.launch(stream);
      synchronize(stream);
      const auto deadline = steady_clock::now() + kPatient;
      while (communicator->status().empty() && steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
      communicator->check();
    });
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("of layer 0"), std::string::npos) << error;
      EXPECT_NE(error.find("of layer 1"), std::string::npos) << error;
    }
    expect_works_again(way);
  }
}

TEST(CudaRankFailuresTest, ARankWithAnotherSizeOfStep) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Way& way : ways(false)) {
    expect_failure(way, {"at most 24 tokens", "at most 2 tokens"},
                   [](const Rank& rank) { rank.step(rank.first, 2, 2); });
  }
}

/// It throws before its step.
TEST(CudaRankFailuresTest, ARankWithTooManyTokens) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Way& way : ways(true)) {
    expect_failure(way, {"hidden_states: was 25 tokens; must be at most 24"},
                   [](const Rank& rank) { rank.step(rank.first, kTokens + 1); });
  }
}

/// Between prepare and finalize.
TEST(CudaRankFailuresTest, ARankThatThrowsInsideAStep) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Way& way : ways(true)) {
    expect_failure(way, {"no adapter"}, [](const Rank& rank) {
      ExpertsHooks hooks;
      hooks.after_gemm1 = [](const HookArgs&) { throw std::runtime_error("no adapter"); };
      rank.step(rank.first, kTokens, kTokens, &hooks);
    });
  }
}

TEST(CudaRankFailuresTest, ARankThatEndsTheCommunicatorAfterAStep) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Way& way : ways(true)) {
    expect_failure(way, {"rank 1: enough"}, [](const Rank& rank) {
      rank.step(rank.first);
      rank.communicator.abort("enough");
    });
  }
}

TEST(CudaRankFailuresTest, FullBuffers) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const Way& way : ways(false)) {
    SCOPED_TRACE(way.setting.name() + " " + way.transport);
    Ranks ranks(way.setting);
    const auto errors = errors_of_ranks(way.setting.size, [&](int number) {
      const auto communicator = ranks.join(number);
      LayerOptions options = options_of(way, communicator);
      options.ranks.receive_capacity = 10 * way.setting.size;
      const MoeLayer layer(weights, options);
      const Rank rank{*communicator, layer, layer, false};
      rank.step(layer, 8);
      communicator->barrier();
      rank.step(layer, kTokens);
    });
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("receive_capacity"), std::string::npos) << error;
    }
    expect_works_again(way);
  }
}

TEST(CudaRankFailuresTest, ARankWithAnotherConfiguration) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Way& way : ways(false)) {
    SCOPED_TRACE(way.setting.name() + " " + way.transport);
    Ranks ranks(way.setting);
    const auto errors = errors_of_ranks(way.setting.size, [&](int number) {
      LayerWeights weights = make_layer_weights({small_case("bf16")});
      const auto communicator = ranks.join(number);
      if (number == 1) weights.router.topk = 3;
      const MoeLayer layer(weights, options_of(way, communicator));
    });
    for (const std::string& error : errors) {
      EXPECT_TRUE(error.starts_with("the ranks of a layer differ in topk: ")) << error;
    }
    expect_works_again(way);
  }
}

// ------------------------------------------------------------------------------------------------
// A process that is killed. CUDA does not survive a fork, so each rank is a new process, which runs
// the disabled test below.

/// What each process of the next test runs. Rank 1 kills itself in the middle of a step. Rank 0
/// writes the text of the Error that it gets to a file.
TEST(CudaRankFailuresTest, DISABLED_OneProcess) {
  if (!std::getenv(kRank)) GTEST_SKIP() << "only as a process of the test below";
  const int rank = std::atoi(std::getenv(kRank));
  const std::filesystem::path folder = std::getenv(kFolder);
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  const Way way{{2, true}, "all2all", false};
  const GatherCallback gather = gather_by_files(folder, rank, 2);
  const auto control = make_control_plane(rank, 2, gather, kPatient);
  const auto communicator =
      make_communicator(rank, 2, control, {kPatient, Device{DeviceKind::kCuda, rank}, true, false});
  const MoeLayer layer(make_layer_weights({small_case("bf16")}), options_of(way, communicator));
  const Rank self{*communicator, layer, layer};
  self.step(layer);
  communicator->barrier();
  ExpertsHooks hooks;
  if (rank == 1) hooks.after_gemm1 = [](const HookArgs&) { std::raise(SIGKILL); };
  const auto begin = steady_clock::now();
  std::string text = "nothing";
  try {
    self.step(layer, kTokens, kTokens, &hooks);
  } catch (const Error& error) {
    text = error.what();
  }
  EXPECT_LT(steady_clock::now() - begin, kAtOnce);
  EXPECT_NO_THROW(synchronize(Stream{communicator->device()})) << "the GPU works on";
  std::ofstream(error_file(folder, rank)) << text;
}

TEST(CudaRankFailuresTest, AProcessThatIsKilled) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  if (cuda_device_count() < 2) GTEST_SKIP() << "one GPU";
  if (!nccl_info().problem.empty()) GTEST_SKIP() << nccl_info().problem;
  expect_that_a_killed_rank_is_told();
}

}  // namespace
}  // namespace fusedmoe::testing
