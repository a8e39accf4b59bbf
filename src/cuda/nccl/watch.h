// Two threads that watch what was enqueued. One looks for work that does not end, for a rank that
// has given up, and for labels of ranks that do not do the same. It calls nothing of CUDA, which
// may wait for a thread that waits for the very kernels that this one is to end. The other asks the
// device which work has ended.
#pragma once

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda/nccl/labels.h"

namespace fusedmoe::cuda {

/// Ranks that wait longer than the timeout post "nccl/expired". Every rank's thread then posts how
/// far its host has come, "nccl/at/<rank>", even where its main thread sleeps. Who has come less
/// far than the one that waits, or does not answer, is late; its number goes into "failure".
class Watch {
 public:
  using Clock = std::chrono::steady_clock;

  Watch(int rank, int size, Device device, std::shared_ptr<ControlPlane> control,
        std::shared_ptr<Labels> labels, std::chrono::milliseconds timeout,
        std::function<void()> abort);
  /// Watches until what was enqueued has ended, or until it gives up.
  ~Watch();

  /// What was enqueued on the stream until now has to end within the timeout; `what` names it in
  /// errors. Then its labels, which it may lack, are compared and given back.
  void enqueued(cudaStream_t stream, std::string_view what, Labels::Slot* labels);

 private:
  struct Work {
    cudaEvent_t event;
    std::uint64_t number;
    Clock::time_point deadline;
    std::string what;
    Labels::Slot* labels;
  };

  void run();
  void ask_device();
  void stop();
  /// True when the watch is over.
  bool look();
  bool expired();
  bool has_failed() noexcept;
  bool differs(const std::string& difference);
  void post_number();
  void give_up(std::uint64_t number, const std::string& what);

  const int rank_, size_;
  const Device device_;
  const std::shared_ptr<ControlPlane> control_;
  const std::shared_ptr<Labels> labels_;
  const std::chrono::milliseconds timeout_;
  const std::function<void()> abort_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  std::vector<cudaEvent_t> free_;
  std::uint64_t number_ = 0;     // of the last work
  bool answered_ = false;        // of thread_
  bool ending_ = false;          // no more work comes
  bool over_ = false;            // nobody needs to know which work has ended
  Clock::time_point not_ended_;  // when the device was last asked and said so of the first work
  std::thread thread_, asking_;
};

}  // namespace fusedmoe::cuda
