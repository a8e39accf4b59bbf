// The launch of the kernel of one token: what each generated file defines for its policy.
#pragma once

#include "cuda/device/launch.h"
#include "cuda/one_token/one_token_kernel.cuh"

namespace fusedmoe::cuda {

template <typename Operands>
void launch_one_token(const OneTokenParams& params, const OneTokenMemory& memory,
                      const Stream& stream) {
  const DeviceProperties& device = *device_properties(current_device().index);
  launch_together(one_token_kernel<Operands>, dim3(static_cast<unsigned>(device.multiprocessors)),
                  dim3(kOneTokenThreads), static_cast<std::size_t>(memory.bytes), stream, params,
                  memory);
}

}  // namespace fusedmoe::cuda
