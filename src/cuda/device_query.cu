// The CUDA queries of a build with CUDA. The runtime is linked statically and loads the driver by
// itself, so a machine without a driver or a GPU gives 0 devices and not a failure to start.
#include <cuda_runtime.h>

#include <string>

#include "cuda/device/properties.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"

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

/// Why there are 0 devices. Without a driver the runtime's own text speaks of an old one.
std::string reason_for_none(cudaError_t error) {
  int driver_version = 0;
  if (cudaDriverGetVersion(&driver_version) == cudaSuccess && driver_version == 0) {
    return "no CUDA driver";
  }
  return error == cudaSuccess ? "no CUDA device" : cudaGetErrorString(error);
}

}  // namespace

std::string device_problem(Device device) {
  if (device.is_cpu()) return {};
  if (const cuda::DeviceProperties* found = cuda::device_properties(device.index)) {
    return found->problem;
  }
  int count = 0;
  const cudaError_t error = count_devices(count);
  if (count == 0) return reason_for_none(error);
  return "there are " + std::to_string(count) + " CUDA devices, counted from 0";
}

std::string_view device_name(Device device) {
  if (device.is_cpu()) return "cpu";
  const cuda::DeviceProperties* found = cuda::device_properties(device.index);
  return found && device_problem(device).empty() ? std::string_view(found->name)
                                                 : std::string_view();
}

int cuda_device_count() {
  int count = 0;
  count_devices(count);
  return count;
}

std::string cuda_device_summary() {
  int count = 0;
  const cudaError_t error = count_devices(count);
  if (count == 0) return "none: " + reason_for_none(error);
  std::string summary;
  for (int index = 0; index < count; ++index) {
    const cuda::DeviceProperties* found = cuda::device_properties(index);
    if (!found) continue;
    const cuda::DeviceProperties& device = *found;
    if (!summary.empty()) summary += '\n';
    summary += "cuda:" + std::to_string(index) + ' ';
    if (!device.problem.empty()) {
      summary += device.problem;
      continue;
    }
    summary += device.name + ", compute capability " + std::to_string(device.major) + '.' +
               std::to_string(device.minor) + ", " + std::to_string(device.bytes >> 20) + " MiB, " +
               std::to_string(device.limits.multiprocessors) + " multiprocessors";
  }
  return summary;
}

}  // namespace fusedmoe
