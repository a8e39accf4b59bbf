// Streams whose work has ended before the memory that it uses goes.
#pragma once

#include "core/device_runtime.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::core {

/// Waits for the work of a stream. Afterwards the memory that it uses can be reused or freed.
/// Throws nothing: after a failure of the device no work runs any more.
inline void drain(Stream stream) noexcept {
  try {
    synchronize(stream);
  } catch (...) {
  }
}

/// A stream that is drained when it goes: declared behind the memory that its work uses. It has the
/// lowest priority, which is what a CUDA stream has unless it asks for another.
class WaitedStream {
 public:
  explicit WaitedStream(Device device) : stream_(device) {}
  ~WaitedStream() { drain(stream_); }
  WaitedStream(const WaitedStream&) = delete;
  WaitedStream& operator=(const WaitedStream&) = delete;
  operator Stream() const { return stream_; }  // NOLINT(google-explicit-*)

 private:
  const OwnedStream stream_;
};

}  // namespace fusedmoe::core
