// The CUDA runtime behind core::DeviceRuntime.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "core/device_runtime.h"
#include "cuda/device/check.h"
#include "cuda/device/mapped_memory.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::cuda {
namespace {

cudaStream_t handle_of(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

cudaEvent_t event_of(void* event) {
  return static_cast<cudaEvent_t>(event);
}

void check_usable(Device device) {
  const std::string problem = device_problem(device);
  if (problem.empty()) return;
  throw Error::unsupported(Reason::kDevice, "device",
                           "cannot use " + to_string(device) + ": " + problem);
}

/// Memory of cudaMalloc or cudaMallocHost, which the pointer gives back with `free`. What freeing
/// returns does not matter: at the end of the process the runtime may be gone already.
template <typename Allocate>
std::shared_ptr<void> allocate(std::size_t bytes, Device device, const Allocate& allocate,
                               cudaError_t (*free)(void*)) {
  check_usable(device);
  const core::CurrentDevice current(device);
  void* memory = nullptr;
  const cudaError_t error = allocate(&memory, std::max<std::size_t>(bytes, 1));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // clears the error, which later calls would report as theirs
    throw Error::out_of_memory(bytes, to_string(device));
  }
  FUSEDMOE_CUDA_CHECK(error);
  return {memory, [free](void* owned) { free(owned); }};
}

/// Ends the capture that a failure left open.
void abandon_capture(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream, &graph);
  if (graph) cudaGraphDestroy(graph);
  cudaGetLastError();
}

class CudaRuntime final : public core::DeviceRuntime {
 public:
  std::shared_ptr<void> allocate(std::size_t bytes, Device device) const override {
    return cuda::allocate(
        bytes, device, [](void** memory, std::size_t size) { return cudaMalloc(memory, size); },
        cudaFree);
  }

  std::shared_ptr<void> allocate_pages(std::size_t bytes, Device device) const override {
    check_usable(device);
    try {
      const auto memory = std::make_shared<MappedMemory>(std::max<std::size_t>(bytes, 1), device);
      return {memory, memory->data()};
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kOutOfMemory) throw;
      return allocate(bytes, device);  // some virtual GPUs have no memory of this kind
    }
  }

  std::shared_ptr<void> allocate_pinned(std::size_t bytes, Device device) const override {
    return cuda::allocate(
        bytes, device, [](void** memory, std::size_t size) { return cudaMallocHost(memory, size); },
        cudaFreeHost);
  }

  void copy(void* destination, const void* source, std::size_t bytes,
            Stream stream) const override {
    const core::CurrentDevice current(stream.device);
    FUSEDMOE_CUDA_CHECK(
        cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault, handle_of(stream)));
  }

  void fill(void* memory, std::uint8_t value, std::size_t bytes, Stream stream) const override {
    const core::CurrentDevice current(stream.device);
    FUSEDMOE_CUDA_CHECK(cudaMemsetAsync(memory, value, bytes, handle_of(stream)));
  }

  std::shared_ptr<void> make_stream(Device device) const override {
    check_usable(device);
    const core::CurrentDevice current(device);
    cudaStream_t stream = nullptr;
    FUSEDMOE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return {stream, [](void* owned) { cudaStreamDestroy(static_cast<cudaStream_t>(owned)); }};
  }

  void synchronize(Stream stream) const override {
    const core::CurrentDevice current(stream.device);
    FUSEDMOE_CUDA_CHECK(cudaStreamSynchronize(handle_of(stream)));
  }

  std::shared_ptr<void> make_event(Device device) const override {
    check_usable(device);
    const core::CurrentDevice current(device);
    cudaEvent_t event = nullptr;
    FUSEDMOE_CUDA_CHECK(cudaEventCreate(&event));
    return {event, [](void* owned) { cudaEventDestroy(event_of(owned)); }};
  }

  void record(void* event, Stream stream) const override {
    const core::CurrentDevice current(stream.device);
    FUSEDMOE_CUDA_CHECK(cudaEventRecord(event_of(event), handle_of(stream)));
  }

  void synchronize_event(void* event) const override {
    FUSEDMOE_CUDA_CHECK(cudaEventSynchronize(event_of(event)));
  }

  void wait(void* event, Stream stream) const override {
    const core::CurrentDevice current(stream.device);
    FUSEDMOE_CUDA_CHECK(cudaStreamWaitEvent(handle_of(stream), event_of(event), 0));
  }

  double elapsed_ms(void* start, void* end) const override {
    float elapsed = 0;
    FUSEDMOE_CUDA_CHECK(cudaEventElapsedTime(&elapsed, event_of(start), event_of(end)));
    return elapsed;
  }

  std::shared_ptr<void> capture(Stream stream, const std::function<void()>& work) const override {
    const core::CurrentDevice current(stream.device);
    const cudaStream_t handle = handle_of(stream);
    FUSEDMOE_CUDA_CHECK(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal));
    try {
      work();
    } catch (...) {
      abandon_capture(handle);
      throw;
    }
    cudaGraph_t graph = nullptr;
    FUSEDMOE_CUDA_CHECK(cudaStreamEndCapture(handle, &graph));
    cudaGraphExec_t executable = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    FUSEDMOE_CUDA_CHECK(error);
    return {executable,
            [](void* owned) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(owned)); }};
  }

  void launch(void* graph, Stream stream) const override {
    const core::CurrentDevice current(stream.device);
    FUSEDMOE_CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), handle_of(stream)));
  }

  bool is_capturing(Stream stream) const override {
    const core::CurrentDevice current(stream.device);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(handle_of(stream), &status);
    if (error == cudaErrorStreamCaptureImplicit) {
      cudaGetLastError();  // clears the error, which later calls would report as theirs
      return true;
    }
    FUSEDMOE_CUDA_CHECK(error);
    return status != cudaStreamCaptureStatusNone;
  }

  std::string physical_id(Device device) const override {
    char id[32] = {};
    FUSEDMOE_CUDA_CHECK(cudaDeviceGetPCIBusId(id, sizeof id, device.index));
    return id;
  }
  bool can_access(const std::string& from, const std::string& to) const override {
    if (from == to) return true;
    int reader = 0, owner = 0, yes = 0;
    if (cudaDeviceGetByPCIBusId(&reader, from.c_str()) != cudaSuccess ||
        cudaDeviceGetByPCIBusId(&owner, to.c_str()) != cudaSuccess) {
      cudaGetLastError();  // clears the error, which later calls would report as theirs
      return false;
    }
    FUSEDMOE_CUDA_CHECK(cudaDeviceCanAccessPeer(&yes, reader, owner));
    return yes != 0;
  }

  int exchange_current(Device device) const override {
    check_earlier_kernels();
    int previous = 0;
    FUSEDMOE_CUDA_CHECK(cudaGetDevice(&previous));
    if (previous == device.index) return -1;
    FUSEDMOE_CUDA_CHECK(cudaSetDevice(device.index));
    return previous;
  }
  void restore_current(int index) const noexcept override { cudaSetDevice(index); }

  void synchronize_device(Device device) const override {
    const core::CurrentDevice current(device);
    FUSEDMOE_CUDA_CHECK(cudaDeviceSynchronize());
  }
};

}  // namespace
}  // namespace fusedmoe::cuda

namespace fusedmoe::core {

const DeviceRuntime& cuda_runtime() {
  static const cuda::CudaRuntime runtime;
  return runtime;
}

}  // namespace fusedmoe::core
