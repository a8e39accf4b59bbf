// Threads of the CPU: the default number, an engine's own executor, and changes during a forward.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/parallel.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "layer_problem.h"
#include "testing/compare.h"

namespace fusedmoe::executor_test {

using testing::bitwise_equal;
using testing::layer_options;
using testing::LayerSpec;
using testing::make_hidden_states;
using testing::make_layer_weights;

/// The library reads it when it is first asked for a number of threads: after this.
const int no_variable = unsetenv("OMP_NUM_THREADS");

int allowed_cores() {
  cpu_set_t cores;
  EXPECT_EQ(sched_getaffinity(0, sizeof(cores), &cores), 0);
  return CPU_COUNT(&cores);
}

TEST(ExecutorTest, DefaultIsTheCoresOfTheCallingThread) {
  ASSERT_EQ(no_variable, 0);
  const int before = num_threads();
  EXPECT_EQ(before, allowed_cores());
  set_num_threads(before + 1);
  set_num_threads(0);
  EXPECT_EQ(num_threads(), before);
  std::thread([] {
    cpu_set_t cores, one;
    ASSERT_EQ(sched_getaffinity(0, sizeof(cores), &cores), 0);
    CPU_ZERO(&one);
    for (int core = 0; CPU_COUNT(&one) == 0; ++core) {
      if (CPU_ISSET(core, &cores)) CPU_SET(core, &one);
    }
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(num_threads(), 1);
    EXPECT_EQ(default_executor().concurrency(), 1);
  }).join();
  EXPECT_EQ(num_threads(), before);
}

TEST(ExecutorTest, EveryTaskRunsOnce) {
  for (const int num_tasks : {1, 2, 5, 64}) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(num_tasks));
    const auto count = [&](int task) { ++runs[static_cast<std::size_t>(task)]; };
    make_executor(2)->run(num_tasks, Executor::Task(count));
    EXPECT_TRUE(std::all_of(runs.begin(), runs.end(), [](const auto& n) { return n == 1; }));
  }
}

/// The threads that run so many tasks.
std::set<std::thread::id> threads_of(Executor& executor, int num_tasks) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  core::run_tasks(executor, num_tasks, [&](int) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  return threads;
}

TEST(ExecutorTest, ManyTasksTakeNoMoreThreadsThanItHas) {
  const auto five = make_executor(5), two = make_executor(2);
  threads_of(*five, 5);  // more helpers than the next runs may use
  for (int i = 0; i < 50; ++i) EXPECT_LE(threads_of(*two, 40).size(), 2u);
}

TEST(ExecutorTest, TasksInsideOfATaskRunOnItsThread) {
  const auto executor = make_executor(3);
  std::atomic<int> runs{0};
  core::run_tasks(*executor, 3, [&](int) {
    const std::set<std::thread::id> threads = threads_of(*executor, 4);
    EXPECT_EQ(threads, std::set{std::this_thread::get_id()});
    core::run_tasks(default_executor(), 5, [&](int) { ++runs; });
  });
  EXPECT_EQ(runs, 15);
  core::run_tasks(*executor, 3, [&](int) { ++runs; });
  EXPECT_EQ(runs, 18);
}

