#include "cuda/device/check.h"

#include <algorithm>
#include <array>
#include <string>

namespace fusedmoe::cuda {
namespace {

/// Errors of a kernel while it ran. They leave the device unusable for the rest of the process, and
/// the runtime reports them from whichever call comes next.
bool is_kernel_failure(cudaError_t error) {
  constexpr std::array kFailures{cudaErrorIllegalAddress,
                                 cudaErrorMisalignedAddress,
                                 cudaErrorInvalidAddressSpace,
                                 cudaErrorIllegalInstruction,
                                 cudaErrorInvalidPc,
                                 cudaErrorHardwareStackError,
                                 cudaErrorAssert,
                                 cudaErrorLaunchFailure,
                                 cudaErrorLaunchTimeout,
                                 cudaErrorECCUncorrectable,
                                 cudaErrorContextIsDestroyed};
  return std::find(kFailures.begin(), kFailures.end(), error) != kFailures.end();
}

/// "an illegal memory access was encountered (cudaErrorIllegalAddress)"
std::string describe(cudaError_t error) {
  return std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ')';
}

}  // namespace

void fail(cudaError_t error, const char* call) {
  cudaGetLastError();
  const std::string text = call, function = text.substr(0, text.find('('));
  if (error == cudaErrorMemoryAllocation) throw Error::out_of_memory(0, "CUDA, in " + function);
  if (is_kernel_failure(error)) {
    throw Error::device(
        error, "a kernel that was launched before " + function + " failed: " + describe(error));
  }
  throw Error::device(error, function + " failed: " + describe(error));
}

void check_earlier_kernels() {
  const cudaError_t error = cudaPeekAtLastError();
  if (!is_kernel_failure(error)) return;
  throw Error::device(error, "an earlier kernel of the calling program failed: " + describe(error));
}

}  // namespace fusedmoe::cuda
