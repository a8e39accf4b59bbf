// A thread that ends the waits of this rank's kernels when a rank has failed, and tells the other
// ranks when kernels of this one have given up.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "moe/peer_memory.h"

namespace fusedmoe::comm {

class PeerWatch {
 public:
  /// `has_failed` says whether any rank has, and tells the others what this one knows. It calls
  /// nothing of CUDA, which may wait for the very kernels that are to end.
  PeerWatch(std::shared_ptr<PeerMemory> peers, std::function<bool()> has_failed)
      : peers_(std::move(peers)), has_failed_(std::move(has_failed)), thread_([this] { run(); }) {}
  ~PeerWatch() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

 private:
  void run() {
    // The control plane, which may be another host's, is asked less often than the own kernels.
    constexpr std::chrono::milliseconds kLook{10};
    constexpr int kLooksBetween = 5;
    std::unique_lock lock(mutex_);
    for (int looks = 1; !changed_.wait_for(lock, kLook, [&] { return ending_; }); ++looks) {
      lock.unlock();
      const bool is_time = looks % kLooksBetween == 0 || !peers_->failure().empty();
      if (is_time && has_failed_()) return peers_->abort();
      lock.lock();
    }
    if (has_failed_()) peers_->abort();  // nobody waits any more
  }

  const std::shared_ptr<PeerMemory> peers_;
  const std::function<bool()> has_failed_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace fusedmoe::comm
