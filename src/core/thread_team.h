// The threads that help one calling thread with its parallel steps.
//
// Tasks belong to no thread: each thread takes the next one that nobody has taken, the caller too.
// So a thread that does not run, because a neighbour has its core or because it has not woken up
// yet, delays nothing but the task that it holds.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "fusedmoe/runtime.h"

namespace fusedmoe::core {

class ThreadTeam {
 public:
  ThreadTeam() = default;
  /// Ends the threads and waits for them.
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  /// Calls task(0), ..., task(num_tasks - 1) on at most num_tasks threads, of which the calling one
  /// is one. Starts those that are missing; where the system refuses, fewer do the work.
  void run(int num_tasks, Executor::Task task);

 private:
  void forget_threads_of_parent();
  void start_helpers(int count);
  void help();
  void take_tasks() noexcept;

  std::vector<std::thread> helpers_;
  int forks_ = 0;              // of the process that started them
  int num_cores_ = 1;          // when they were started
  bool start_failed_ = false;  // ask the system once

  const Executor::Task* task_ = nullptr;  // of the current run
  std::atomic<bool> crowded_{false};      // more tasks than cores: who waits must not spin

  static constexpr int kStop = -1;
  // Of the current run: tasks that no thread has taken, or kStop; tasks that have not returned.
  alignas(64) std::atomic<int> untaken_{0};
  alignas(64) std::atomic<int> unfinished_{0};
};

/// Tells the processor that this thread only waits.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

/// Whether the calling thread is inside of a task of a team.
bool in_team_task();

/// Cores that the calling thread may run on.
int allowed_cores();

}  // namespace fusedmoe::core
