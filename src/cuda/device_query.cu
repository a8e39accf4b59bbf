// The CUDA queries of a build with CUDA. The runtime is linked statically and loads the driver by
// itself, so a machine without a driver or a GPU gives 0 devices and not a failure to start.
#include <cuda_runtime.h>

#include <string>

#include "fusedmoe/device.h"

namespace fusedmoe {
namespace {

cudaError_t count_devices(int& count) {
  count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    count = 0;
    cudaGetLastError();  // clears the error, which later calls would report as theirs
  }
  return error;
}

}  // namespace

int cuda_device_count() {
  int count = 0;
  count_devices(count);
  return count;
}

std::string cuda_device_summary() {
  int count = 0;
  const cudaError_t error = count_devices(count);
  if (count == 0) {
    return std::string("none: ") +
           (error == cudaSuccess ? "no CUDA device" : cudaGetErrorString(error));
  }
  std::string summary;
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    if (!summary.empty()) summary += '\n';
    summary += "cuda:" + std::to_string(index) + ' ';
    const cudaError_t query = cudaGetDeviceProperties(&properties, index);
    if (query != cudaSuccess) {
      summary += cudaGetErrorString(query);
      continue;
    }
    summary += std::string(properties.name) + ", compute capability " +
               std::to_string(properties.major) + '.' + std::to_string(properties.minor) + ", " +
               std::to_string(properties.totalGlobalMem >> 20) + " MiB, " +
               std::to_string(properties.multiProcessorCount) + " multiprocessors";
  }
  return summary;
}

}  // namespace fusedmoe
