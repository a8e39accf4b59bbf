// Threads of the CPU: the default executor, which alone uses OpenMP, and how many threads it takes.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "core/check.h"
#include "core/parallel.h"
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

/// Cores that the calling thread may run on.
int allowed_cores() {
  cpu_set_t cores[8];  // the kernel needs a bit for each possible core: 8192 here
  if (sched_getaffinity(0, sizeof(cores), cores) == 0) return CPU_COUNT_S(sizeof(cores), cores);
  return std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
}

class OpenMpExecutor final : public Executor {
 public:
  explicit OpenMpExecutor(int threads) : threads_(threads) {}

  int concurrency() const override { return threads_ ? threads_ : num_threads(); }
  void run(int num_tasks, Task task) override {
    // OpenMP may give fewer threads than tasks, as within a parallel region of the caller.
#pragma omp parallel for schedule(static, 1) num_threads(num_tasks)
    for (int i = 0; i < num_tasks; ++i) task(i);
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
  return environment ? environment : allowed_cores();
}

std::shared_ptr<Executor> make_executor(int num_threads) {
  core::check_num_threads(num_threads);
  return std::make_shared<OpenMpExecutor>(num_threads);
}

Executor& default_executor() {
  static OpenMpExecutor executor(0);
  return executor;
}

Stream cpu_stream(Executor& executor) {
  return {Device{}, &executor};
}

Executor& core::executor_of(Stream stream) {
  return stream.handle ? *static_cast<Executor*>(stream.handle) : default_executor();
}

}  // namespace fusedmoe
