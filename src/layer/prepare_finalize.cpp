// The two PrepareAndFinalize of one rank: "no_ep" (standard format) and "batched".
//
// Both weight and quantize the rows of the caller, once per token; "batched" then copies them to
// their experts. Both are stateless; what finalize must know of prepare lies in the workspace.
#include "fusedmoe/modular_kernel.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/workspace.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "layer/backend.h"
#include "layer/checks.h"
#include "moe/experts_args.h"

namespace fusedmoe {
namespace {

// What holds for every PrepareAndFinalize of one rank.
Support supports_one_rank(const MoeConfig& config) {
  if (!core::is_activation_dtype(config.dtype)) {
    return Support::no(Reason::kDType,
                       core::format("{}: hidden states are f32, bf16 or f16", name(config.dtype)));
  }
  if (config.batch_invariant && batch_dependent(config.scheme)) {
    return Support::no(
        Reason::kBatchInvariance,
        core::format("{}: one activation scale for all rows of a batch", name(config.scheme)));
  }
  const ParallelConfig& parallel = config.parallel;
  if (std::min({parallel.tp_size, parallel.dp_size, parallel.ep_size}) < 1 ||
      parallel.ep_rank < 0 || parallel.ep_rank >= parallel.ep_size) {
    return Support::no(
        Reason::kParallelConfig,
        core::format("tp_size {}, dp_size {}, ep_size {}, ep_rank {}: sizes are at least 1, the "
                     "rank is below ep_size",
                     parallel.tp_size, parallel.dp_size, parallel.ep_size, parallel.ep_rank));
  }
  // Other ranks' experts are left out by the map; their partial sums are for the caller to add.
  if (parallel.dp_size != 1 || (parallel.ep_size != 1 && !config.has_expert_map)) {
    return Support::no(Reason::kParallelConfig,
                       core::format("dp_size {}, ep_size {} without an expert map: tokens stay on "
                                    "their rank",
                                    parallel.dp_size, parallel.ep_size));
  }
  if (config.apply_router_weight_on_input && config.topk != 1) {
    return Support::no(Reason::kRouterWeightOnInput,
                       core::format("topk {}: only for topk = 1", config.topk));
  }
  return Support::yes();
}

// The caller's rows as they travel: weighted and quantized where that is asked for. The same views
// in the workspace when sizes are computed and when the work is done.
class Rows {
 public:
  Rows(core::WorkspaceCutter& cutter, const ProblemSize& problem, const Preparation& preparation,
       Device device)
      : preparation_(preparation), values_dtype_(problem.dtype) {
    const Shape shape{problem.num_tokens, problem.hidden};
    if (preparation.apply_router_weight_on_input) {
      weighted_ = cutter.take(problem.dtype, shape, device);
    }
    values_shape_ = shape;
    if (!preparation.quant) return;
    const QuantizedShape quantized =
        quantized_shape(*preparation.quant, problem.num_tokens, problem.hidden);
    values_dtype_ = quantized.values_dtype;
    values_shape_ = quantized.values;
    scales_dtype_ = quantized.scales_dtype;
    scales_shape_ = quantized.scales;
    values_ = cutter.take(values_dtype_, values_shape_, device);
    scales_ = cutter.take(scales_dtype_, scales_shape_, device);
  }

  // Columns of the values, and of the scales where each row has its own (else 0).
  DType values_dtype() const { return values_dtype_; }
  DType scales_dtype() const { return scales_dtype_; }
  std::int64_t value_columns() const { return values_shape_[1]; }
  std::int64_t scale_columns() const {
    return preparation_.quant && preparation_.quant->group.rows == 1 ? scales_shape_[1] : 0;
  }

  /// Replaces the hidden states of `args` by what the experts read, and sets their scales.
  void run(ForwardArgs& args) const {
    const core::Backend& backend = layer::backend_of(args.stream.device);
    if (preparation_.apply_router_weight_on_input) {
      backend.weight_rows(args.hidden_states, args.topk_weights, weighted_, args.stream);
      args.hidden_states = weighted_;
    }
    if (!preparation_.quant) return;
    backend.quantize(args.hidden_states, *preparation_.quant, preparation_.scale, values_, scales_,
                     args.stream);
    args.hidden_states = values_;
    args.hidden_scales = scales_;
  }

