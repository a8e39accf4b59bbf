// Which configurations the Hopper experts serve.
#include <string>
#include <utility>

#include "core/check.h"
#include "cuda/experts.h"
#include "cuda/gemm/weight_format.h"
#include "cuda/router/kernels.h"
#include "cuda/scratch.h"
#include "fusedmoe/runtime.h"
#include "moe/experts_args.h"

namespace fusedmoe::cuda {
namespace {

class Sm90Descriptor final : public ExpertsDescriptor {
 public:
  std::string_view name() const override { return "sm90"; }
  Support supports(const MoeConfig& config) const override;
  bool routes_faster() const override { return true; }
  std::string_view instruction_set() const override { return "sm_90a"; }
  int layout_version() const override { return 1; }
  std::shared_ptr<const Experts> create(const MoeConfig& config,
                                        const Context& context) const override {
    MoeConfig here = config;
    here.compute_capability.reset();  // what runs needs the device itself
    core::check_supported(*this, here);
    return make_experts(*this, here, context);
  }
};

/// Whether the device is one that these kernels are for.
Support supports_device(const MoeConfig& config) {
  const auto no = [](std::string text) { return Support::no(Reason::kDevice, std::move(text)); };
  constexpr int kCapability = 90;
  if (config.device.is_cpu()) return no("device is cpu, runs on cuda");
  if (config.compute_capability) {
    const int given = *config.compute_capability;
    if (given == kCapability) return Support::yes();
    return no(core::format("compute capability {}.{}, needs 9.0", given / 10, given % 10));
  }
  const std::string problem = device_problem(config.device);
  return problem.empty() ? Support::yes()
                         : no(core::format("{}: {}", to_string(config.device), problem));
}

Support Sm90Descriptor::supports(const MoeConfig& config) const {
  const auto no = [](Reason reason, std::string text) {
    return Support::no(reason, std::move(text));
  };
  if (Support support = supports_device(config); !support) return support;
  const WeightFormat* format = find_weight_format(config.scheme);
  if (!format) {
    std::string known;
    for (const WeightFormat& each : weight_formats()) {
      known += (known.empty() ? "" : ", ") + fusedmoe::name(each.scheme);
    }
    return no(Reason::kQuantScheme,
              core::format("scheme is {}, takes {}", fusedmoe::name(config.scheme), known));
  }
  if (config.dtype != format->row_dtype) {
    return no(Reason::kDType, core::format("dtype is {}, takes {}", fusedmoe::name(config.dtype),
                                           fusedmoe::name(format->row_dtype)));
  }
  // The rows that hooks see have no padding.
  const std::int64_t unit = config.hooks ? kPitchUnit : std::int64_t{format->codes_per_value};
  if (Support common = core::supports_anywhere(config, {kPitchUnit, unit}); !common) return common;
  const Variant variant = variant_of(config);
  if (config.batch_invariant && variant != Variant::kBatchInvariant) {
    return no(Reason::kBatchInvariance, "the order of its sums depends on the batch");
  }
  if (config.topk > kMaxRouterTopk) {
    return no(Reason::kShape, core::format("topk {}; takes up to {}", config.topk, kMaxRouterTopk));
  }
  if (config.num_local_experts > kMaxExperts) {
    return no(Reason::kShape,
              core::format("{} experts; takes up to {}", config.num_local_experts, kMaxExperts));
  }
  return Support::yes();
}

}  // namespace

const ExpertsDescriptor& descriptor() {
  static const Sm90Descriptor descriptor;
  return descriptor;
}

}  // namespace fusedmoe::cuda
