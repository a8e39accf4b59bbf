// The launch of the kernel of one token: what generated files define for each policy.
#pragma once

#include "cuda/device/launch.h"
#include "cuda/formats/operand_policy.h"
#include "cuda/one_token/one_token_kernel.cuh"

namespace fusedmoe::cuda {

template <OperandPolicy Operands>
void launch_one_token(const OneTokenParams& params, const OneTokenShape& shape,
                      const Stream& stream) {
  const OneTokenLayout layout = shape.layout();
  launch_together(one_token_kernel<Operands>, dim3(static_cast<unsigned>(shape.blocks)),
                  dim3(kOneTokenThreads), static_cast<std::size_t>(layout.bytes), stream, params,
                  layout);
}

}  // namespace fusedmoe::cuda