 private:
  const Preparation& preparation_;
  DType values_dtype_, scales_dtype_ = DType::kF32;
  Shape values_shape_, scales_shape_;
  TensorView weighted_, values_, scales_;
};

ProblemSize problem_of(const ForwardArgs& args) {
  ProblemSize problem;
  problem.num_tokens = args.hidden_states.size(0);
  problem.topk = args.topk_ids ? args.topk_ids.size(1) : 0;
  problem.num_local_experts = args.weights->info().num_experts;
  problem.hidden = args.hidden_states.size(1);
  problem.dtype = args.hidden_states.dtype();
  return problem;
}

core::ReduceArgs reduce_args(const ForwardArgs& args) {
  core::ReduceArgs reduce;
  reduce.output = args.output;
  reduce.fused_output = args.fused_output;
  reduce.topk_ids = args.topk_ids;
  reduce.topk_weights = args.topk_weights;
  reduce.expert_map = args.expert_map;
  reduce.num_local_experts = args.weights->info().num_experts;
  reduce.router_weight_on_input = args.preparation.apply_router_weight_on_input;
  reduce.accumulate = args.accumulate;
  reduce.stream = args.stream;
  return reduce;
}

/// Standard format: experts that reduce by themselves have written `output`; other output is rows
/// of slots.
class NoEp final : public PrepareAndFinalize {
 public:
  using PrepareAndFinalize::PrepareAndFinalize;

  std::size_t workspace_bytes(const ProblemSize& caller,
                              const Preparation& preparation) const override {
    core::WorkspaceCutter cutter(nullptr);
    const Rows rows(cutter, caller, preparation, {});
    return cutter.used();
  }

 private:
  void do_start_prepare(ForwardArgs& args) const override {
    core::WorkspaceCutter cutter(args.prepare_workspace);
    const Rows rows(cutter, problem_of(args), args.preparation, args.hidden_states.device());
    rows.run(args);
  }

  void do_start_finalize(const ForwardArgs& args) const override {
    if (args.weight_and_reduce != WeightAndReduce::kNoOp) {
      layer::backend_of(args.stream.device).reduce(reduce_args(args), {});
    } else if (args.fused_output.data() != args.output.data()) {
      copy(args.fused_output, args.output, args.stream);
    }
  }
};

/// Where the batched format keeps its parts: first the assignment, which finalize must know.
core::RowAssignment cut_assignment(core::WorkspaceCutter& cutter, const ProblemSize& problem,
                                   Device device) {
  core::RowAssignment assignment;
  assignment.expert_num_tokens = cutter.take(DType::kI32, {problem.num_local_experts}, device);
  assignment.slot_rows = cutter.take(DType::kI32, {problem.num_tokens, problem.topk}, device);
  return assignment;
}

/// All that prepare needs: the assignment, the rows before and behind the dispatch.
struct BatchedLayout {
  core::WorkspaceCutter cutter;
  core::RowAssignment assignment;
  Rows rows;
  TensorView values, scales;  // (num_local_experts, capacity, ...)

  BatchedLayout(void* workspace, const ProblemSize& problem, const Preparation& preparation,
                Device device)
      : cutter(workspace),
        assignment(cut_assignment(cutter, problem, device)),
        rows(cutter, problem, preparation, device) {
    const auto take = [&](DType dtype, std::int64_t columns) {
      return cutter.take(dtype, {problem.num_local_experts, problem.num_tokens, columns}, device);
    };
    values = take(rows.values_dtype(), rows.value_columns());
    scales = take(rows.scales_dtype(), rows.scale_columns());
  }
};

class Batched final : public PrepareAndFinalize {
 public:
  using PrepareAndFinalize::PrepareAndFinalize;

  std::size_t workspace_bytes(const ProblemSize& caller,
                              const Preparation& preparation) const override {
    return BatchedLayout(nullptr, caller, preparation, {}).cutter.used();
  }

