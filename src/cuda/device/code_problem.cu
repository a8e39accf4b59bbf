#include "core/device_runtime.h"
#include "core/format.h"
#include "cuda/device/check.h"
#include "cuda/device/device_code.h"

namespace fusedmoe::cuda {

std::string driver_version() {
  int version = 0;
  FUSEDMOE_CUDA_CHECK(cudaDriverGetVersion(&version));
  return core::to_string(version / 1000) + '.' + core::to_string(version % 1000 / 10);
}

std::string code_problem(const void* kernel, Device device) {
  if (!kernel) return {};
  const core::CurrentDevice current(device);
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // clears the error, which later calls would report as theirs
  switch (error) {
    case cudaErrorUnsupportedPtxVersion:
      return "only PTX, which is newer than the driver (CUDA " + driver_version() + ')';
    case cudaErrorJitCompilerNotFound:
      return "only PTX, and the driver's compiler (libnvidia-ptxjitcompiler) is not there";
    case cudaErrorJitCompilationDisabled:
      return "only PTX, which CUDA_DISABLE_PTX_JIT forbids to compile";
    default:
      return std::string("no code that the driver takes: ") + cudaGetErrorString(error);
  }
}

}  // namespace fusedmoe::cuda
