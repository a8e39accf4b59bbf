// A device runtime that tells what is asked of it, and refuses what a test wants refused.
#pragma once

#include <memory>
#include <string>

#include "core/device_runtime.h"
#include "fusedmoe/error.h"

namespace fusedmoe::testing {

/// Of one thread.
struct RuntimeCalls {
  int taken = 0, freed = 0;  ///< of as many bytes as count, pinned ones too
  int streams = 0, events = 0;
  int waits = 0;                ///< for streams and events
  int device_waits = 0;         ///< for a whole device
  int copies = 0;               ///< that did not throw
  int copies_until_error = -1;  ///< once it is 0 all copies throw
  bool is_full = false;         ///< nothing can be taken
};

/// In the place of that of a kind of devices while it lives.
class WatchedRuntime final : public core::DeviceRuntime {
 public:
  static inline thread_local RuntimeCalls calls;

  /// `fewest`: bytes of the blocks that count.
  explicit WatchedRuntime(DeviceKind kind, std::size_t fewest = 0)
      : WatchedRuntime(kind, core::runtime_of({kind, 0}), fewest) {}
  /// `real` does what is asked: that of CPUs where there is no such device.
  WatchedRuntime(DeviceKind kind, const core::DeviceRuntime& real, std::size_t fewest = 0)
      : kind_(kind), fewest_(fewest), real_(real) {
    core::replace_runtime(kind, this);
  }
  ~WatchedRuntime() override { core::replace_runtime(kind_, nullptr); }
  WatchedRuntime(const WatchedRuntime&) = delete;
  WatchedRuntime& operator=(const WatchedRuntime&) = delete;

  std::shared_ptr<void> allocate(std::size_t bytes, Device device) const override {
    if (calls.is_full) throw Error::out_of_memory(bytes, to_string(device));
    return counted(real_.allocate(bytes, device), bytes);
  }
  std::shared_ptr<void> allocate_pages(std::size_t bytes, Device device) const override {
    if (calls.is_full) throw Error::out_of_memory(bytes, to_string(device));
    return counted(real_.allocate_pages(bytes, device), bytes);
  }
  std::shared_ptr<void> allocate_pinned(std::size_t bytes, Device device) const override {
    return counted(real_.allocate_pinned(bytes, device), bytes);
  }
  void copy(void* destination, const void* source, std::size_t bytes,
            Stream stream) const override {
    if (calls.copies_until_error == 0) throw Error::device(1, "the device is broken");
    if (calls.copies_until_error > 0) --calls.copies_until_error;
    ++calls.copies;
    real_.copy(destination, source, bytes, stream);
  }
  void fill(void* memory, std::uint8_t value, std::size_t bytes, Stream stream) const override {
    real_.fill(memory, value, bytes, stream);
  }
  std::shared_ptr<void> make_stream(Device device) const override {
    ++calls.streams;
    return real_.make_stream(device);
  }
  void synchronize(Stream stream) const override {
    ++calls.waits;
    real_.synchronize(stream);
  }
  std::shared_ptr<void> make_event(Device device) const override {
    ++calls.events;
    return real_.make_event(device);
  }
  void record(void* event, Stream stream) const override { real_.record(event, stream); }
  void synchronize_event(void* event) const override {
    ++calls.waits;
    real_.synchronize_event(event);
  }
  void wait(void* event, Stream stream) const override { real_.wait(event, stream); }
  double elapsed_ms(void* start, void* end) const override { return real_.elapsed_ms(start, end); }
  std::shared_ptr<void> capture(Stream stream, const std::function<void()>& work) const override {
    return real_.capture(stream, work);
  }
  void launch(void* graph, Stream stream) const override { real_.launch(graph, stream); }
  bool is_capturing(Stream stream) const override { return real_.is_capturing(stream); }
  std::string physical_id(Device device) const override { return real_.physical_id(device); }
  bool can_access(const std::string& from, const std::string& to) const override {
    return real_.can_access(from, to);
  }
  int exchange_current(Device device) const override { return real_.exchange_current(device); }
  void restore_current(int index) const noexcept override { real_.restore_current(index); }
  void synchronize_device(Device device) const override {
    ++calls.device_waits;
    real_.synchronize_device(device);
  }

 private:
  std::shared_ptr<void> counted(std::shared_ptr<void> block, std::size_t bytes) const {
    if (bytes < fewest_) return block;
    ++calls.taken;
    void* const data = block.get();
    return {data, [block](void*) mutable {
              ++calls.freed;
              block.reset();
            }};
  }

  const DeviceKind kind_;
  const std::size_t fewest_;
  const core::DeviceRuntime& real_;
};

}  // namespace fusedmoe::testing
