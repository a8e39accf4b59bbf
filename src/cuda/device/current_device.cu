#include "cuda/device/current_device.h"

#include <array>
#include <atomic>
#include <cstddef>

#include "cuda/device/check.h"

namespace fusedmoe::cuda {

Device current_device() {
  int index = 0;
  FUSEDMOE_CUDA_CHECK(cudaGetDevice(&index));
  return {DeviceKind::kCuda, index};
}

int multiprocessor_count(Device device) {
  static std::array<std::atomic<int>, 64> known{};
  const auto index = static_cast<std::size_t>(device.index);
  const bool is_kept = index < known.size();
  if (is_kept && known[index] > 0) return known[index];
  int count = 0;
  FUSEDMOE_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.index));
  if (is_kept) known[index] = count;
  return count;
}

}  // namespace fusedmoe::cuda