TEST(ExecutorTest, SeveralThreadsRunStepsOfTheirOwnSizesAtOnce) {
  std::vector<std::thread> callers;
  callers.reserve(6);
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([caller] {
      const auto executor = make_executor(caller % 3 + 2);
      for (int step = 0; step < 200; ++step) {
        const int num_tasks = 1 + (step + caller) % 7;
        std::vector<int> runs(static_cast<std::size_t>(num_tasks));
        core::run_tasks(*executor, num_tasks,
                        [&](int task) { ++runs[static_cast<std::size_t>(task)]; });
        EXPECT_EQ(runs, std::vector<int>(runs.size(), 1));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(ExecutorTest, EveryTaskThrows) {
  const auto executor = make_executor(4);
  for (int i = 0; i < 20; ++i) {
    EXPECT_THROW(core::run_tasks(*executor, 9, [](int) { throw std::runtime_error(""); }),
                 std::runtime_error);
    EXPECT_NO_THROW(core::run_tasks(*executor, 9, [](int) {}));
  }
}

TEST(ExecutorTest, SleepingHelpersWakeUp) {
  const int more_than_cores = allowed_cores() + 2;  // so they sleep whenever there is no task
  const auto executor = make_executor(more_than_cores);
  std::atomic<int> runs{0};
  for (int i = 0; i < 100; ++i) core::run_tasks(*executor, more_than_cores, [&](int) { ++runs; });
  EXPECT_EQ(runs, 100 * more_than_cores);
}

TEST(ExecutorTest, AForkedProcessStartsThreadsOfItsOwn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer refuses threads after a fork of a process with threads";
#endif
  const std::shared_ptr<Executor> executor = make_executor(4);
  const auto threads_of_a_run = [&] {
    std::mutex mutex;
    std::set<std::thread::id> threads;
    const auto task = [&](int) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
    };
    executor->run(4, Executor::Task(task));
    return threads.size();
  };
  EXPECT_GT(threads_of_a_run(), 1u);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::thread([] {}).join();
    std::exit(threads_of_a_run() > 1 ? 0 : 1);  // runs the destructors of this thread
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(ExecutorTest, RangesMakeUpAll) {
  for (const std::int64_t count : {0, 1, 2, 7, 1000}) {
    for (const bool worthwhile : {false, true}) {
      std::vector<int> visits(static_cast<std::size_t>(count));
      core::parallel_for(*make_executor(3), count, worthwhile,
                         [&](std::int64_t i) { ++visits[static_cast<std::size_t>(i)]; });
      EXPECT_TRUE(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }));
    }
  }
}

TEST(ExecutorTest, ExceptionOfATaskReachesTheCaller) {
  for (const int num_tasks : {1, 4}) {
    EXPECT_THROW(core::run_tasks(*make_executor(4), num_tasks,
                                 [&](int task) {
                                   if (task == num_tasks - 1) throw std::runtime_error("");
                                 }),
                 std::runtime_error);
  }
}

TEST(ExecutorTest, RefusesImpossibleNumbers) {
  EXPECT_THROW(make_executor(-1), Error);
  EXPECT_THROW(make_executor(1 << 20), Error);
}

/// Runs tasks on the calling thread, the last one first.
class BackwardExecutor final : public Executor {
 public:
  int concurrency() const override { return 3; }
  void run(int num_tasks, Task task) override {
    ++runs_;
    for (int i = num_tasks; i-- > 0;) task(i);
  }
  int runs() const { return runs_; }

 private:
  int runs_ = 0;
};

/// Starts a thread for each task.
class ThreadExecutor final : public Executor {
 public:
  int concurrency() const override { return 4; }
  void run(int num_tasks, Task task) override {
    std::vector<std::thread> threads;
    threads.reserve(static_cast<std::size_t>(num_tasks));
    for (int i = 0; i < num_tasks; ++i) threads.emplace_back(task, i);
    for (std::thread& thread : threads) thread.join();
  }
};

LayerSpec large_spec() {
  LayerSpec spec;
  spec.shared_experts = spec.shared_gate = true;
  spec.experts.hidden = 256;
  return spec;
}

/// A forward in a workspace of exactly workspace_bytes, with a canary behind it.
Tensor run(const MoeLayer& layer, const TensorView& x, std::optional<Stream> stream = {}) {
  constexpr std::size_t kCanaryBytes = 4096;
  const std::size_t bytes = layer.workspace_bytes(x.size(0));
  const Tensor workspace =
      Tensor::empty({static_cast<std::int64_t>(bytes + kCanaryBytes)}, DType::kU8);
  auto* canary = workspace.as<unsigned char>() + bytes;
  std::memset(canary, 0x5a, kCanaryBytes);
  Tensor output = Tensor::empty(x.shape(), x.dtype());
  ForwardOptions options;
  options.stream = stream;
  layer.forward(x, output, {workspace.data(), bytes}, options);
  EXPECT_TRUE(
      std::all_of(canary, canary + kCanaryBytes, [](unsigned char c) { return c == 0x5a; }));
  return output;
}

TEST(ExecutorTest, EnginesOwnExecutorGivesTheSameBits) {
  for (const char* experts : {"cpu", "cpu_batched", "cpu_unfused", "reference"}) {
    const MoeLayer layer(make_layer_weights(large_spec()), layer_options(DType::kBF16, experts));
    const Tensor x = make_hidden_states(DType::kBF16, 200, 256);
    const Tensor expected = run(layer, x);
    BackwardExecutor backward;
    EXPECT_TRUE(bitwise_equal(run(layer, x, cpu_stream(backward)), expected)) << experts;
    EXPECT_GT(backward.runs(), 3) << experts;
    ThreadExecutor threads;
    EXPECT_TRUE(bitwise_equal(run(layer, x, cpu_stream(threads)), expected)) << experts;
  }
}

TEST(ExecutorTest, LayerUsesItsOwn) {
  LayerOptions options = layer_options(DType::kBF16, "cpu");
  BackwardExecutor backward;
  options.executor = &backward;
  const MoeLayer layer(make_layer_weights(large_spec()), options);
  run(layer, make_hidden_states(DType::kBF16, 200, 256));
  EXPECT_GT(backward.runs(), 3);
}

TEST(ExecutorTest, NumberOfThreadsMayChangeDuringAForward) {
  const MoeLayer layer(make_layer_weights(large_spec()), layer_options(DType::kBF16, "cpu"));
  const Tensor x = make_hidden_states(DType::kBF16, 40, 256);
  const Tensor expected = run(layer, x);
  std::atomic<bool> done{false};
  std::thread changer([&] {
    for (int i = 0; !done; ++i) set_num_threads(i % 2 ? 1 : 24);
  });
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(bitwise_equal(run(layer, x), expected));
  done = true;
  changer.join();
  set_num_threads(0);
}

}  // namespace fusedmoe::executor_test
