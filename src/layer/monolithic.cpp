#include "layer/monolithic.h"

#include <string>

#include "core/check.h"
#include "core/workspace.h"
#include "fusedmoe/router.h"
#include "layer/backend.h"

namespace fusedmoe {
namespace {

/// workspace2: [ topk_ids | topk_weights | workspace2 of the modular experts ].
struct RoutedWorkspace {
  void* topk_ids;      // (num_tokens, topk) i32
  void* topk_weights;  // (num_tokens, topk) f32
  void* workspace2;
  std::size_t bytes;

  RoutedWorkspace(void* workspace, std::int64_t num_tokens, std::int64_t topk,
                  std::size_t inner_bytes) {
    core::WorkspaceCutter cutter(workspace);
    const Shape shape{num_tokens, topk};
    topk_ids = cutter.take(static_cast<std::size_t>(fusedmoe::bytes(DType::kI32, shape.numel())));
    topk_weights =
        cutter.take(static_cast<std::size_t>(fusedmoe::bytes(DType::kF32, shape.numel())));
    workspace2 = cutter.take(inner_bytes);
    bytes = cutter.used();
  }
};

class Monolithic final : public MonolithicExperts {
 public:
  explicit Monolithic(std::shared_ptr<const ModularExperts> experts)
      : experts_(std::move(experts)), name_(std::string(experts_->name()) + "_monolithic") {}

  std::string_view name() const override { return name_; }
  ActivationFormat activation_format() const override { return ActivationFormat::kStandard; }
  bool is_reference() const override { return experts_->is_reference(); }
  int layout_version() const override { return experts_->layout_version(); }
  WeightAndReduce weight_and_reduce() const override { return WeightAndReduce::kNoOp; }

  Support supports(const MoeConfig& config) const override {
    if (config.apply_router_weight_on_input) {
      return Support::no(Reason::kRouterWeightOnInput,
                         "the experts see logits: nobody weights the input");
    }
    if (config.routing_method == RoutingMethod::kUnspecified) {
      return Support::no(Reason::kRoutingMethod,
                         "unspecified: ids come from the caller, the experts see logits");
    }
    if (config.routing_method == RoutingMethod::kCustom && !config.device.is_cpu()) {
      return Support::no(Reason::kRoutingMethod, "custom: its callback runs on the cpu");
    }
    return experts_->supports(config);
  }

  bool expects_unquantized_inputs(const QuantScheme& scheme) const override {
    return experts_->expects_unquantized_inputs(scheme);
  }

  WorkspacePlan plan(const ProblemSize& problem) const override {
    WorkspacePlan plan = experts_->plan(problem);
    plan.workspace2_bytes =
        RoutedWorkspace(nullptr, problem.num_tokens, problem.topk, plan.workspace2_bytes).bytes;
    return plan;
  }

  std::vector<std::string> tile_plans(const ProblemSize& problem, Device device) const override {
    return experts_->tile_plans(problem, device);
  }

  std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                      const PackProgress& progress) const override {
    return experts_->pack(weights, progress);
  }
  bool accepts(const PackedWeights& weights) const override { return experts_->accepts(weights); }
  ExpertWeights unpack(const PackedWeights& packed, std::int64_t expert) const override {
    return experts_->unpack(packed, expert);
  }
  void repack(const ExpertWeights& weights, std::int64_t expert,
              PackedWeights& packed) const override {
    experts_->repack(weights, expert, packed);
  }

  void apply(const MonolithicArgs& args) const override {
    const RouterConfig& router = *args.router;
    FUSEDMOE_CHECK(!router.apply_router_weight_on_input, "router.apply_router_weight_on_input",
                   "true", "false for monolithic experts");
    const std::int64_t num_tokens = args.hidden_states.size(0);
    // The parts before the inner workspace do not depend on its size.
    const RoutedWorkspace workspace(args.workspace2, num_tokens, router.topk, 0);
    const Device device = args.hidden_states.device();
    const Shape shape{num_tokens, router.topk};
    const Routing routing{TensorView(workspace.topk_ids, DType::kI32, shape, device),
                          TensorView(workspace.topk_weights, DType::kF32, shape, device)};
    layer::backend_of(device).route(router, args.router_logits, args.score_correction_bias, routing,
                                    args.stream);

    ExpertsArgs experts;
    experts.weights = args.weights;
    experts.output = args.output;
    experts.hidden_states = args.hidden_states;
    experts.hidden_scales = args.hidden_scales;
    experts.topk_ids = routing.topk_ids;
    experts.topk_weights = routing.topk_weights;
    experts.expert_map = args.expert_map;
    experts.workspace13 = args.workspace13;
    experts.workspace2 = workspace.workspace2;
    experts.stream = args.stream;
    experts_->apply(experts);
  }

 private:
  std::shared_ptr<const ModularExperts> experts_;
  std::string name_;
};

}  // namespace

std::shared_ptr<const MonolithicExperts> make_monolithic(
    std::shared_ptr<const ModularExperts> experts) {
  FUSEDMOE_CHECK_FAULT(experts, kNull, "experts", "null", "modular experts");
  FUSEDMOE_CHECK(experts->activation_format() == ActivationFormat::kStandard &&
                     experts->weight_and_reduce() == WeightAndReduce::kNoOp,
                 "experts",
                 core::format("{}: {}, {}", experts->name(), name(experts->activation_format()),
                              name(experts->weight_and_reduce())),
                 "of standard format and no_op");
  return std::make_shared<Monolithic>(std::move(experts));
}

}  // namespace fusedmoe
