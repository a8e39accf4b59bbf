#include "cuda/device/launch.h"

#include <map>
#include <mutex>
#include <utility>

#include "cuda/device/context.h"

namespace fusedmoe::cuda {

void allow_shared_bytes(const void* kernel, std::size_t bytes, Device device) {
  struct Allowed {
    std::uint64_t context = 0;  // whose kernel it is: another one allows nothing yet
    std::size_t bytes = 0;
  };
  // Never destroyed: threads may outlive static objects.
  static auto& mutex = *new std::mutex;
  static auto& allowed = *new std::map<std::pair<const void*, int>, Allowed>;
  const std::uint64_t context = current_context_id();
  const std::lock_guard lock(mutex);
  Allowed& known = allowed[{kernel, device.index}];
  if (context != 0 && context == known.context && bytes <= known.bytes) return;
  FUSEDMOE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(bytes)));
  known = {context, bytes};
}

}  // namespace fusedmoe::cuda
