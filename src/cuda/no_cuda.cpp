// The CUDA part of a build without CUDA: queries are answered, everything else is an Error.
#include "core/device_runtime.h"
#include "cuda/backend.h"
#include "cuda/experts.h"
#include "fusedmoe/comm.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {
namespace {

constexpr const char* kWithoutCuda = "built without CUDA";

[[noreturn]] void fail() {
  throw Error::unsupported(Reason::kDevice, "device", std::string("cuda: ") + kWithoutCuda);
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

NcclInfo nccl_info() {
  return {.problem = kWithoutCuda};
}

std::shared_ptr<DataPlane> make_nccl_data_plane(int, int, Device, std::shared_ptr<ControlPlane>,
                                                std::chrono::milliseconds, const CallersNccl&) {
  fail();
}

std::string make_nccl_unique_id() {
  fail();
}

namespace {

/// Answers that nothing runs.
class NoCudaDescriptor final : public ExpertsDescriptor {
 public:
  std::string_view name() const override { return "sm90"; }
  Support supports(const MoeConfig& config) const override {
    return Support::no(Reason::kDevice,
                       config.device.is_cpu() ? "device is cpu, runs on cuda" : kWithoutCuda);
  }
  std::string_view instruction_set() const override { return "sm_90a"; }
  int layout_version() const override { return 1; }
  std::shared_ptr<const Experts> create(const MoeConfig&, const Context&) const override { fail(); }
};

}  // namespace

const ExpertsDescriptor& cuda::descriptor() {
  static const NoCudaDescriptor descriptor;
  return descriptor;
}

}  // namespace fusedmoe
