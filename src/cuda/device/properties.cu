#include "cuda/device/properties.h"

#include <vector>

#include "cuda/device/check.h"
#include "cuda/device/current_device.h"
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

const DeviceProperties& current_properties() {
  const Device device = current_device();
  const DeviceProperties* found = device_properties(device.index);
  if (!found || !found->problem.empty()) {
    throw Error("device", to_string(device), "a CUDA device that answers");
  }
  return *found;
}

}  // namespace fusedmoe::cuda
