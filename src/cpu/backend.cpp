#include "cpu/backend.h"

#include "core/parallel.h"
#include "cpu/router.h"
#include "moe/host_backend.h"

namespace fusedmoe::cpu {
namespace {

class CpuBackend final : public core::HostBackend {
 public:
  void router_logits(const RouterWeights& weights, const TensorView& x, const TensorView& logits,
                     Stream stream) const override {
    cpu::router_logits(core::executor_of(stream), weights, x, logits);
  }
};

}  // namespace

const core::Backend& backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace fusedmoe::cpu
