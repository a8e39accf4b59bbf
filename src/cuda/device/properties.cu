#include "cuda/device/properties.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <utility>

#include "cuda/device/capability.h"
#include "cuda/device/check.h"
#include "cuda/device/limits.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::cuda {
namespace {

/// For tests: limits of a GPU of another compute capability, "8.6", where they are lower. Only code
/// that this GPU could run must then be found: CUDA_FORCE_PTX_JIT=1.
void pretend(const char* capability, DeviceProperties& properties) {
  char* end = nullptr;
  properties.major = static_cast<int>(std::strtol(capability, &end, 10));
  properties.minor = *end == '.' ? static_cast<int>(std::strtol(end + 1, nullptr, 10)) : 0;
  const DeviceLimits named = limits_of_capability(10 * properties.major + properties.minor);
  DeviceLimits& limits = properties.limits;
  limits.block_shared_bytes = std::min(limits.block_shared_bytes, named.block_shared_bytes);
  limits.multiprocessor_shared_bytes =
      std::min(limits.multiprocessor_shared_bytes, named.multiprocessor_shared_bytes);
  limits.l2_bytes = std::min(limits.l2_bytes, named.l2_bytes);
}

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
  result.major = properties.major;
  result.minor = properties.minor;
  // H200 and H100 SXM have 132 multiprocessors, H100 PCIe 114, H20 78, fewer with MIG.
  result.limits = {
      properties.multiProcessorCount, static_cast<std::int64_t>(properties.sharedMemPerBlockOptin),
      static_cast<std::int64_t>(properties.sharedMemPerMultiprocessor), properties.l2CacheSize};
  if (const char* pretended = std::getenv("FUSEDMOE_PRETEND_CAPABILITY")) {
    pretend(pretended, result);
  }
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

const DeviceLimits& limits_of(Device device) {
  const DeviceProperties* properties = device_properties(device.index);
  if (!properties || !properties->problem.empty()) {
    throw Error::unsupported(Reason::kDevice, "device", device_problem(device));
  }
  return properties->limits;
}

int multiprocessor_count(Device device) {
  return limits_of(device).multiprocessors;
}

Device current_device() {
  int index = 0;
  FUSEDMOE_CUDA_CHECK(cudaGetDevice(&index));
  return {DeviceKind::kCuda, index};
}

}  // namespace fusedmoe::cuda
