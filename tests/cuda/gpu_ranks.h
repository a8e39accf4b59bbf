// What tests of ranks on GPUs share: the ways to have ranks, a small layer and its forward.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "../ranks/ranks.h"
#include "cuda_test.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "testing/cases.h"

namespace fusedmoe::testing {

inline constexpr std::int64_t kTokens = 24, kHidden = 256;
/// Each rank rounds its part of a sum to bf16 before the parts are added; a layer on one GPU does
/// not. One rounding changes a part by up to 2^-9 of it. Parts may cancel, so the sum may be
/// several times smaller than they are: 2e-2 of it is ten such roundings.
inline constexpr double kTolerance = 2e-2;

struct Setting {
  int size = 2;
  bool nccl = false;   ///< a GPU for each rank
  bool peers = false;  ///< which read each other's memory
  std::string name() const {
    return (peers ? "peers" : nccl ? "nccl" : "shared") + std::to_string(size);
  }
};

/// One GPU for all ranks, or one each; those that this machine has. Where rows are messages.
inline std::vector<Setting> settings() {
  setenv("NCCL_NVLS_ENABLE", "0", 0);  // before NCCL is loaded
  std::vector<Setting> list{{2, false}, {4, false}};
  for (const int size : {2, 4, 8}) {
    if (size <= cuda_device_count() && nccl_info().problem.empty()) list.push_back({size, true});
  }
  return list;
}
/// And where they are not.
inline std::vector<Setting> all_settings() {
  std::vector<Setting> list = settings();
  for (const Setting& each : settings()) {
    if (each.nccl) list.push_back({each.size, true, true});
  }
  return list;
}

/// Communicators are made by the ranks themselves.
class Ranks {
 public:
  explicit Ranks(const Setting& setting, std::chrono::milliseconds timeout = kPatient)
      : setting_(setting), timeout_(timeout), control_(make_thread_control_plane()) {
    const CommunicatorOptions options{timeout, Device{DeviceKind::kCuda, 0}, true, false};
    if (!setting.nccl) shared_ = make_thread_communicators(setting.size, options);
  }
  std::shared_ptr<Communicator> join(int rank) {
    if (!setting_.nccl) return shared_[rank];
    const Device device{DeviceKind::kCuda, rank};
    return make_communicator(rank, setting_.size, control_,
                             {timeout_, device, true, setting_.peers});
  }

 private:
  Setting setting_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<ControlPlane> control_;
  std::vector<std::shared_ptr<Communicator>> shared_;
};

inline Case small_case(const char* scheme) {
  Case spec;
  spec.num_experts = 13;
  spec.topk = 4;
  spec.hidden = kHidden;
  spec.intermediate = 256;
  spec.scheme = parse_scheme(scheme);
  return spec;
}

inline LayerOptions options_of(Device device, bool batch_invariant) {
  LayerOptions options;
  options.device = device;
  options.batch_invariant = batch_invariant;
  options.require = experts_under_test();
  return options;
}

/// `x` on the layer's device, the output in host memory.
inline Tensor forward_there(const MoeLayer& layer, const TensorView& x, std::int64_t most,
                            const ExpertsHooks* hooks = nullptr, bool fixed_sizes = false) {
  const Device device = layer.config().device;
  const std::size_t bytes = layer.workspace_bytes(std::max(most, x.size(0)), fixed_sizes);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, device);
  const Tensor output = Tensor::empty(x.shape(), x.dtype(), device);
  ForwardOptions options;
  options.max_tokens = most;
  options.fixed_sizes = fixed_sizes;
  options.hooks = hooks;
  layer.forward(x, output, {workspace.data(), bytes}, options);
  synchronize(Stream{device});
  return to_device(output, {});
}

inline Tensor forward(const MoeLayer& layer, const Tensor& x, std::int64_t most,
                      const ExpertsHooks* hooks = nullptr, bool fixed_sizes = false) {
  const Tensor there = to_device(x, layer.config().device);
  return forward_there(layer, there, most, hooks, fixed_sizes);
}

inline std::int64_t tokens_of(int rank) {
  return rank == 1 ? 0 : std::max<std::int64_t>(kTokens - 5 * rank, 0);
}

}  // namespace fusedmoe::testing
