// Threads of the CPU: the default executor, and how many threads it takes.
#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "core/check.h"
#include "core/parallel.h"
#include "core/thread_team.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe {
namespace {

constexpr int kMaxThreads = 4096;

std::atomic<int> requested_threads{0};  // 0: the default

/// The first number of OMP_NUM_THREADS, which may be a list with one for each level of nesting; 0
/// if there is none.
int threads_of_environment() {
  const char* variable = std::getenv("OMP_NUM_THREADS");
  const std::string_view text = variable ? variable : "";
  int threads = 0;
  std::from_chars(text.data(), text.data() + text.size(), threads);
  return std::clamp(threads, 0, kMaxThreads);
}

/// Each thread that calls run() has a team of its own, which ends with it.
class TeamExecutor final : public Executor {
 public:
  explicit TeamExecutor(int threads) : threads_(threads) {}

  int concurrency() const override { return threads_ ? threads_ : num_threads(); }
  void run(int num_tasks, Task task) override {
    const int threads = std::min(num_tasks, concurrency());
    if (threads <= 1 || core::in_team_task()) {
      for (int i = 0; i < num_tasks; ++i) task(i);
      return;
    }
    thread_local core::ThreadTeam team;
    if (threads == num_tasks) return team.run(num_tasks, task);
    std::atomic<int> next{0};
    const auto several = [&](int) {
      for (int i = next.fetch_add(1); i < num_tasks; i = next.fetch_add(1)) task(i);
    };
    team.run(threads, Task(several));
  }

 private:
  int threads_;
};

}  // namespace

namespace core {

void check_num_threads(int num_threads) {
  FUSEDMOE_CHECK(num_threads >= 0 && num_threads <= kMaxThreads, "num_threads",
                 core::to_string(num_threads),
                 core::format("in [1, {}], or 0 for the default", kMaxThreads));
}

}  // namespace core

void set_num_threads(int num_threads) {
  core::check_num_threads(num_threads);
  requested_threads = num_threads;
}

int num_threads() {
  if (const int requested = requested_threads) return requested;
  static const int environment = threads_of_environment();
  return environment ? environment : core::allowed_cores();
}

std::shared_ptr<Executor> make_executor(int num_threads) {
  core::check_num_threads(num_threads);
  return std::make_shared<TeamExecutor>(num_threads);
}

Executor& default_executor() {
  static TeamExecutor executor(0);
  return executor;
}

Stream cpu_stream(Executor& executor) {
  return {Device{}, &executor};
}

void core::Completing::run(int num_tasks, Task task) {
  std::atomic<int> next{0};
  const auto one = [&](int) {
    const int index = next.fetch_add(1);
    if (index < num_tasks) task(index);
    return index < num_tasks;
  };
  try {
    executor_.run(num_tasks, Task([&](int index) { one(index); }));
  } catch (...) {
    while (one(0)) {
    }
  }
}

Executor& core::executor_of(Stream stream) {
  return stream.handle ? *static_cast<Executor*>(stream.handle) : default_executor();
}

}  // namespace fusedmoe
