#include "cuda/nccl/watch.h"

#include <algorithm>
#include <utility>

#include "core/format.h"
#include "cuda/device/check.h"

namespace fusedmoe::cuda {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPollInterval{10};
/// What the watching threads of the others get to answer.
constexpr milliseconds kAnswer{500};

}  // namespace

Watch::Watch(int rank, int size, Device device, std::shared_ptr<ControlPlane> control,
             std::shared_ptr<Labels> labels, milliseconds timeout, std::function<void()> abort)
    : rank_(rank),
      size_(size),
      device_(device),
      control_(std::move(control)),
      labels_(std::move(labels)),
      timeout_(timeout),
      abort_(std::move(abort)) {
  try {
    thread_ = std::thread([this] { run(); });
    asking_ = std::thread([this] { ask_device(); });
  } catch (...) {
    stop();
    throw;
  }
}

Watch::~Watch() {
  stop();
  for (const Work& work : work_) cudaEventDestroy(work.event);
  for (const cudaEvent_t event : free_) cudaEventDestroy(event);
}

void Watch::stop() {
  for (const auto& [thread, flag] : {std::pair(&thread_, &ending_), std::pair(&asking_, &over_)}) {
    {
      const std::lock_guard lock(mutex_);
      *flag = true;
    }
    changed_.notify_all();
    if (thread->joinable()) thread->join();
  }
}

void Watch::enqueued(cudaStream_t stream, std::string_view what, Labels::Slot* labels) {
  cudaEvent_t event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  // Without the lock: CUDA may wait until the device has room for more.
  if (!event) FUSEDMOE_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  FUSEDMOE_CUDA_CHECK(cudaEventRecord(event, stream));
  const std::lock_guard lock(mutex_);
  work_.push_back({event, ++number_, Clock::now() + timeout_, std::string(what), labels});
}

void Watch::run() {
  std::unique_lock lock(mutex_);
  for (int looks = 1;; ++looks) {
    const bool last =
        changed_.wait_for(lock, kPollInterval, [&] { return ending_ && work_.empty(); });
    lock.unlock();
    if (last && (differs(labels_->difference_of_recorded()) || has_failed())) abort_();
    if (last) return;
    // The control plane is asked less often than the device.
    if (expired() || (looks % 10 == 0 && look())) return;
    lock.lock();
  }
}

/// Forgets work that has ended, unless its labels differ: the other thread says so.
void Watch::ask_device() {
  cudaSetDevice(device_.index);
  // Its questions about events must not end a capture that another thread has begun.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kPollInterval, [&] { return over_; })) {
    while (!work_.empty()) {
      const Work& work = work_.front();  // stays: nobody else removes work
      lock.unlock();
      const Clock::time_point asked = Clock::now();
      const bool ended = cudaEventQuery(work.event) != cudaErrorNotReady;
      const bool differs = work.labels && !labels_->difference(*work.labels).empty();
      lock.lock();
      if (!ended) not_ended_ = asked;
      if (!ended || differs) break;
      if (work.labels) labels_->give_back(*work.labels);
      free_.push_back(work.event);
      work_.pop_front();
    }
    if (ending_ && work_.empty()) changed_.notify_all();
  }
}

/// Whether a rank has said so. Where the control plane is gone, the others may just be done.
bool Watch::has_failed() noexcept {
  try {
    return control_->read("failure", milliseconds(0)).has_value();
  } catch (...) {
    return false;
  }
}

/// Tells all ranks how their labels differ, if they do.
bool Watch::differs(const std::string& difference) {
  if (difference.empty()) return false;
  try {
    control_->post("failure", difference);
  } catch (...) {
    // The others see it by themselves.
  }
  return true;
}

/// Gives up on work that is past its deadline, and on work whose labels differ between ranks. The
/// latter may never end, as one rank waits for more bytes than the other sends; but its labels are
/// short and have arrived.
bool Watch::expired() {
  std::uint64_t late = 0;
  std::string what, difference;
  {
    const std::lock_guard lock(mutex_);
    if (work_.empty()) return false;
    const Work& work = work_.front();
    if (work.labels) difference = labels_->difference(*work.labels);
    // The device may not answer: then nobody knows whether the work has ended.
    const bool no_answer = Clock::now() > work.deadline + timeout_;
    if (not_ended_ > work.deadline || no_answer) {
      late = work.number;
      what = work.what;
    }
  }
  if (!differs(difference)) {
    if (late == 0) return false;
    try {
      give_up(late, what);
    } catch (...) {
      // Without a control plane nobody can be told; the kernels end all the same.
    }
  }
  abort_();
  return true;
}

/// Tells all ranks how far the host has come. Without the lock: this may wait for the network.
void Watch::post_number() {
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = number_;
  }
  control_->post(core::format("nccl/at/{}", rank_), std::to_string(number));
}

bool Watch::look() {
  try {
    if (!answered_ && control_->read("nccl/expired", milliseconds(0))) {
      post_number();
      answered_ = true;
    }
    const bool failed = differs(labels_->difference_of_recorded()) ||
                        control_->read("failure", milliseconds(0)).has_value();
    if (!failed) return false;
  } catch (...) {
    // The control plane is gone, and with it rank 0.
  }
  abort_();
  return true;
}

void Watch::give_up(std::uint64_t number, const std::string& what) {
  post_number();
  control_->post("nccl/expired", std::to_string(number));
  const Clock::time_point deadline = Clock::now() + kAnswer;
  std::vector<int> late;
  for (int r = 0; r < size_; ++r) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    const auto at = control_->read(core::format("nccl/at/{}", r), std::max(left, milliseconds(0)));
    if (!at || std::stoull(*at) < number) late.push_back(r);
  }
  const double seconds = static_cast<double>(timeout_.count()) / 1000;
  control_->post("failure", late.empty()
                                ? core::format("{}: NCCL did not end within {} s", what, seconds)
                                : core::format("{}: {} {} did not arrive within {} s", what,
                                               late.size() == 1 ? "rank" : "ranks",
                                               core::join(late, ", "), seconds));
}

}  // namespace fusedmoe::cuda
