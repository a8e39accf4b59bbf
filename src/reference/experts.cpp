// The descriptor and the weights of the reference experts; forward.cpp runs them.
#include "reference/experts.h"

#include "core/check.h"
#include "moe/experts_args.h"
#include "moe/routed_experts.h"
#include "quant/quantize.h"
#include "quant/weight_layout.h"
#include "reference/backend.h"
#include "reference/forward.h"
#include "reference/packed_weights.h"

namespace fusedmoe::reference {
namespace {

class ReferenceExperts final : public core::RoutedExperts {
 public:
  ReferenceExperts(const ExpertsDescriptor& descriptor, const MoeConfig& config,
                   const Context& context)
      : RoutedExperts(descriptor, config, context, backend()) {}

  bool accepts(const PackedWeights& weights) const override {
    return dynamic_cast<const ReferenceWeights*>(&weights) &&
           core::matches(weights.info(), config());
  }
  std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                      const PackOptions& options) const override;
  WorkspaceSizes workspace_sizes(const ProblemSize& problem) const override;
  ExpertWeights unpack(const PackedWeights& packed, std::int64_t expert) const override;
  void repack(const ExpertWeights& weights, std::int64_t expert,
              PackedWeights& packed) const override;

 private:
  void run_routed(const ForwardArgs& args) const override { run_forward(*this, args); }
};

class ReferenceDescriptor final : public ExpertsDescriptor {
 public:
  std::string_view name() const override { return "reference"; }
  Support supports(const MoeConfig& config) const override {
    const std::optional<QuantKey>& activations = config.scheme.activations;
    const bool known = core::find_weight_layout(config.scheme.weights) &&
                       core::find_weight_layout(config.scheme.down_weights()) &&
                       (!activations || core::has_quantizer(*activations));
    Support support = core::supports_on_cpu(config, known, "every named scheme");
    if (support) support.text = "f64 by generic";
    return support;
  }
  bool on_request_only() const override { return true; }
  std::string_view instruction_set() const override { return "generic"; }
  int layout_version() const override { return 1; }
  std::shared_ptr<const Experts> create(const MoeConfig& config,
                                        const Context& context) const override {
    core::check_supported(*this, config);
    return std::make_shared<ReferenceExperts>(*this, config, context);
  }
};

WorkspaceSizes ReferenceExperts::workspace_sizes(const ProblemSize& problem) const {
  WorkspaceSizes sizes = core::output_sizes(config(), problem);
  if (problem.num_tokens == 0) return sizes;
  const ScratchBytes scratch = scratch_bytes(*this, problem);
  sizes.workspace13_bytes = scratch.workspace13;
  sizes.workspace2_bytes = scratch.workspace2;
  return sizes;
}

std::shared_ptr<PackedWeights> ReferenceExperts::pack(const ExpertWeights& weights,
                                                      const PackOptions& options) const {
  auto packed =
      std::make_shared<ReferenceWeights>(core::make_packed_info(*this, weights, options), weights);
  if (options.progress) {
    for (std::int64_t e = 1; e <= weights.num_experts(); ++e) {
      options.progress(e, weights.num_experts());
    }
  }
  return packed;
}

ExpertWeights ReferenceExperts::unpack(const PackedWeights& packed, std::int64_t expert) const {
  core::check_expert(*this, packed, expert);
  return copy_expert(static_cast<const ReferenceWeights&>(packed).source, expert);
}

void ReferenceExperts::repack(const ExpertWeights& weights, std::int64_t expert,
                              PackedWeights& packed) const {
  core::check_expert(*this, packed, expert);
  core::check_replacement(weights, packed.info());
  auto& target = static_cast<ReferenceWeights&>(packed);
  const auto index = static_cast<std::size_t>(expert);
  target.replaced[index] = copy_expert(weights, 0);
  target.source.experts[index] = target.replaced[index].experts.front();
}

}  // namespace

const ExpertsDescriptor& descriptor() {
  static const ReferenceDescriptor descriptor;
  return descriptor;
}

}  // namespace fusedmoe::reference
