// One kernel of the grouped GEMM and its launch: what each file of instances/ defines once.
#pragma once

#include "cuda/device/launch.h"
#include "cuda/gemm/grouped_gemm_sm90.cuh"
#include "cuda/gemm/instances/instances.h"

namespace fusedmoe::cuda {

/// Blocks of a persistent kernel that fills the current device.
inline unsigned num_multiprocessors() {
  int device = 0, count = 0;
  FUSEDMOE_CUDA_CHECK(cudaGetDevice(&device));
  FUSEDMOE_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return static_cast<unsigned>(count);
}

template <typename Weights, int kConfig>
void launch_instance(const GroupedGemm& problem, void* stream) {
  using Kernel = GemmKernel<Weights, kTileConfigs[kConfig]>;
  launch(grouped_gemm_kernel<Weights, kConfig>, dim3(num_multiprocessors()),
         dim3(Kernel::Config::kThreads), sizeof(typename Kernel::Shared),
         static_cast<cudaStream_t>(stream), true, problem);
}

}  // namespace fusedmoe::cuda
