#include "layer/backend.h"

#include "cpu/backend.h"
#include "cuda/backend.h"

namespace fusedmoe::layer {

const core::Backend& backend_of(Device device) {
  return device.is_cpu() ? cpu::backend() : cuda::backend();
}

}  // namespace fusedmoe::layer
