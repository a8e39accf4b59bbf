#include "cpu/backend.h"

#include "moe/host_backend.h"

namespace fusedmoe::cpu {
namespace {

class CpuBackend final : public core::HostBackend {
 public:
  void router_logits(const RouterWeights& weights, const TensorView& x, const TensorView& logits,
                     Stream) const override {
    fusedmoe::router_logits(weights, x, logits);
  }
};

}  // namespace

const core::Backend& backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace fusedmoe::cpu
