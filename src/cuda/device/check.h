// Return codes of the CUDA runtime as fusedmoe::Error.
#pragma once

#include <cuda_runtime.h>

#include "fusedmoe/tensor.h"

/// Throws Error naming the call unless it returned cudaSuccess. Clears the error, which later calls
/// would report as theirs.
#define FUSEDMOE_CUDA_CHECK(call)                                                            \
  do {                                                                                       \
    const cudaError_t fusedmoe_cuda_error = (call);                                          \
    if (fusedmoe_cuda_error != cudaSuccess) {                                                \
      cudaGetLastError();                                                                    \
      throw ::fusedmoe::Error(#call, cudaGetErrorString(fusedmoe_cuda_error), "successful"); \
    }                                                                                        \
  } while (false)
