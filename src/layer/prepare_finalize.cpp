// The two PrepareAndFinalize that leave rows on their rank: "no_ep" (standard format) and
// "batched".
//
// Both weight and quantize the rows of the caller, once per token; "batched" then copies them to
// their experts. Both are stateless; what finalize must know of prepare lies in the workspace.
#include "fusedmoe/modular_kernel.h"

#include <utility>

#include "core/check.h"
#include "core/workspace.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "layer/backend.h"
#include "layer/checks.h"
#include "layer/prepared_rows.h"
#include "layer/rank_sums.h"
#include "layer/rank_transports.h"
#include "layer/step_name.h"

namespace fusedmoe {
namespace {

using layer::PreparedRows;

// What holds for both: rows stay on their rank.
Support supports_staying(const MoeConfig& config) {
  if (Support support = layer::supports_rows(config); !support) return support;
  const ParallelConfig& parallel = config.parallel;
  if (parallel.needs_dispatch()) {
    return Support::no(
        Reason::kParallelConfig,
        core::format("dp_size {}{}: ranks have different tokens, which must travel",
                     parallel.dp_size, parallel.sequence_parallel ? ", sequence parallel" : ""));
  }
  if (parallel.ep_size != 1 && !config.has_expert_map) {
    return Support::no(Reason::kParallelConfig,
                       core::format("ep_size {} without an expert map", parallel.ep_size));
  }
  if (parallel.num_ranks() > 1 && config.combine == CombineMode::kPerSlot) {
    return Support::no(Reason::kParallelConfig,
                       "per_slot: ranks with the same tokens add sums, not rows of slots");
  }
  if (parallel.num_ranks() > 1 && config.dispatch_dtype) {
    return Support::no(
        Reason::kParallelConfig,
        core::format("dispatch_dtype {}: rows do not travel", name(*config.dispatch_dtype)));
  }
  return Support::yes();
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

  TransportSizes sizes(const ProblemSize& caller, const Preparation& preparation) const override {
    core::WorkspaceCutter cutter(nullptr);
    const PreparedRows rows(cutter, caller, preparation, {});
    return {caller, caller, cutter.used()};
  }

 private:
  void do_start_prepare(ForwardArgs& args, const TransportSizes& sizes) const override {
    core::WorkspaceCutter cutter(args.prepare_workspace);
    PreparedRows(cutter, sizes.caller, args.preparation, args.stream.device).run(args);
  }

  void do_start_finalize(const ForwardArgs& args) const override {
    if (args.weight_and_reduce != WeightAndReduce::kNoOp) {
      layer::backend_of(args.stream.device).reduce(reduce_args(args), {});
    } else if (args.fused_output.data() != args.output.data()) {
      copy(args.fused_output, args.output, args.stream);
    }
  }
};

/// The same on ranks that have the same tokens, each with a part of every sum.
class NoEpSums final : public PrepareAndFinalize {
 public:
  NoEpSums(const PrepareFinalizeDescriptor& descriptor, const MoeConfig& config,
           const Context& context)
      : PrepareAndFinalize(descriptor),
        partial_dtype_(context.ranks.combine_dtype.value_or(config.dtype)),
        sums_(context.ranks.communicator),
        layer_(sums_.communicator()->next_layer()) {
    if (!config.device.is_cpu()) {
      version_ = Tensor::zeros({1}, DType::kI32, config.device);
      sums_.map_peers(config.hidden, static_cast<std::uint32_t>(layer_), version_,
                      context.ranks.lanes);
    }
    sums_.connect();
  }

  bool moves_rows() const override { return true; }
  TransportSizes sizes(const ProblemSize& caller, const Preparation& preparation) const override {
    TransportSizes sizes{caller, caller};
    sizes.experts.output_dtype = partial_dtype_;
    sizes.workspace_bytes = Step(nullptr, caller, preparation, *this, {}).cutter.used();
    return sizes;
  }
  void abandon(std::string_view reason) const noexcept override {
    sums_.communicator()->abort(reason);
  }
  void move_experts(const ExpertPlacement&, Stream stream) const override {
    ++moves_;
    if (!version_) return;
    const auto version = static_cast<std::int32_t>(moves_);
    copy(borrow(&version, DType::kI32, {1}), version_, stream);
  }
  std::uint64_t layer() const override { return layer_; }
  std::string rows_travel(const Preparation&) const override { return sums_.travel(); }

 private:
  struct Step final : TransportStep {
    core::WorkspaceCutter cutter;
    PreparedRows rows;
    layer::RankSums::Buffers sums;
    layer::StepName name;
    Step(void* workspace, const ProblemSize& problem, const Preparation& preparation,
         const NoEpSums& of, Device device)
        : cutter(workspace),
          rows(cutter, problem, preparation, device),
          sums(cutter, of.sums_, problem.num_tokens, problem.hidden, of.partial_dtype_, device) {}
  };

