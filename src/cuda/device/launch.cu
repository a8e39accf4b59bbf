#include "cuda/device/launch.h"

#include <map>
#include <mutex>
#include <utility>

namespace fusedmoe::cuda {

void allow_shared_bytes(const void* kernel, std::size_t bytes, Device device) {
  // Never destroyed: threads may outlive static objects.
  static auto& mutex = *new std::mutex;
  static auto& allowed = *new std::map<std::pair<const void*, int>, std::size_t>;
  const std::lock_guard lock(mutex);
  std::size_t& most = allowed[{kernel, device.index}];
  if (bytes <= most) return;
  FUSEDMOE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(bytes)));
  most = bytes;
}

}  // namespace fusedmoe::cuda
