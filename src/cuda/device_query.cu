// The CUDA queries of a build with CUDA. The runtime is linked statically and loads the driver by
// itself, so a machine without a driver or a GPU gives 0 devices and not a failure to start.
#include <cuda_runtime.h>

#include <string>
#include <vector>

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

/// What device_problem() answers for each device, and for those that there are not.
struct Problems {
  std::vector<std::string> of_device;
  std::string otherwise;

  Problems() {
    int count = 0;
    const cudaError_t error = count_devices(count);
    for (int index = 0; index < count; ++index) of_device.push_back(query(index));
    if (count == 0) {
      otherwise = reason_for_none(error);
    } else {
      otherwise = "there are " + std::to_string(count) + " CUDA devices, counted from 0";
    }
  }

  // The kernels are machine code for compute capability 9.0 alone.
  static std::string query(int index) {
    int major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    }
    if (error != cudaSuccess) {
      cudaGetLastError();
      return cudaGetErrorString(error);
    }
    if (major == 9 && minor == 0) return {};
    return "compute capability " + std::to_string(major) + '.' + std::to_string(minor) +
           ", the kernels need 9.0";
  }
};

}  // namespace

std::string device_problem(Device device) {
  if (device.is_cpu()) return {};
  static const Problems problems;
  const auto index = static_cast<std::size_t>(device.index);
  if (device.index < 0 || index >= problems.of_device.size()) return problems.otherwise;
  return problems.of_device[index];
}

std::string_view device_name(Device device) {
  if (device.is_cpu()) return "cpu";
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list(static_cast<std::size_t>(cuda_device_count()));
    for (std::size_t index = 0; index < list.size(); ++index) {
      cudaDeviceProp properties{};
      const Device device{DeviceKind::kCuda, static_cast<int>(index)};
      if (device_problem(device).empty() &&
          cudaGetDeviceProperties(&properties, device.index) == cudaSuccess) {
        list[index] = properties.name;
      }
    }
    return list;
  }();
  const auto index = static_cast<std::size_t>(device.index);
  if (device.index < 0 || index >= names.size()) return {};
  return names[index];
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
