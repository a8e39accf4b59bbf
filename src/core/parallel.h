// Loops over an executor's threads. The iterations are cut into one range for each thread, in
// order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::core {

/// The executor of a CPU stream; the default one if it has none.
Executor& executor_of(Stream stream);

/// Throws Error unless it is a number of threads, or 0 for the default.
void check_num_threads(int num_threads);

/// An executor for the steps that write a forward's output, which must not be left half written:
/// what run() of the other one leaves, because it throws, the calling thread does.
class Completing final : public Executor {
 public:
  explicit Completing(Executor& executor) : executor_(executor) {}
  int concurrency() const override { return executor_.concurrency(); }
  void run(int num_tasks, Task task) override;

 private:
  Executor& executor_;
};

/// Calls function(task) for every task in [0, num_tasks). If some throw, one of the exceptions is
/// thrown again when all have ended. A single task runs on the calling thread.
template <typename Function>
void run_tasks(Executor& executor, int num_tasks, const Function& function) {
  if (num_tasks <= 1) {
    function(0);
    return;
  }
  std::exception_ptr failure;
  std::atomic_flag failed;
  const auto guarded = [&](int task) {
    try {
      function(task);
    } catch (...) {
      if (!failed.test_and_set()) failure = std::current_exception();
    }
  };
  executor.run(num_tasks, Executor::Task(guarded));
  if (failure) std::rethrow_exception(failure);
}

/// Calls function(begin, end) for ranges that make up [0, count). Without `worthwhile`, waking
/// threads would cost more than it saves, and one range runs on the calling thread.
template <typename Function>
void parallel_ranges(Executor& executor, std::int64_t count, bool worthwhile,
                     const Function& function) {
  if (count <= 0) return;
  const std::int64_t threads = worthwhile ? std::max(1, executor.concurrency()) : 1;
  const int num_tasks = static_cast<int>(std::min(threads, count));
  run_tasks(executor, num_tasks,
            [&](int task) { function(count * task / num_tasks, count * (task + 1) / num_tasks); });
}

/// Calls function(i) for every i in [0, count).
template <typename Function>
void parallel_for(Executor& executor, std::int64_t count, bool worthwhile,
                  const Function& function) {
  parallel_ranges(executor, count, worthwhile, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) function(i);
  });
}

/// largest = max(largest, value), also while other threads do so.
inline void raise(std::atomic<float>& largest, float value) {
  float current = largest;
  while (value > current && !largest.compare_exchange_weak(current, value)) {
  }
}

/// The largest of 0 and function(begin, end) over such ranges.
template <typename Function>
float parallel_max(Executor& executor, std::int64_t count, bool worthwhile,
                   const Function& function) {
  std::atomic<float> largest{0};
  parallel_ranges(executor, count, worthwhile, [&](std::int64_t begin, std::int64_t end) {
    raise(largest, function(begin, end));
  });
  return largest;
}

}  // namespace fusedmoe::core
