#include "cuda/device/properties.h"

#include <vector>

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
  static const std::vector<DeviceProperties> all = [] {
    std::vector<DeviceProperties> list;
    const int count = cuda_device_count();
    for (int i = 0; i < count; ++i) list.push_back(query(i));
    return list;
  }();
  if (index < 0 || static_cast<std::size_t>(index) >= all.size()) return nullptr;
  return &all[static_cast<std::size_t>(index)];
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
