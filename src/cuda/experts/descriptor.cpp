#include "cuda/experts/descriptor.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/check.h"
#include "cuda/device/capability.h"
#include "cuda/device/device_code.h"
#include "cuda/device/limits.h"
#include "cuda/experts/experts.h"
#include "cuda/experts/packed_shapes.h"
#include "cuda/experts/scratch.h"
#include "cuda/formats/weight_formats.h"
#include "cuda/mlp/fused_mlp.h"
#include "cuda/router/kernels.h"
#include "fusedmoe/runtime.h"
#include "moe/experts_args.h"
#include "quant/quantize.h"

namespace fusedmoe::cuda {
namespace {

/// Whether the device is one that these kernels are for; then with the code that it would run.
Support supports_device(const MoeConfig& config, const KernelFamily& family) {
  const auto no = [](std::string text) { return Support::no(Reason::kDevice, std::move(text)); };
  if (config.device.is_cpu()) return no("device is cpu, runs on cuda");
  if (!config.compute_capability) {
    if (const std::string problem = device_problem(config.device); !problem.empty()) {
      return no(core::format("{}: {}", to_string(config.device), problem));
    }
  }
  const int capability = config.compute_capability.value_or(compute_capability(config.device));
  if (!family.runs_on(capability)) {
    return no(core::format("compute capability {}.{}, needs {}", capability / 10, capability % 10,
                           family.needs()));
  }
  const std::optional<DeviceCode> code = code_for(family.architectures(), capability);
  if (!code) {
    return no(core::format("no machine code for compute capability {}.{} in this build, and no PTX",
                           capability / 10, capability % 10));
  }
  // What machine code there is runs. PTX the driver has to compile.
  if (code->is_ptx && !config.compute_capability) {
    if (std::string problem = code_problem(family.kernel(), config.device); !problem.empty()) {
      return no(std::move(problem));
    }
  }
  return {Reason::kSupported, to_string(*code)};
}

/// With more of them int32 may not hold the sums of products of INT8.
constexpr std::int64_t kMaxInt8Columns = (std::int64_t{1} << 31) / (128 * 128) - 1;

/// The intermediate size is a multiple of it.
std::int64_t intermediate_unit(const MoeConfig& config, const WeightFormat& format) {
  if (config.hooks) return kPitchUnit;  // the rows that hooks see have no padding
  const QuantKey& key = config.scheme.weights;
  // Gate and up of one fused matrix share its scale blocks, which slices of 8 rows are in.
  if (key.value == DType::kE4M3 && key.group.rows > 1 && !format.decodes) return kPitchUnit;
  return key.value == DType::kE2M1 ? 2 : 1;  // two codes in a byte
}

}  // namespace

/// Those that ranks can send each other.
bool FamilyDescriptor::takes_quantized_inputs(const QuantScheme& scheme) const {
  return scheme.activations && core::has_cuda_quantizer(*scheme.activations);
}

Support FamilyDescriptor::supports(const MoeConfig& config) const {
  const auto no = [](Reason reason, std::string text) {
    return Support::no(reason, std::move(text));
  };
  Support device = supports_device(config, family_);
  if (!device) return device;
  const auto find = [&](DType dtype) {
    const WeightFormat* format = find_weight_format(config.scheme, dtype);
    return format && !family_.tiles(*format).empty() ? format : nullptr;
  };
  const WeightFormat* format = find(config.dtype);
  if (!format) {
    for (const DType other : {DType::kBF16, DType::kF16}) {
      if (!find(other)) continue;
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
  if (const std::int64_t widest = std::max(config.hidden, config.intermediate);
      format->int8_rows && widest > kMaxInt8Columns) {
    return no(Reason::kShape,
              core::format("size {}: int32 sums of INT8 hold up to {}", widest, kMaxInt8Columns));
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
  const bool fp8_as_f16 = format->fp8_rows && family_.fp8_as_f16();
  return {Reason::kSupported,
          core::format("{} by {}, {}", fp8_as_f16 ? "FP8 as f16" : format->multiplied_as(),
                       family_.instruction(), device.text)};
}

std::int64_t FamilyDescriptor::packed_bytes(const MoeConfig& config) const {
  const WeightFormat* format = find_weight_format(config.scheme, config.dtype);
  return format ? cuda::packed_bytes(config, *format) : 0;
}

std::shared_ptr<const Experts> FamilyDescriptor::create(const MoeConfig& config,
                                                        const Context& context) const {
  core::check_supported(*this, config);
  return make_experts(*this, family_, config, context);
}

bool plans_for(const MoeConfig& config, int multiprocessors) {
  return !config.compute_capability ||
         limits_of_capability(*config.compute_capability).multiprocessors == multiprocessors;
}

void check_device(const Experts& experts) {
  MoeConfig here = experts.config();
  here.compute_capability.reset();
  core::check_supported(experts.descriptor(), here);
}

}  // namespace fusedmoe::cuda