 private:
  void do_start_prepare(ForwardArgs& args) const override {
    const core::Backend& backend = layer::backend_of(args.stream.device);
    const Device device = args.stream.device;
    const BatchedLayout layout(args.prepare_workspace, problem_of(args), args.preparation, device);
    layout.rows.run(args);
    const TensorView rows = std::exchange(args.hidden_states, layout.values);
    args.expert_num_tokens = layout.assignment.expert_num_tokens;
    backend.assign_rows(args.topk_ids, args.expert_map, layout.assignment, args.stream);
    backend.dispatch(layout.assignment.slot_rows, rows, layout.values, args.stream);
    if (layout.rows.scale_columns() == 0) return;
    const TensorView row_scales = std::exchange(args.hidden_scales, layout.scales);
    backend.dispatch(layout.assignment.slot_rows, row_scales, layout.scales, args.stream);
  }

  void do_start_finalize(const ForwardArgs& args) const override {
    core::WorkspaceCutter cutter(args.prepare_workspace);
    ProblemSize problem;
    problem.num_tokens = args.topk_ids.size(0);
    problem.topk = args.topk_ids.size(1);
    problem.num_local_experts = args.weights->info().num_experts;
    const core::RowAssignment assignment = cut_assignment(cutter, problem, args.stream.device);
    layer::backend_of(args.stream.device).reduce(reduce_args(args), assignment.slot_rows);
  }
};

class NoEpDescriptor final : public PrepareFinalizeDescriptor {
 public:
  std::string_view name() const override { return "no_ep"; }
  ActivationFormat activation_format() const override { return ActivationFormat::kStandard; }
  Support supports(const MoeConfig& config) const override { return supports_one_rank(config); }
  bool accepts(WeightAndReduce kind) const override {
    return kind != WeightAndReduce::kNaiveBatched;
  }
  std::shared_ptr<const PrepareAndFinalize> create(const MoeConfig&,
                                                   const Context&) const override {
    return std::make_shared<NoEp>(*this);
  }
};

class BatchedDescriptor final : public PrepareFinalizeDescriptor {
 public:
  std::string_view name() const override { return "batched"; }
  ActivationFormat activation_format() const override { return ActivationFormat::kBatchedExperts; }
  Support supports(const MoeConfig& config) const override { return supports_one_rank(config); }
  bool accepts(WeightAndReduce kind) const override {
    return kind == WeightAndReduce::kNaiveBatched || kind == WeightAndReduce::kDelegate;
  }
  std::shared_ptr<const PrepareAndFinalize> create(const MoeConfig&,
                                                   const Context&) const override {
    return std::make_shared<Batched>(*this);
  }
};

}  // namespace

void PrepareAndFinalize::start_prepare(ForwardArgs& args) const {
  layer::check_prepare_args(descriptor_, args);
  const std::size_t needed = workspace_bytes(problem_of(args), args.preparation);
  FUSEDMOE_CHECK_FAULT(needed == 0 || args.prepare_workspace, kWorkspace, "prepare_workspace",
                       "null", core::format("{} bytes", needed));
  do_start_prepare(args);
}

void PrepareAndFinalize::start_finalize(const ForwardArgs& args) const {
  layer::check_finalize_args(descriptor_, args);
  do_start_finalize(args);
}

Preparation make_preparation(const ExpertsDescriptor& experts, const QuantScheme& scheme,
                             bool apply_router_weight_on_input, std::optional<float> a1_scale) {
  Preparation preparation;
  preparation.apply_router_weight_on_input = apply_router_weight_on_input;
  if (scheme.activations && !experts.expects_unquantized_inputs(scheme)) {
    preparation.quant = scheme.activations;
    preparation.scale = a1_scale;
  }
  return preparation;
}

const PrepareFinalizeDescriptor& no_ep() {
  static const NoEpDescriptor descriptor;
  return descriptor;
}

const PrepareFinalizeDescriptor& batched() {
  static const BatchedDescriptor descriptor;
  return descriptor;
}

}  // namespace fusedmoe
