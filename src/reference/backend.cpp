#include "reference/backend.h"

#include "core/parallel.h"
#include "host/host_backend.h"
#include "reference/router.h"

namespace fusedmoe::reference {
namespace {

class ReferenceBackend final : public core::HostBackend {
 public:
  /// Sums in double, like everything else of the reference.
  void router_logits(const RouterWeights& weights, const TensorView& x, const TensorView& logits,
                     Stream stream) const override {
    const std::int64_t num_tokens = logits.size(0), num_experts = logits.size(1);
    auto* values = logits.as<float>();
    core::parallel_for(core::executor_of(stream), num_tokens, true, [&](std::int64_t token) {
      for (std::int64_t expert = 0; expert < num_experts; ++expert) {
        values[token * num_experts + expert] =
            static_cast<float>(router_logit(weights, x, token, expert));
      }
    });
  }
};

}  // namespace

const core::Backend& backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace fusedmoe::reference
