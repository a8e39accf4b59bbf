// Return codes of the CUDA runtime as fusedmoe::Error.
#pragma once

#include <cuda_runtime.h>

#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// Throws Error for the failure of `call`, kind out of memory or device. Clears the error, which
/// later calls would report as theirs.
[[noreturn]] void fail(cudaError_t error, const char* call);

/// Throws Error if an earlier kernel has left the device unusable, so that its failure is not taken
/// for that of our next call. Costs no synchronization.
void check_earlier_kernels();

}  // namespace fusedmoe::cuda

#define FUSEDMOE_CUDA_CHECK(call)                         \
  do {                                                    \
    const cudaError_t fusedmoe_cuda_error = (call);       \
    if (fusedmoe_cuda_error != cudaSuccess) {             \
      ::fusedmoe::cuda::fail(fusedmoe_cuda_error, #call); \
    }                                                     \
  } while (false)
