#include "core/thread_team.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>

namespace fusedmoe::core {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

thread_local bool in_task = false;

std::atomic<int> fork_count{0};

/// How many forks lie between this process and the one that first asked. A child has none of its
/// parent's threads.
int forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++fork_count; });
  return registered == 0 ? fork_count.load(std::memory_order_relaxed) : 0;
}

/// How long a thread waits in each way before it goes on to the next: it spins, it offers its core
/// to others, and in the end it sleeps. Waking it costs tens of microseconds in a virtual machine.
struct Patience {
  microseconds spin, yield;
};

// Steps of a forward follow each other within microseconds, forwards of a model within some
// milliseconds.
constexpr Patience kHelper{microseconds(50), microseconds(2000)};
// Threads end a step within microseconds of each other. One that is later has lost its core: it
// gets this one when this thread sleeps.
constexpr Patience kCaller{microseconds(50), microseconds(0)};
constexpr Patience kCrowded{microseconds(0), microseconds(0)};

/// Waits until `value` is no longer `old`.
void wait_while(const std::atomic<int>& value, int old, Patience patience) {
  const auto changed = [&] { return value.load(std::memory_order_acquire) != old; };
  const Clock::time_point start = Clock::now();
  Clock::time_point now = start;
  while (now - start < patience.spin) {
    for (int i = 0; i < 16; ++i) {
      if (changed()) return;
      pause();
    }
    now = Clock::now();
  }
  while (now - start < patience.yield) {
    if (changed()) return;
    const Clock::time_point before = now;
    sched_yield();
    now = Clock::now();
    // Somebody else had the core. Those who sleep get one sooner than those who yield.
    if (now - before > microseconds(50)) break;
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadTeam::~ThreadTeam() {
  forget_threads_of_parent();
  untaken_ = kStop;
  untaken_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadTeam::run(int num_tasks, Executor::Task task) {
  forget_threads_of_parent();
  if (static_cast<int>(helpers_.size()) < num_tasks - 1) start_helpers(num_tasks - 1);
  const bool crowded = num_tasks > num_cores_;
  crowded_.store(crowded, std::memory_order_relaxed);
  task_ = &task;
  unfinished_.store(num_tasks, std::memory_order_relaxed);
  // Sequentially consistent: a helper that is about to sleep must not miss it.
  untaken_.store(num_tasks);
  untaken_.notify_all();
  take_tasks();
  const Patience patience = crowded ? kCrowded : kCaller;
  for (int left = unfinished_.load(std::memory_order_acquire); left != 0;
       left = unfinished_.load(std::memory_order_acquire)) {
    wait_while(unfinished_, left, patience);
  }
}

void ThreadTeam::forget_threads_of_parent() {
  if (forks_ == forks()) return;
  forks_ = forks();
  // Their handles are dead: joining or detaching one ends the process. So they are never destroyed.
  // After a fork one thread is left, so one team at most comes by here with helpers.
  static auto& abandoned = *new std::vector<std::vector<std::thread>>;
  if (!helpers_.empty()) abandoned.push_back(std::move(helpers_));
  helpers_.clear();
  start_failed_ = false;
  untaken_ = 0;
}

void ThreadTeam::start_helpers(int count) {
  if (start_failed_) return;
  try {
    while (static_cast<int>(helpers_.size()) < count) helpers_.emplace_back([this] { help(); });
  } catch (const std::system_error&) {
    start_failed_ = true;
  }
  num_cores_ = allowed_cores();
}

void ThreadTeam::help() {
  for (;;) {
    take_tasks();
    if (untaken_.load(std::memory_order_relaxed) == kStop) return;
    wait_while(untaken_, 0, crowded_.load(std::memory_order_relaxed) ? kCrowded : kHelper);
  }
}

/// A task is taken by counting down. Only then is task_ read: until the taken task has returned,
/// the run cannot end and task_ cannot change. If another run began after `left` was read, its task
/// is as good.
void ThreadTeam::take_tasks() noexcept {
  for (int left = untaken_.load(std::memory_order_acquire); left > 0;) {
    if (!untaken_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel,
                                        std::memory_order_acquire)) {
      continue;
    }
    in_task = true;
    (*task_)(left - 1);
    in_task = false;
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_one();
    left = untaken_.load(std::memory_order_acquire);
  }
}

bool in_team_task() {
  return in_task;
}

int allowed_cores() {
  cpu_set_t cores[8];  // the kernel needs a bit for each possible core: 8192 here
  if (sched_getaffinity(0, sizeof(cores), cores) == 0) return CPU_COUNT_S(sizeof(cores), cores);
  return std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
}

}  // namespace fusedmoe::core
