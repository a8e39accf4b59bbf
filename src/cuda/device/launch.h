// Kernel launches, checked, with programmatic dependent launch (PDL) where the kernel is made for
// it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "cuda/device/check.h"
#include "cuda/device/properties.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// Lets a kernel use so many bytes of dynamic shared memory in the current context, which is one of
/// the device. Only calls that want more than any before reach the CUDA runtime, where they take a
/// microsecond.
void allow_shared_bytes(const void* kernel, std::size_t bytes, Device device);

/// Blocks of a kernel that the device runs at the same time. Throws Error for more shared memory
/// than a block can have.
int resident_blocks(const void* kernel, int threads, std::size_t shared_bytes, Device device);

/// Whether a launch of a kernel may overlap the one before, and its blocks may form clusters. Code
/// for GPUs that cannot do that does not know how to wait for the launch before, whatever GPU runs
/// it.
bool may_overlap(const void* kernel, Device device);
template <typename... Params>
bool may_cluster(void (*kernel)(Params...), Device device) {
  return may_overlap(reinterpret_cast<const void*>(kernel), device);
}

/// Where a kernel is enqueued.
struct LaunchStream {
  cudaStream_t handle;
  Device device;

  LaunchStream(const Stream& stream)  // NOLINT: launches take either kind of stream
      : handle(static_cast<cudaStream_t>(stream.handle)), device(stream.device) {}
  LaunchStream(cudaStream_t stream)  // NOLINT: see above
      : handle(stream), device(current_device()) {}
};

/// What launches differ in, beside their sizes.
struct LaunchOptions {
  int cluster = 1;                ///< neighbouring blocks that form a cluster
  bool overlap_previous = false;  ///< see launch()
  bool together = false;          ///< see launch_together()
};

template <typename... Params, typename... Args>
void launch_with(const LaunchOptions& options, void (*kernel)(Params...), dim3 grid, dim3 block,
                 std::size_t shared_bytes, const LaunchStream& stream, Args&&... args) {
  // Kernels get 48 KiB without asking, their __shared__ variables included. Those of
  // launch_together() have kilobytes of them, so these always ask.
  constexpr std::size_t kDefaultSharedBytes = 48 * 1024;
  if (options.together || shared_bytes > kDefaultSharedBytes) {
    allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes, stream.device);
  }
  cudaLaunchAttribute attributes[3];
  unsigned count = 0;
  if (options.overlap_previous &&
      may_overlap(reinterpret_cast<const void*>(kernel), stream.device)) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (options.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(options.cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  if (options.together) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream.handle;
  config.attrs = attributes;
  config.numAttrs = count;
  FUSEDMOE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

/// As launch(), below, in clusters of `cluster` neighbouring blocks.
template <typename... Params, typename... Args>
void launch_clusters(void (*kernel)(Params...), int cluster, dim3 grid, dim3 block,
                     std::size_t shared_bytes, const LaunchStream& stream, bool overlap_previous,
                     Args&&... args) {
  launch_with({.cluster = cluster, .overlap_previous = overlap_previous}, kernel, grid, block,
              shared_bytes, stream, std::forward<Args>(args)...);
}

/// As launch(), below, without overlap, of blocks that run at the same time: they may wait for each
/// other. So there are no more than fit on the device at once.
template <typename... Params, typename... Args>
void launch_together(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
                     const LaunchStream& stream, Args&&... args) {
  launch_with({.together = true}, kernel, grid, block, shared_bytes, stream,
              std::forward<Args>(args)...);
}

/// Launches `kernel` on `stream`, whose device is the current one; throws Error when the launch is
/// refused. Dynamic shared memory beyond 48 KiB is allowed for by itself.
///
/// Without `overlap_previous` the kernel starts when all work before it in the stream has
/// completed.
///
/// With `overlap_previous` it may start, where may_overlap(), while the previous kernel of the
/// stream still runs: as soon as every block of that one has exited or called
/// let_next_launch_begin(). The rules that keep this correct:
///  - The operation before must be one of our kernels, never a copy or a caller's kernel. So the
///    first kernel of a forward is launched without overlap.
///  - Every thread calls wait_for_previous_launch() before it reads what the kernel before
///    wrote, and before it writes what earlier kernels read or write. That call waits for one
///    kernel only: the previous one of the stream, completed and its writes visible.
///  - Since each kernel of such a chain waits for the one before, its completion means that all
///    earlier ones have completed. A kernel that exits without that call breaks the chain.
///  - Before that call a kernel may read only what was complete when the previous kernel triggered:
///    everything before the last launch without overlap, and what the previous kernel itself had
///    waited for before it triggered. If the previous one triggers at once, it may read what the
///    kernel before that had waited for: that one has triggered, or the previous could not run.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes,
            const LaunchStream& stream, bool overlap_previous, Args&&... args) {
  launch_with({.overlap_previous = overlap_previous}, kernel, grid, block, shared_bytes, stream,
              std::forward<Args>(args)...);
}

}  // namespace fusedmoe::cuda
