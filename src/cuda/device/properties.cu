#include "cuda/device/properties.h"

#include <array>
#include <atomic>
#include <memory>
#include <utility>

#include "cuda/device/capability.h"
#include "cuda/device/check.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::cuda {
namespace {

DeviceProperties query(int index) {
  DeviceProperties result;
  cudaDeviceProp properties{};
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, index); error != cudaSuccess) {
    cudaGetLastError();  // clears the error, which later calls would report as theirs
    result.problem = cudaGetErrorString(error);
    return result;
  }
  result.name = properties.name;
  result.bytes = properties.totalGlobalMem;
  result.multiprocessors = properties.multiProcessorCount;
  result.major = properties.major;
  result.minor = properties.minor;
  return result;
}

}  // namespace

const DeviceProperties* device_properties(int index) {
  constexpr int kMostDevices = 64;
  static std::array<std::atomic<const DeviceProperties*>, kMostDevices> known{};
  thread_local DeviceProperties failed;  // asked again the next time
  if (index < 0 || index >= kMostDevices) return nullptr;
  std::atomic<const DeviceProperties*>& place = known[static_cast<std::size_t>(index)];
  if (const DeviceProperties* found = place.load(std::memory_order_acquire)) return found;
  if (index >= cuda_device_count()) return nullptr;
  DeviceProperties asked = query(index);
  if (!asked.problem.empty()) {
    failed = std::move(asked);
    return &failed;
  }
  auto mine = std::make_unique<const DeviceProperties>(std::move(asked));
  const DeviceProperties* first = nullptr;  // another thread's
  if (!place.compare_exchange_strong(first, mine.get())) return first;
  return mine.release();  // kept until the process ends
}

int compute_capability(Device device) {
  const DeviceProperties* properties = device_properties(device.index);
  return properties ? 10 * properties->major + properties->minor : 0;
}

int multiprocessor_count(Device device) {
  const DeviceProperties* properties = device_properties(device.index);
  if (!properties || !properties->problem.empty()) {
    throw Error::unsupported(Reason::kDevice, "device", device_problem(device));
  }
  return properties->multiprocessors;
}

Device current_device() {
  int index = 0;
  FUSEDMOE_CUDA_CHECK(cudaGetDevice(&index));
  return {DeviceKind::kCuda, index};
}

}  // namespace fusedmoe::cuda
