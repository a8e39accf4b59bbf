// What the code asks of CUDA devices, queried until it is known.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/device/limits.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

struct DeviceProperties {
  std::string name;
  std::string problem;       ///< why the device cannot be asked; else empty
  std::size_t bytes = 0;     ///< of memory
  int major = 0, minor = 0;  ///< compute capability
  DeviceLimits limits;
};

/// Null for a device that is not there. Stays as it is, but for one with a problem: that is another
/// at the thread's next call.
const DeviceProperties* device_properties(int index);

/// Of a usable device. Throw Error for another.
const DeviceLimits& limits_of(Device device);
int multiprocessor_count(Device device);

/// Where the calling thread's launches and allocations go. Throws Error where there is no device.
Device current_device();

}  // namespace fusedmoe::cuda
