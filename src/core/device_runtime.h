// What a device does besides computing, behind plain functions: memory, copies, streams, events,
// graphs. The public classes of runtime.h and Tensor are made of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::core {

/// Handles are owned by shared pointers and passed as what these point to.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  /// Throws an Error of kind out of memory. Not null, also for 0 bytes.
  virtual std::shared_ptr<void> allocate(std::size_t bytes, Device device) const = 0;
  /// The same for a block that is given back while the device has work: on CUDA neither call waits
  /// for that, as cudaFree does. Of whole pages.
  virtual std::shared_ptr<void> allocate_pages(std::size_t bytes, Device device) const {
    return allocate(bytes, device);
  }
  /// Host memory that the device reads and writes by itself: copies do not wait.
  virtual std::shared_ptr<void> allocate_pinned(std::size_t bytes, Device device) const = 0;
  virtual void copy(void* destination, const void* source, std::size_t bytes,
                    Stream stream) const = 0;
  virtual void fill(void* memory, std::uint8_t value, std::size_t bytes, Stream stream) const = 0;

  virtual std::shared_ptr<void> make_stream(Device device) const = 0;
  virtual void synchronize(Stream stream) const = 0;

  virtual std::shared_ptr<void> make_event(Device device) const = 0;
  virtual void record(void* event, Stream stream) const = 0;
  virtual void synchronize_event(void* event) const = 0;
  virtual void wait(void* event, Stream stream) const = 0;
  virtual double elapsed_ms(void* start, void* end) const = 0;

  virtual std::shared_ptr<void> capture(Stream stream, const std::function<void()>& work) const = 0;
  virtual void launch(void* graph, Stream stream) const = 0;
  /// Whether a graph records the stream, or a stream that the default one would wait for.
  virtual bool is_capturing(Stream stream) const = 0;

  /// Which device this is, in words that all processes of the host have for it, whatever number it
  /// has for each.
  virtual std::string physical_id(Device device) const = 0;
  /// Whether the device `from` can read the memory of the device `to`, physical ids of this host;
  /// false where this process does not see one of them.
  virtual bool can_access(const std::string& from, const std::string& to) const = 0;

  /// Makes the device the calling thread's current one and returns the index that was; -1 where
  /// there is nothing to restore.
  virtual int exchange_current(Device device) const = 0;
  virtual void restore_current(int index) const noexcept = 0;

  /// Waits for all work of this process on the device, whatever its streams.
  virtual void synchronize_device(Device device) const = 0;
};

const DeviceRuntime& cpu_runtime();
/// Throws Error in a build without CUDA.
const DeviceRuntime& cuda_runtime();
const DeviceRuntime& runtime_of(Device device);
/// Puts another one in the place of a kind's, for tests, which count calls or let one fail; null:
/// none. Returns what was put there before.
const DeviceRuntime* replace_runtime(DeviceKind kind, const DeviceRuntime* runtime);

using fusedmoe::CurrentDevice;

}  // namespace fusedmoe::core
