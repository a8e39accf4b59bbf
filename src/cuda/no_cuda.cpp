// The CUDA queries of a build without CUDA.
#include "fusedmoe/device.h"

namespace fusedmoe {

int cuda_device_count() {
  return 0;
}

std::string cuda_device_summary() {
  return "none: built without CUDA";
}

}  // namespace fusedmoe
