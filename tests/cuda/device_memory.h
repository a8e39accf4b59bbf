// The tests' way to device memory and back.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <stdexcept>

#include "fusedmoe/tensor.h"

namespace fusedmoe::testing {

inline void expect_success(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/// A copy of a contiguous host tensor on cuda:0. Every tensor has an allocation of its own, so that
/// a memory checker sees accesses beyond it.
inline Tensor to_device(const Tensor& tensor) {
  void* memory = nullptr;
  const auto bytes = static_cast<std::size_t>(tensor.nbytes());
  expect_success(cudaMalloc(&memory, bytes));
  std::shared_ptr<void> owner(memory, [](void* pointer) { cudaFree(pointer); });
  expect_success(cudaMemcpy(memory, tensor.data(), bytes, cudaMemcpyHostToDevice));
  return {TensorView(memory, tensor.dtype(), tensor.shape(), Device{DeviceKind::kCuda, 0}), owner};
}

/// Back again, when all work on it is done.
inline Tensor to_host(const Tensor& tensor) {
  Tensor result = Tensor::empty(tensor.shape(), tensor.dtype());
  expect_success(cudaDeviceSynchronize());
  expect_success(cudaMemcpy(result.data(), tensor.data(), static_cast<std::size_t>(tensor.nbytes()),
                            cudaMemcpyDeviceToHost));
  return result;
}

}  // namespace fusedmoe::testing
