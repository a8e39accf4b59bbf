// One kernel of the grouped GEMM and its launch: what each file of instances/ defines once.
#pragma once

#include <algorithm>

#include "cuda/device/check.h"
#include "cuda/gemm/grouped_gemm_sm90.cuh"
#include "cuda/gemm/instances/instances.h"

namespace fusedmoe::cuda {

template <typename Weights, int kConfig>
void launch_instance(const GroupedGemm& problem, int num_blocks, void* stream) {
  using Kernel = GemmKernel<Weights, kTileConfigs[kConfig]>;
  constexpr std::size_t kSharedBytes = sizeof(typename Kernel::Shared);
  const auto kernel = grouped_gemm_kernel<Weights, kConfig>;
  static const cudaError_t attribute = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes));
  FUSEDMOE_CUDA_CHECK(attribute);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(Kernel::Config::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = 1;
  FUSEDMOE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, problem));
}

}  // namespace fusedmoe::cuda
