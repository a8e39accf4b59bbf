// The CPU experts: standard, with injection points, and batched.
#include "cpu/experts.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "cpu/backend.h"
#include "cpu/forward.h"
#include "cpu/pack.h"
#include "fusedmoe/runtime.h"
#include "moe/experts_args.h"
#include "moe/routed_experts.h"

namespace fusedmoe::cpu {
namespace {

class CpuExperts final : public core::RoutedExperts {
 public:
  CpuExperts(const ExpertsDescriptor& descriptor, const MoeConfig& config, const Context& context)
      : RoutedExperts(descriptor, config, context, backend()) {}

  bool accepts(const PackedWeights& weights) const override {
    return dynamic_cast<const CpuPackedWeights*>(&weights) &&
           core::matches(weights.info(), config());
  }
  std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                      const PackOptions& options) const override;
  std::shared_ptr<PackedWeights> from_parts(PackedWeights::Info info,
                                            const PackedParts& parts) const override {
    return std::make_shared<CpuPackedWeights>(std::move(info), parts, nodes());
  }
  WorkspaceSizes workspace_sizes(const ProblemSize& problem) const override;
  ExpertWeights unpack(const PackedWeights& packed, std::int64_t expert) const override;
  void repack(const ExpertWeights& weights, std::int64_t expert,
              PackedWeights& packed) const override;
  std::shared_ptr<PackedWeights> make_room(const PackedWeights& like) const override;

 private:
  void run_routed(const ForwardArgs& args) const override { Forward(*this, args).run(); }
  std::vector<core::NumaNode> nodes() const;
};

class CpuDescriptor final : public ExpertsDescriptor {
 public:
  std::string_view name() const override { return "cpu"; }
  Support supports(const MoeConfig& config) const override;
  std::string_view instruction_set() const override { return cpu_isa(); }
  bool reads_rows_by_address() const override { return true; }
  int layout_version() const override { return kLayoutVersion; }
  std::int64_t packed_bytes(const MoeConfig& config) const override {
    return cpu::packed_bytes(config);
  }
  std::shared_ptr<const Experts> create(const MoeConfig& config,
                                        const Context& context) const override {
    core::check_supported(*this, config);
    return std::make_shared<CpuExperts>(*this, config, context);
  }
};

/// One of the named schemes, with any scale rule; or one for gate and up, and one for down.
bool is_named(QuantScheme scheme) {
  if (scheme.down) {
    return is_named({scheme.weights, scheme.activations}) &&
           is_named({*scheme.down, scheme.activations});
  }
  for (const NamedScheme& named : named_schemes()) {
    if (scheme.activations && named.scheme.activations) {
      scheme.activations->scale_rule = named.scheme.activations->scale_rule;
      scheme.activations->full_range = named.scheme.activations->full_range;
    }
    if (scheme == named.scheme) return true;
  }
  return false;
}

Support CpuDescriptor::supports(const MoeConfig& config) const {
  const std::int64_t widest = std::max(config.hidden, config.intermediate);
  if (config.scheme.weights.value == DType::kI8 && widest > kMaxInt8Size) {
    return Support::no(
        Reason::kShape,
        core::format("size {}: int32 accumulators of int8 hold up to {}", widest, kMaxInt8Size));
  }
  Support support = core::supports_on_cpu(
      config,
      is_named(config.scheme) && has_codes(config.scheme.weights) &&
          has_codes(config.scheme.down_weights()) && has_rows(config.scheme.activations),
      "every named scheme");
  if (support) {
    constexpr const char* kElements[] = {"f32", "bf16", "s8", "s16"};  // of Compute
    const auto compute = static_cast<int>(compute_of(config.scheme, config.dtype));
    support.text = core::format("{} by {}", kElements[compute], cpu_isa());
  }
  return support;
}

WorkspaceSizes CpuExperts::workspace_sizes(const ProblemSize& problem) const {
  WorkspaceSizes sizes = core::output_sizes(config(), problem);
  if (problem.num_tokens == 0) return sizes;
  const WorkspaceLayout layout(problem, mode_of(*this));
  sizes.workspace13_bytes = layout.bytes13;
  sizes.workspace2_bytes = layout.bytes2;
  return sizes;
}

/// Over which packed weights are spread; none: they lie in one piece.
std::vector<core::NumaNode> CpuExperts::nodes() const {
  std::vector<core::NumaNode> nodes = core::usable_numa_nodes();
  const auto usable = std::count_if(nodes.begin(), nodes.end(),
                                    [](const core::NumaNode& node) { return !node.cpus.empty(); });
  // Fewer threads than nodes do not run on all of them.
  if (usable <= 1 || context().num_threads < usable) nodes.clear();
  return nodes;
}

std::shared_ptr<PackedWeights> CpuExperts::pack(const ExpertWeights& weights,
                                                const PackOptions& options) const {
  return std::make_shared<CpuPackedWeights>(core::make_packed_info(*this, weights, options),
                                            weights, options, nodes());
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
  const CpuPackedWeights one(core::info_of_one(packed.info()), first, {});
  packed.replace_expert(expert, one);
}

std::shared_ptr<PackedWeights> CpuExperts::make_room(const PackedWeights& like) const {
  const auto* of_cpu = dynamic_cast<const CpuPackedWeights*>(&like);
  FUSEDMOE_CHECK(of_cpu, "like", like.info().implementation, "packed by cpu");
  PackedWeights::Info info = like.info();
  info.num_experts = config().num_local_experts;
  info.read_only = false;
  return std::make_shared<CpuPackedWeights>(info, *of_cpu, nodes());
}

}  // namespace

const ExpertsDescriptor& descriptor() {
  static const CpuDescriptor descriptor;
  return descriptor;
}

}  // namespace fusedmoe::cpu
