#include "layer/backend.h"

#include "cpu/backend.h"
#include "cuda/backend.h"
#include "reference/backend.h"
#include "reference/experts.h"

namespace fusedmoe::layer {

const core::Backend& backend_of(const ExpertsDescriptor& experts, Device device) {
  return &experts == &reference::descriptor() ? reference::backend() : backend_of(device);
}

const core::Backend& backend_of(Device device) {
  return device.is_cpu() ? cpu::backend() : cuda::backend();
}

}  // namespace fusedmoe::layer
