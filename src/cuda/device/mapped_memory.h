// A block of GPU memory that other GPUs, and other processes, can map, and which is taken and given
// back without a wait for the GPU.
#pragma once

#include <cstddef>
#include <mutex>
#include <set>

#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// From cuMemCreate, not from cudaMalloc: so nothing else of this process is mapped by its peers,
/// and cudaMalloc never waits for kernels of another GPU. To free it takes 0.3 ms; cudaFree waits
/// until the GPU has nothing to do, and launches of other threads wait with it. The memory lives as
/// long as anybody maps it, also when its process has ended.
class MappedMemory {
 public:
  /// At least so many bytes on a GPU, in whole pages of 2 MiB or so. Throws Error where there is
  /// too little, or where the driver makes no memory that can be mapped by others.
  MappedMemory(std::size_t bytes, Device device);
  /// What another process has made a descriptor of, mapped for a GPU of this one.
  MappedMemory(int descriptor, std::size_t bytes, Device device);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  std::size_t bytes() const { return bytes_; }
  /// A descriptor for another process; the caller closes it.
  int descriptor() const;
  /// Lets another GPU of this process read and write it at the same address. From any thread, but
  /// while no kernel uses it.
  void allow(Device device);

 private:
  void map(Device device);
  void release() noexcept;

  std::size_t bytes_ = 0;
  unsigned long long handle_ = 0;   // CUmemGenericAllocationHandle
  unsigned long long address_ = 0;  // CUdeviceptr
  bool is_mapped_ = false;
  std::mutex mutex_;
  std::set<int> allowed_;  // GPUs
};

}  // namespace fusedmoe::cuda
