#include "cuda/device/context.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "cuda/device/properties.h"

namespace fusedmoe::cuda {
namespace {

/// A function of the driver, which is asked for it until it has answered.
template <typename Function>
class EntryPoint {
 public:
  constexpr EntryPoint(const char* name, unsigned version) : name_(name), version_(version) {}

  /// Null where the driver does not have it, or cannot be asked now.
  Function find() {
    if (!answered_) ask();
    return function_;
  }

 private:
  void ask() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion(name_, &function, version_, cudaEnableDefault, &result) !=
        cudaSuccess) {
      cudaGetLastError();  // clears what later calls would report as theirs
      return;
    }
    if (result == cudaDriverEntryPointSuccess) function_ = reinterpret_cast<Function>(function);
    answered_ = true;
  }

  const char* const name_;
  const unsigned version_;
  std::atomic<Function> function_{nullptr};  // before `answered_`
  std::atomic<bool> answered_{false};
};

}  // namespace

std::uint64_t current_context_id() {
  static EntryPoint<decltype(&cuCtxGetId)> entry("cuCtxGetId", 12000);
  const auto get_id = entry.find();
  unsigned long long id = 0;
  return get_id && get_id(nullptr, &id) == CUDA_SUCCESS ? id : 0;
}

int multiprocessors_of(Stream stream) {
  static EntryPoint<decltype(&cuStreamGetCtx_v2)> contexts("cuStreamGetCtx", 12050);
  static EntryPoint<decltype(&cuGreenCtxGetDevResource)> resources("cuGreenCtxGetDevResource",
                                                                   12040);
  const auto get_contexts = contexts.find();
  const auto get_resource = resources.find();
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
