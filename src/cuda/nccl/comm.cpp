#include "cuda/nccl/comm.h"

#include <algorithm>
#include <condition_variable>
#include <thread>

#include "core/check.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::cuda {
#if FUSEDMOE_HAVE_NCCL

using std::chrono::milliseconds;

namespace {

/// What the end of the process, or of a data plane, gets to wait for threads that may never leave.
constexpr milliseconds kPatience{5000};

/// The threads of run_detached(). Never destroyed: they may outlive everything else.
struct Detached {
  std::mutex mutex;
  std::condition_variable changed;
  int running = 0;
};

Detached& detached() {
  static Detached& threads = *new Detached;
  // Made after CUDA and NCCL were loaded, so it goes before they do.
  static const struct AtExit {
    ~AtExit() {
      std::unique_lock lock(threads.mutex);
      threads.changed.wait_for(lock, kPatience, [] { return threads.running == 0; });
    }
  } at_exit;
  return threads;
}

/// Calls `work`, which does not throw, in a thread that nobody joins.
void run_detached(std::function<void()> work) {
  Detached& threads = detached();
  const auto count = [&threads](int change) {
    const std::lock_guard lock(threads.mutex);
    threads.running += change;
    threads.changed.notify_all();
  };
  count(1);
  try {
    std::thread([work = std::move(work), count]() mutable {
      work();
      work = nullptr;  // what it holds goes before it counts as gone
      count(-1);
    }).detach();
  } catch (...) {
    count(-1);
    throw;
  }
}

/// The first of each kind of call connects the ranks, during which the host waits: here, not in the
/// first step.
void connect(ncclComm_t comm, int size, Device device) {
  const OwnedStream stream(device);
  const auto handle = static_cast<cudaStream_t>(Stream(stream).handle);
  constexpr std::int64_t kCount = 1 << 16;
  const Tensor all = Tensor::zeros({size * kCount}, DType::kF32, device);
  const Tensor one = Tensor::zeros({kCount}, DType::kF32, device);
  FUSEDMOE_NCCL_CHECK(ncclGroupStart);
  for (int peer = 0; peer < size; ++peer) {
    FUSEDMOE_NCCL_CHECK(ncclSend, one.data(), kCount, ncclFloat32, peer, comm, handle);
    FUSEDMOE_NCCL_CHECK(ncclRecv, all.as<float>() + peer * kCount, kCount, ncclFloat32, peer, comm,
                        handle);
  }
  FUSEDMOE_NCCL_CHECK(ncclGroupEnd);
  FUSEDMOE_NCCL_CHECK(ncclAllGather, one.data(), all.data(), kCount, ncclFloat32, comm, handle);
  FUSEDMOE_NCCL_CHECK(ncclReduceScatter, all.data(), one.data(), kCount, ncclFloat32, ncclSum, comm,
                      handle);
  synchronize(stream);
}

}  // namespace

Comm::~Comm() {
  if (ours_ && !ended_) abort_now();
}

void Comm::group(const std::function<void(ncclComm_t)>& calls) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error::communication("NCCL was aborted");
  const CurrentDevice current(device_);
  FUSEDMOE_NCCL_CHECK(ncclGroupStart);
  try {
    calls(comm_);
  } catch (...) {
    nccl().ncclGroupEnd();
    throw;
  }
  FUSEDMOE_NCCL_CHECK(ncclGroupEnd);
}

void Comm::abort() noexcept {
  closed_ = true;
  end(&Comm::abort_now);
}

bool Comm::destroy(milliseconds timeout) noexcept {
  closed_ = true;
  if (ours_) end(&Comm::destroy_now);
  return ended_ && is_gone_.wait_for(std::min(timeout, kPatience)) == std::future_status::ready;
}

void Comm::end(void (Comm::*act)() noexcept) noexcept {
  if (ended_.exchange(true)) return;
  const auto end_it = [self = shared_from_this(), act] {
    ((*self).*act)();
    self->gone_.set_value();
  };
  try {
    run_detached(end_it);
  } catch (...) {
    end_it();  // there is no thread for it
  }
}

/// In a group ncclCommAbort ends kernels, and calls that wait for them; the end of the group frees
/// the communicator. Between the two whoever was in it leaves. The first calls nothing of CUDA,
/// which may wait for such a kernel itself.
void Comm::abort_now() noexcept {
  try {
    nccl().ncclGroupStart();
    nccl().ncclCommAbort(comm_);
    { const std::lock_guard lock(mutex_); }
    const CurrentDevice current(device_);
    nccl().ncclGroupEnd();
  } catch (...) {
    // The device is gone, and the kernels with it.
  }
}

void Comm::destroy_now() noexcept {
  try {
    const CurrentDevice current(device_);
    nccl().ncclCommDestroy(comm_);
  } catch (...) {
    // The same.
  }
}

std::shared_ptr<Comm> connect_ranks(int rank, int size, Device device, const ncclUniqueId& id,
                                    Connecting& ranks) {
  // In a thread of its own: a rank that dies now would leave this one waiting for ever. What comes
  // too late is aborted there.
  auto task = std::make_shared<std::packaged_task<std::shared_ptr<Comm>()>>([=] {
    const CurrentDevice current(device);
    ncclComm_t raw = nullptr;
    FUSEDMOE_NCCL_CHECK(ncclCommInitRank, &raw, size, id, rank);
    auto comm = std::make_shared<Comm>(raw, true, device);
    connect(raw, size, device);
    return comm;
  });
  std::future<std::shared_ptr<Comm>> comm = task->get_future();
  run_detached([task = std::move(task)] { (*task)(); });
  while (comm.wait_for(milliseconds(20)) != std::future_status::ready) {
    ranks.check();
    if (ranks.is_late()) throw Error::communication("the ranks did not connect in time");
  }
  return comm.get();
}

#endif
}  // namespace fusedmoe::cuda
