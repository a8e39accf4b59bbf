#include "cuda/device/context.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/device/properties.h"

namespace fusedmoe::cuda {
namespace {

/// Null where the driver does not have it.
template <typename Function>
Function find(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result);
  if (error != cudaSuccess) cudaGetLastError();  // clears what later calls would report as theirs
  const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return found ? reinterpret_cast<Function>(function) : nullptr;
}

}  // namespace

std::uint64_t current_context_id() {
  static const auto get_id = find<decltype(&cuCtxGetId)>("cuCtxGetId", 12000);
  unsigned long long id = 0;
  return get_id && get_id(nullptr, &id) == CUDA_SUCCESS ? id : 0;
}

int multiprocessors_of(Stream stream) {
  static const auto get_contexts = find<decltype(&cuStreamGetCtx_v2)>("cuStreamGetCtx", 12050);
  static const auto get_resource =
      find<decltype(&cuGreenCtxGetDevResource)>("cuGreenCtxGetDevResource", 12040);
  const int all = multiprocessor_count(stream.device);
  CUcontext context = nullptr;
  CUgreenCtx green = nullptr;
  CUdevResource resource{};
  if (!get_contexts || !get_resource ||
      get_contexts(static_cast<CUstream>(stream.handle), &context, &green) != CUDA_SUCCESS ||
      !green || get_resource(green, &resource, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS) {
    return all;
  }
  return std::min(all, static_cast<int>(resource.sm.smCount));
}

}  // namespace fusedmoe::cuda
