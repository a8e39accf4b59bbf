// Which configurations the Hopper experts serve.
#include <string>
#include <utility>

#include "core/check.h"
#include "cuda/experts/experts.h"
#include "cuda/experts/fused_mlp.h"
#include "cuda/experts/scratch.h"
#include "cuda/formats/weight_format.h"
#include "cuda/router/kernels.h"
#include "cuda/sm90/heuristic.h"
#include "fusedmoe/runtime.h"
#include "moe/experts_args.h"

namespace fusedmoe::cuda {
namespace {

class Sm90Descriptor final : public ExpertsDescriptor {
 public:
  std::string_view name() const override { return "sm90"; }
  Support supports(const MoeConfig& config) const override;
  bool routes_faster() const override { return true; }
  /// The experts quantize rows themselves, most where they permute them.
  bool expects_unquantized_inputs(const QuantScheme&) const override { return true; }
  std::string_view instruction_set() const override { return "sm_90a"; }
  int layout_version() const override { return 3; }
  std::shared_ptr<const Experts> create(const MoeConfig& config,
                                        const Context& context) const override {
    core::check_supported(*this, config);
    return make_experts(*this, config, context);
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

/// The intermediate size is a multiple of it.
std::int64_t intermediate_unit(const MoeConfig& config, const WeightFormat& format) {
  if (config.hooks) return kPitchUnit;  // the rows that hooks see have no padding
  const QuantKey& key = config.scheme.weights;
  // Gate and up of one fused matrix share its scale blocks, which slices of 8 rows are in.
  if (key.value == DType::kE4M3 && key.group.rows > 1 && !format.decodes) return kPitchUnit;
  return key.value == DType::kE2M1 ? 2 : 1;  // two codes in a byte
}

Support Sm90Descriptor::supports(const MoeConfig& config) const {
  const auto no = [](Reason reason, std::string text) {
    return Support::no(reason, std::move(text));
  };
  if (Support support = supports_device(config); !support) return support;
  const WeightFormat* format = find_weight_format(config.scheme, config.dtype);
  if (!format) {
    for (const DType other : {DType::kBF16, DType::kF16}) {
      if (!find_weight_format(config.scheme, other)) continue;
      return no(Reason::kDType, core::format("dtype is {}, takes {}", fusedmoe::name(config.dtype),
                                             fusedmoe::name(other)));
    }
    return no(Reason::kQuantScheme,
              core::format("scheme {} has no kernel", fusedmoe::name(config.scheme)));
  }
  if (Support common =
          core::supports_anywhere(config, {kPitchUnit, intermediate_unit(config, *format)});
      !common) {
    return common;
  }
  if (batch_dependent(config.scheme) && config.parallel.ep_size > 1) {
    return no(Reason::kParallelConfig, "one dynamic scale for all rows, which ranks do not share");
  }
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

bool plans_for(const MoeConfig& config, int multiprocessors) {
  return !config.compute_capability || MlpShape().multiprocessors == multiprocessors;
}

void check_device(const Experts& experts) {
  MoeConfig here = experts.config();
  here.compute_capability.reset();
  core::check_supported(experts.descriptor(), here);
}

}  // namespace fusedmoe::cuda
