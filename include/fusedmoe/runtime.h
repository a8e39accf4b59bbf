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
#include <vector>

#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// CUDA devices this build can see; 0 without CUDA, without a driver, or without a GPU.
FUSEDMOE_API int cuda_device_count();

/// Why the device cannot be used: "built without CUDA", "no CUDA driver", what the driver says, ...
/// Empty if it can; always so for the CPU. Which experts run on a device says explain(). Never
/// throws.
FUSEDMOE_API std::string device_problem(Device device);

/// The device's own name: "NVIDIA H200"; "cpu". Empty where device_problem() has an answer. Lives
/// as long as the program. Never throws.
FUSEDMOE_API std::string_view device_name(Device device);

/// One line per device: name, compute capability, memory; or one line "none: <why>".
FUSEDMOE_API std::string cuda_device_summary();

/// Threads that run the parallel steps of CPU work. An engine hands in its own to keep the work on
/// its threads.
class FUSEDMOE_API Executor {
 public:
  /// Refers to the function that runs a task, while run() has not returned. Does not throw.
  class Task {
   public:
    template <typename Function>
    explicit Task(const Function& function)
        : function_(&function), call_([](const void* object, int index) {
            (*static_cast<const Function*>(object))(index);
          }) {}
    void operator()(int index) const { call_(function_, index); }

   private:
    const void* function_;
    void (*call_)(const void*, int);
  };

  virtual ~Executor() = default;
  /// How many tasks can run at the same time; at least 1.
  virtual int concurrency() const = 0;
  /// Calls task(0), ..., task(num_tasks - 1) and returns when all have returned. No task waits for
  /// another, so they may run in any order, on any threads, or one after the other on the caller's.
  /// The library's tasks do not throw. Several threads may call run() at once.
  ///
  /// May throw, when none of its tasks runs any more: to give a forward up. That leaves the
  /// forward, with its output untouched (of a forward in chunks of tokens: that of the chunk). A
  /// forward that has begun to write its output ends as usual: its thread does what run() did not.
  /// One thread's work does not ask the executor, so a small forward may not notice.
  virtual void run(int num_tasks, Task task) = 0;
};

/// Threads of the library's own, `num_threads` of them with the calling one; 0: as many as
/// num_threads() says at each step. Each thread that calls run() has its helpers for itself: they
/// start when it first needs them, on the cores that it may use then, and end with it. They wait
/// awake for two milliseconds, then they sleep. A task that calls run() gets no further threads.
FUSEDMOE_API std::shared_ptr<Executor> make_executor(int num_threads = 0);
/// make_executor(0), for work that is given no executor.
FUSEDMOE_API Executor& default_executor();
/// A stream of the CPU whose work runs on `executor`, which must outlive it.
FUSEDMOE_API Stream cpu_stream(Executor& executor);

/// Threads of the default executor; 0 restores the default: OMP_NUM_THREADS, else the cores that
/// the calling thread may run on (its affinity mask).
FUSEDMOE_API void set_num_threads(int num_threads);
FUSEDMOE_API int num_threads();

/// Name of the level of instructions that the CPU kernels run with: on x86-64 "generic", "avx2",
/// "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16" or "amx", on 64-bit ARM "neon",
/// "neon_dotprod", "neon_i8mm" or "neon_bf16". Chosen once from the processor;
/// the environment variable FUSEDMOE_CPU_ISA may name another.
FUSEDMOE_API std::string_view cpu_isa();
/// All levels that this machine has, the best first.
FUSEDMOE_API std::vector<std::string_view> cpu_isas();

/// destination = source, asynchronous on `stream`; both contiguous, of one dtype and shape, apart
/// from each other, on any devices. Where one is on CUDA so is the stream. A copy to or from host
/// memory that is not pinned may wait for the stream.
FUSEDMOE_API void copy(const TensorView& source, const TensorView& destination, Stream stream);

/// Every byte of a contiguous view = value, asynchronous on the stream of its device.
FUSEDMOE_API void fill_bytes(const TensorView& view, std::uint8_t value, Stream stream);

/// The tensor itself if it lies on `device`, else a contiguous copy there. Contiguous; waits.
FUSEDMOE_API Tensor to_device(const Tensor& tensor, Device device);

/// Waits for all work of the stream.
FUSEDMOE_API void synchronize(Stream stream);

/// While it lives, `device` is the calling thread's current one. Nothing for the CPU.
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

/// True while a CUDA graph records what is enqueued on the stream: until it ends nothing may
/// allocate device memory or wait. False on the CPU.
FUSEDMOE_API bool is_capturing(Stream stream);

}  // namespace fusedmoe
