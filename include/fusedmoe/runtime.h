// Work on a device, for programs that include nothing of CUDA: copies, streams, events, graphs.
//
// On the CPU everything is done when the call returns. On CUDA, work is enqueued on a stream and
// the calls return at once, unless they say that they wait. All throw Error for a device that
// cannot be used, with the text of device_problem().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// CUDA devices this build can see; 0 without CUDA, without a driver, or without a GPU.
FUSEDMOE_API int cuda_device_count();

/// Why the kernels of this build cannot run on the device: "built without CUDA", what the driver
/// says, "compute capability 8.0, needs 9.0", ... Empty if they can; always so for the CPU. Never
/// throws.
FUSEDMOE_API std::string device_problem(Device device);

/// The device's own name: "NVIDIA H200"; "cpu". Empty where device_problem() has an answer. Lives
/// as long as the program. Never throws.
FUSEDMOE_API std::string_view device_name(Device device);

/// One line per device: name, compute capability, memory; or one line "none: <why>".
FUSEDMOE_API std::string cuda_device_summary();

/// Threads used by CPU work of this process; 0 restores the default (OMP_NUM_THREADS, else all
/// cores given to it). Parallel regions take the number from num_threads(), whichever thread of
/// the caller they start on.
FUSEDMOE_API void set_num_threads(int num_threads);
FUSEDMOE_API int num_threads();

/// Name of the instruction set the CPU kernels run with: "generic", "avx2", "avx512",
/// "avx512_bf16" or "amx". Chosen once from the processor; the environment variable
/// FUSEDMOE_CPU_ISA may name a lower one.
FUSEDMOE_API std::string_view cpu_isa();

/// destination = source, asynchronous on `stream`; both contiguous, of one dtype and shape, apart
/// from each other, on any devices. Where one is on CUDA so is the stream. A copy to or from host
/// memory that is not pinned may wait for the stream.
FUSEDMOE_API void copy(const TensorView& source, const TensorView& destination, Stream stream);

/// Every byte of a contiguous view = value, asynchronous on the stream of its device.
FUSEDMOE_API void fill_bytes(const TensorView& view, std::uint8_t value, Stream stream);

/// The tensor itself if it lies on `device`, else a contiguous copy there. Contiguous; waits.
FUSEDMOE_API Tensor to_device(const Tensor& tensor, Device device);

/// Uninitialised host memory that `device` copies from and to without staging; for the CPU the same
/// as Tensor::empty.
FUSEDMOE_API Tensor empty_pinned(Shape shape, DType dtype, Device device);

/// Waits for all work of the stream.
FUSEDMOE_API void synchronize(Stream stream);

/// While it lives, `device` is the calling thread's current one, where Experts::pack puts weights.
/// Nothing for the CPU.
class FUSEDMOE_API CurrentDevice {
 public:
  explicit CurrentDevice(Device device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_;  // index of the device before; -1: nothing to restore
};

/// A stream of its own, independent of the default stream and of all others. Copies share it; the
/// last one destroys it, which does not wait for its work.
class FUSEDMOE_API OwnedStream {
 public:
  explicit OwnedStream(Device device);
  operator Stream() const { return {device_, handle_.get()}; }  // NOLINT(google-explicit-*)

 private:
  Device device_;
  std::shared_ptr<void> handle_;
};

/// A point in the work of a stream, with its time.
class FUSEDMOE_API Event {
 public:
  explicit Event(Device device);
  /// The event is what `stream` has to do at this moment.
  void record(Stream stream);
  /// Waits until it is done; at once if it was never recorded.
  void synchronize() const;
  /// Work enqueued on `stream` from now on starts after it.
  void wait(Stream stream) const;

 private:
  friend FUSEDMOE_API double elapsed_ms(const Event& start, const Event& end);
  Device device_;
  std::shared_ptr<void> handle_;
};

/// Milliseconds between two recorded events of one device; waits for both.
FUSEDMOE_API double elapsed_ms(const Event& start, const Event& end);

/// What a function enqueues, recorded once and replayed at the cost of one launch. On the CPU it is
/// the function itself.
class FUSEDMOE_API Graph {
 public:
  /// Calls `work`, which enqueues on `stream` and neither allocates device memory nor waits;
  /// nothing of it runs yet. The default stream of a CUDA device cannot be captured: see
  /// OwnedStream.
  Graph(Stream stream, const std::function<void()>& work);
  /// Runs the recorded work on the memory it was recorded with; not twice at the same time.
  void launch(Stream stream) const;

 private:
  Device device_;
  std::shared_ptr<void> handle_;
};

}  // namespace fusedmoe
