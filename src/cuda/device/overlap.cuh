// A kernel's side of programmatic dependent launch (PDL), see launch(). GPUs before Hopper have
// none of it: there a launch begins when the one before has ended.
#pragma once

#include <cuda_runtime.h>

namespace fusedmoe::cuda {

/// Waits until the launch before this one has ended and its writes are seen.
__device__ __forceinline__ void wait_for_previous_launch() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

/// Lets the next launch begin as soon as every block of this one has called it or ended.
__device__ __forceinline__ void let_next_launch_begin() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace fusedmoe::cuda
