// The CUDA part of a build without CUDA: queries are answered, everything else is an Error.
#include "core/device_runtime.h"
#include "cuda/backend.h"
#include "cuda/experts.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {
namespace {

constexpr const char* kWithoutCuda = "built without CUDA";

[[noreturn]] void fail() {
  throw Error::unsupported(Reason::kDevice, "device", "cuda", std::string("cpu: ") + kWithoutCuda);
}

}  // namespace

int cuda_device_count() {
  return 0;
}

std::string cuda_device_summary() {
  return std::string("none: ") + kWithoutCuda;
}

std::string device_problem(Device device) {
  return device.is_cpu() ? "" : kWithoutCuda;
}

std::string_view device_name(Device device) {
  return device.is_cpu() ? "cpu" : "";
}

const core::DeviceRuntime& core::cuda_runtime() {
  fail();
}

const core::Backend& cuda::backend() {
  fail();
}

std::vector<std::shared_ptr<const Experts>> cuda::make_all_experts() {
  return {};
}

}  // namespace fusedmoe
