// NCCL's communicator of a rank: who may call it, and how it ends.
//
// Who touches what, and until when:
// - ncclComm_t: the thread that calls the data plane, in group(), with the lock. The first of
//   abort() and destroy() lets nobody in any more and starts a thread that ends it when the last
//   one has left. So nobody is in NCCL when its memory goes, and nothing is freed twice.
// - Comm: the data plane, its watch and that thread hold it, so it lives as long as the slowest.
// - Threads that may stay in NCCL for ever, because a rank is gone or a graph still holds the
//   communicator, touch only what they hold. Nobody joins them, but the end of the process waits
//   for them a little: CUDA and NCCL should not go while they work.
#pragma once

#include "cuda/nccl/connecting.h"
#include "cuda/nccl/functions.h"

#if FUSEDMOE_HAVE_NCCL

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>

namespace fusedmoe::cuda {

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  /// `ours`: to be destroyed, which else the caller does unless it was aborted.
  Comm(ncclComm_t comm, bool ours, Device device) : comm_(comm), ours_(ours), device_(device) {}
  /// Aborts one of ours that nobody has ended.
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  /// Keeps memory that kernels of NCCL use until it is gone.
  void keep(std::shared_ptr<void> memory) { kept_ = std::move(memory); }
  /// Makes the calls in one group of NCCL's. Throws Error once the communicator ends.
  void group(const std::function<void(ncclComm_t)>& calls);
  /// Ends the kernels that wait, and those who wait in group(); the CUDA context stays usable.
  /// Waits for nothing.
  void abort() noexcept;
  /// True when it is gone: waits for that, at most for `timeout`.
  bool destroy(std::chrono::milliseconds timeout) noexcept;

 private:
  void end(void (Comm::*act)() noexcept) noexcept;
  void abort_now() noexcept;
  void destroy_now() noexcept;

  const ncclComm_t comm_;
  const bool ours_;
  const Device device_;
  std::shared_ptr<void> kept_;
  std::mutex mutex_;                 // held by who is in NCCL
  std::atomic<bool> closed_{false};  // nobody may begin a group
  std::atomic<bool> ended_{false};   // by somebody, who may not be done
  std::promise<void> gone_;
  const std::shared_future<void> is_gone_{gone_.get_future()};
};

/// Connects the ranks, which must all be here, in a part of theirs. Throws Error where they do not
/// come in time, or where one of them has failed meanwhile.
std::shared_ptr<Comm> connect_ranks(int rank, int size, Device device, const ncclUniqueId& id,
                                    Connecting& ranks);

}  // namespace fusedmoe::cuda

#endif
