#include "cuda/device/current_device.h"

#include "cuda/device/check.h"

namespace fusedmoe::cuda {

Device current_device() {
  int index = 0;
  FUSEDMOE_CUDA_CHECK(cudaGetDevice(&index));
  return {DeviceKind::kCuda, index};
}

}  // namespace fusedmoe::cuda
