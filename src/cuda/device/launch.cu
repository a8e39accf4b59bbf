#include "cuda/device/launch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "cuda/device/context.h"

namespace fusedmoe::cuda {

void allow_shared_bytes(const void* kernel, std::size_t bytes, Device device) {
  // The limit of a kernel belongs to a context. It is never lowered, as another thread may be about
  // to launch with what was allowed. Without a context's number (0) we cannot know whether it was
  // told before, so we tell it at each call.
  // Never destroyed: threads may outlive static objects.
  using Key = std::tuple<const void*, int, std::uint64_t>;  // kernel, device, context
  static auto& mutex = *new std::mutex;
  static auto& allowed = *new std::map<Key, std::size_t>;
  const std::uint64_t context = current_context_id();
  const std::lock_guard lock(mutex);
  std::size_t& known = allowed[{kernel, device.index, context}];
  if (context != 0 && bytes <= known) return;
  const std::size_t most = std::max(bytes, known);
  FUSEDMOE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(most)));
  known = most;
}

}  // namespace fusedmoe::cuda
