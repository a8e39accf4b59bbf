#include "cuda/nccl/labels.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "core/device_runtime.h"
#include "core/format.h"
#include "cuda/device/check.h"

namespace fusedmoe::cuda {
namespace {

/// Slots that are made at a time: more exchanges are seldom in flight.
constexpr std::size_t kSlots = 64;

/// While it lives, the thread may allocate although it captures.
class RelaxedCapture {
 public:
  RelaxedCapture() { FUSEDMOE_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// The device may write it now.
Label read(const Label& label) {
  Label copy;
  const auto* from = reinterpret_cast<const volatile char*>(&label);
  std::copy_n(from, sizeof copy, reinterpret_cast<char*>(&copy));
  return copy;
}

std::string describe(int rank, const Label& label) {
  const std::string_view what(label.what.data(), strnlen(label.what.data(), label.what.size()));
  const bool is_text = std::ranges::all_of(what, [](char c) { return c >= ' ' && c <= '~'; });
  return core::format("rank {} is at {}{}", rank, is_text ? "the " : "something else",
                      is_text ? what : std::string_view());
}

}  // namespace

Labels::Labels(int rank, int size, Device device) : rank_(rank), size_(size), device_(device) {
  add_slots();
}

void Labels::add_slots() {
  const RelaxedCapture relaxed;
  const std::size_t size = static_cast<std::size_t>(size_), count = kSlots * 2 * size;
  memory_.push_back(core::runtime_of(device_).allocate_pinned(count * sizeof(Label), device_));
  auto* next = static_cast<Label*>(memory_.back().get());
  std::uninitialized_default_construct_n(next, count);
  for (std::size_t i = 0; i < kSlots; ++i, next += 2 * size) {
    slots_.push_back({{next, size}, {next + size, size}, {}});
    free_.push_back(&slots_.back());
  }
}

Labels::Slot& Labels::take(const Pairs& pairs, bool recorded) {
  const std::lock_guard lock(mutex_);
  for (Slot* slot : recorded_) {
    if (!recorded) break;
    if (slot->expected == pairs.expected && std::ranges::equal(slot->sent, pairs.sent)) {
      return *slot;
    }
  }
  if (free_.empty()) add_slots();
  Slot& slot = *free_.back();
  free_.pop_back();
  std::ranges::copy(pairs.sent, slot.sent.begin());
  std::ranges::copy(pairs.expected, slot.received.begin());
  slot.expected = pairs.expected;
  if (recorded) recorded_.push_back(&slot);
  return slot;
}

void Labels::give_back(Slot& slot) {
  const std::lock_guard lock(mutex_);
  free_.push_back(&slot);
}

std::string Labels::difference(const Slot& slot) const {
  for (int r = 0; r < size_; ++r) {
    const Label& expected = slot.expected[r];
    if (read(slot.received[r]) == expected) continue;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // half of it may be there
    const Label label = read(slot.received[r]);
    return core::format("{} and expects {} bytes from rank {}, but {} and sends {}",
                        describe(rank_, expected), expected.bytes, r, describe(r, label),
                        label.bytes);
  }
  return {};
}

std::string Labels::difference_of_recorded() const {
  const std::lock_guard lock(mutex_);
  for (const Slot* slot : recorded_) {
    if (std::string text = difference(*slot); !text.empty()) return text;
  }
  return {};
}

}  // namespace fusedmoe::cuda