  void do_start_prepare(ForwardArgs& args, const TransportSizes& sizes) const override {
    auto step = std::make_shared<Step>(args.prepare_workspace, sizes.caller, args.preparation,
                                       *this, args.stream.device);
    step->name = {sums_.communicator()->next_step(), layer_, is_capturing(args.stream), moves_};
    step->rows.run(args);
    args.step = std::move(step);
  }
  void do_start_finalize(const ForwardArgs& args) const override {
    if (args.weight_and_reduce != WeightAndReduce::kNoOp) {
      throw Error::unsupported(Reason::kPairing, "experts",
                               core::format("ranks add their sums, but the experts leave \"{}\" to "
                                            "finalize",
                                            name(args.weight_and_reduce)));
    }
    if (!args.undivided) sums_.tell(args.fused_output, args.stream);
  }
  void do_finish_finalize(const ForwardArgs& args) const override {
    const auto& step = static_cast<const Step&>(*args.step);
    sums_.run(args.fused_output, args.output, args.accumulate, step.sums, args.stream,
              step.name.of("sum"), !args.undivided);
  }

  const DType partial_dtype_;
  layer::RankSums sums_;
  const std::uint64_t layer_;
  Tensor version_;                   // (1) i32 on a GPU: moves, as other ranks are told
  mutable std::uint64_t moves_ = 0;  // how often experts have moved
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
  PreparedRows rows;
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

  TransportSizes sizes(const ProblemSize& caller, const Preparation& preparation) const override {
    return {caller, caller, BatchedLayout(nullptr, caller, preparation, {}).cutter.used()};
  }

 private:
  void do_start_prepare(ForwardArgs& args, const TransportSizes& sizes) const override {
    const core::Backend& backend = layer::backend_of(args.stream.device);
    const BatchedLayout layout(args.prepare_workspace, sizes.caller, args.preparation,
                               args.stream.device);
    layout.rows.run(args);
    const TensorView rows = std::exchange(args.hidden_states, layout.values);
    args.expert_num_tokens = layout.assignment.expert_num_tokens;
    backend.assign_rows(args.topk_ids, args.expert_map, layout.assignment, args.stream);
    backend.copy_to_slots(layout.assignment.slot_rows, rows, layout.values, args.stream);
    if (layout.rows.scale_columns() == 0) return;
    const TensorView row_scales = std::exchange(args.hidden_scales, layout.scales);
    backend.copy_to_slots(layout.assignment.slot_rows, row_scales, layout.scales, args.stream);
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
  Support supports(const MoeConfig& config) const override { return supports_staying(config); }
  bool accepts(WeightAndReduce) const override { return true; }
  std::shared_ptr<const PrepareAndFinalize> create(const MoeConfig& config,
                                                   const Context& context) const override {
    if (!context.ranks.communicator || config.parallel.num_ranks() == 1) {
      return std::make_shared<NoEp>(*this);
    }
    layer::check_rank_options(*this, config, context);
    return std::make_shared<NoEpSums>(*this, config, context);
  }
};

class BatchedDescriptor final : public PrepareFinalizeDescriptor {
 public:
  std::string_view name() const override { return "batched"; }
  ActivationFormat activation_format() const override { return ActivationFormat::kBatchedExperts; }
  Support supports(const MoeConfig& config) const override { return supports_staying(config); }
  bool accepts(WeightAndReduce kind) const override { return kind == WeightAndReduce::kDelegate; }
  std::shared_ptr<const PrepareAndFinalize> create(const MoeConfig& config,
                                                   const Context& context) const override {
    if (context.ranks.communicator && config.parallel.num_ranks() > 1) {
      throw Error::unsupported(
          Reason::kParallelConfig, "ranks.communicator",
          "ranks.communicator cannot be used with batched: no_ep adds the sums "
          "of ranks");
    }
    return std::make_shared<Batched>(*this);
  }
};

}  // namespace

void PrepareAndFinalize::start_prepare(ForwardArgs& args) const {
  layer::check_prepare_args(descriptor_, args);
  const TransportSizes needed = sizes(core::callers_problem(args), args.preparation);
  FUSEDMOE_CHECK_FAULT(needed.workspace_bytes == 0 || args.prepare_workspace, kWorkspace,
                       "prepare_workspace", "null",
                       core::format("{} bytes", needed.workspace_bytes));
  do_start_prepare(args, needed);
}

void PrepareAndFinalize::start_finalize(const ForwardArgs& args) const {
  layer::check_finalize_args(*this, args);
  do_start_finalize(args);
}

Preparation make_preparation(const ExpertsDescriptor& experts, const QuantScheme& scheme,
                             bool apply_router_weight_on_input, std::optional<float> a1_scale) {
  Preparation preparation;
  preparation.apply_router_weight_on_input = apply_router_weight_on_input;
  preparation.by_address = experts.reads_rows_by_address();
  preparation.from_sources = experts.reads_row_sources();
  preparation.to_targets = experts.writes_row_targets();
  preparation.takes_quantized = scheme.activations && experts.takes_quantized_inputs(scheme);
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
