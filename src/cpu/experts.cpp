// The CPU experts: standard, unfused (with injection points) and batched.
#include "cpu/experts.h"

#include <algorithm>

#include "core/check.h"
#include "cpu/forward.h"
#include "fusedmoe/runtime.h"
#include "moe/experts_args.h"

namespace fusedmoe::cpu {
namespace {

class CpuExperts final : public ModularExperts {
 public:
  explicit CpuExperts(ForwardMode mode) : mode_(mode) {}

  std::string_view name() const override {
    return batched() ? "cpu_batched" : mode_.unfused ? "cpu_unfused" : "cpu";
  }
  ActivationFormat activation_format() const override { return mode_.format; }
  bool has_hooks() const override { return mode_.unfused; }
  WeightAndReduce weight_and_reduce() const override {
    return batched() ? WeightAndReduce::kDelegate : WeightAndReduce::kNoOp;
  }
  bool accepts(const PackedWeights& weights) const override {
    return dynamic_cast<const CpuPackedWeights*>(&weights) != nullptr;
  }

  int layout_version() const override { return kLayoutVersion; }
  Support supports(const MoeConfig& config) const override;
  WorkspacePlan plan(const ProblemSize& problem) const override;
  std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                      const PackProgress& progress) const override;
  ExpertWeights unpack(const PackedWeights& packed, std::int64_t expert) const override;
  void repack(const ExpertWeights& weights, std::int64_t expert,
              PackedWeights& packed) const override;
  void apply(const ExpertsArgs& args) const override;

 private:
  bool batched() const { return mode_.format == ActivationFormat::kBatchedExperts; }

  ForwardMode mode_;
};

/// One of the named schemes, with any scale rule.
bool is_named(QuantScheme scheme) {
  for (const NamedScheme& named : named_schemes()) {
    if (scheme.activations && named.scheme.activations) {
      scheme.activations->scale_rule = named.scheme.activations->scale_rule;
    }
    if (scheme == named.scheme) return true;
  }
  return false;
}

Support CpuExperts::supports(const MoeConfig& config) const {
  const std::int64_t widest = std::max(config.hidden, config.intermediate);
  if (config.scheme.weights.value == DType::kI8 && widest > kMaxInt8Size) {
    return Support::no(
        Reason::kShape,
        core::format("size {}: int32 accumulators of int8 hold up to {}", widest, kMaxInt8Size));
  }
  if (config.device.is_cpu() && config.scheme.weights.value == DType::kF16) {
    return Support::no(Reason::kQuantScheme,
                       "f16 weights: not yet in the fast CPU kernels; ask for `reference` by name");
  }
  return core::supports_on_cpu(config, mode_.format,
                               is_named(config.scheme) && has_codes(config.scheme.weights),
                               "every named scheme");
}

WorkspacePlan CpuExperts::plan(const ProblemSize& problem) const {
  const WorkspaceLayout layout(problem, mode_);
  WorkspacePlan plan;
  plan.workspace13_bytes = layout.bytes13;
  plan.workspace2_bytes = layout.bytes2;
  plan.output_shape = batched()
                          ? Shape{problem.num_local_experts, problem.num_tokens, problem.hidden}
                          : Shape{problem.num_tokens, problem.hidden};
  plan.output_dtype = problem.dtype;
  return plan;
}

std::shared_ptr<PackedWeights> CpuExperts::pack(const ExpertWeights& weights,
                                                const PackProgress& progress) const {
  return std::make_shared<CpuPackedWeights>(core::make_packed_info(*this, weights), weights,
                                            progress);
}

ExpertWeights CpuExperts::unpack(const PackedWeights& packed, std::int64_t expert) const {
  core::check_expert(*this, packed, expert);
  return static_cast<const CpuPackedWeights&>(packed).unpack(expert);
}

void CpuExperts::repack(const ExpertWeights& weights, std::int64_t expert,
                        PackedWeights& packed) const {
  core::check_expert(*this, packed, expert);
  core::check_replacement(weights, packed.info());
  ExpertWeights first = weights;
  first.experts.resize(1);
  // Packed apart first: what cannot be packed must not leave an expert half replaced.
  const CpuPackedWeights one(core::make_packed_info(*this, first), first, {});
  static_cast<CpuPackedWeights&>(packed).replace(expert, one);
}

void CpuExperts::apply(const ExpertsArgs& args) const {
  Forward(*this, mode_, args).run();
}

}  // namespace

std::shared_ptr<const ModularExperts> make_experts(ActivationFormat format) {
  return std::make_shared<CpuExperts>(ForwardMode{format, false, num_threads()});
}

std::shared_ptr<const ModularExperts> make_unfused_experts() {
  return std::make_shared<CpuExperts>(
      ForwardMode{ActivationFormat::kStandard, true, num_threads()});
}

}  // namespace fusedmoe::cpu
