// What a build without CUDA has instead of what runs on a device: queries are answered, everything
// else is an Error. The experts say their sizes and kernel configurations, as the sources beside
// this file that need no CUDA (src/CMakeLists.txt) compute them.
#include "core/device_runtime.h"
#include "cuda/backend.h"
#include "cuda/device/capability.h"
#include "cuda/device/device_code.h"
#include "cuda/device/properties.h"
#include "cuda/experts/experts.h"
#include "cuda/experts/planner.h"
#include "cuda/sm80/family.h"
#include "cuda/sm90/family.h"
#include "fusedmoe/comm.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "moe/peer_memory.h"

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

std::shared_ptr<PeerBlocks> PeerBlocks::make(const PeerGroup&, std::size_t) {
  fail();
}

std::shared_ptr<PeerMemory> PeerMemory::make(const PeerGroup&, std::chrono::milliseconds,
                                             std::shared_ptr<PeerBlocks>, std::size_t) {
  fail();
}

namespace cuda {
namespace {

/// Tells what a GPU would take. Nothing can be packed or run.
class PlannedExperts final : public Experts {
 public:
  PlannedExperts(const ExpertsDescriptor& descriptor, const KernelFamily& family,
                 const MoeConfig& config, const Context& context)
      : Experts(descriptor, config, context),
        planner_(this->config(), context, family,
                 limits_of_capability(this->config().compute_capability.value_or(0))) {}

  WorkspaceSizes workspace_sizes(const ProblemSize& problem) const override {
    return planner_.workspace_sizes(problem);
  }
  std::vector<std::string> kernel_configs(const ProblemSize& problem) const override {
    return planner_.kernel_configs(problem);
  }
  int find_kernel_config(std::string_view name) const override {
    return find_config(planner_.family(), name);
  }
  std::shared_ptr<PackedWeights> pack(const ExpertWeights&, const PackOptions&) const override {
    check_device(*this);  // says why
    fail();
  }
  std::shared_ptr<PackedWeights> from_parts(PackedWeights::Info,
                                            const PackedParts&) const override {
    check_device(*this);
    fail();
  }
  bool accepts(const PackedWeights&) const override { return false; }

 private:
  void run(const ForwardArgs&) const override { fail(); }

  const Planner planner_;
};

}  // namespace

std::shared_ptr<const Experts> make_experts(const ExpertsDescriptor& descriptor,
                                            const KernelFamily& family, const MoeConfig& config,
                                            const Context& context) {
  return std::make_shared<PlannedExperts>(descriptor, family, config, context);
}

int compute_capability(Device) {
  return 0;
}

std::span<const FormatLaunches> sm90_launches() {
  return {};
}
std::span<const FormatLaunches> sm89_launches() {
  return {};
}
std::span<const FormatLaunches> sm80_launches() {
  return {};
}
const void* sm90_probe() {
  return nullptr;
}
const void* sm89_probe() {
  return nullptr;
}
const void* sm80_probe() {
  return nullptr;
}
std::string code_problem(const void*, Device) {
  return {};
}
std::string driver_version() {
  fail();
}
const DeviceLimits& limits_of(Device) {
  fail();
}

}  // namespace cuda
}  // namespace fusedmoe
