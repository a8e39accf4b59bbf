// Kernel launches, checked, with programmatic dependent launch where the kernel is made for it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "cuda/device/check.h"

namespace fusedmoe::cuda {

/// As launch(), below, in clusters of `cluster` neighbouring blocks.
template <typename... Params, typename... Args>
void launch_clusters(void (*kernel)(Params...), int cluster, dim3 grid, dim3 block,
                     std::size_t shared_bytes, cudaStream_t stream, bool overlap_previous,
                     Args&&... args) {
  constexpr std::size_t kDefaultSharedBytes = 48 * 1024;
  if (shared_bytes > kDefaultSharedBytes) {
    FUSEDMOE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(shared_bytes)));
  }
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (overlap_previous) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  FUSEDMOE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

/// Launches `kernel` on `stream`; throws Error when the launch is refused. Dynamic shared memory
/// beyond 48 KiB is allowed for by itself.
///
/// With `overlap_previous`, for kernels whose predecessor in the stream is one of ours and no copy
/// of a caller's, so never for the first of a forward, the grid may start while the previous kernel
/// of the stream still runs. Such a kernel calls cudaGridDependencySynchronize() in every thread,
/// before it reads what earlier kernels wrote and before it writes what they read or write; that
/// call waits until they have completed, so the order also holds over a chain of such kernels. A
/// kernel that calls cudaTriggerProgrammaticLaunchCompletion() early lets the next one start as
/// soon as all its own blocks have got that far.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
            cudaStream_t stream, bool overlap_previous, Args&&... args) {
  launch_clusters(kernel, 1, grid, block, shared_bytes, stream, overlap_previous,
                  std::forward<Args>(args)...);
}

}  // namespace fusedmoe::cuda
