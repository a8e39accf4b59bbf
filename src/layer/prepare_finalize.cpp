// The two PrepareAndFinalize of one rank: "no_ep" (standard format) and "batched".
//
// Both weight and quantize the rows of the caller, once per token; "batched" then copies them to
// their experts. Both are stateless; what finalize must know of prepare lies in the workspace.
#include "fusedmoe/modular_kernel.h"

#include <limits>
#include <utility>

#include "core/check.h"
#include "core/workspace.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "layer/backend.h"
#include "moe/experts_args.h"

namespace fusedmoe {
namespace {

using layer::backend_of;

// What holds for every PrepareAndFinalize of one rank.
Support supports_one_rank(const MoeConfig& config) {
  if (const std::string problem = device_problem(config.device); !problem.empty()) {
    return Support::no(Reason::kDevice, core::format("{}: {}", to_string(config.device), problem));
  }
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
  if (parallel.dp_size != 1 || parallel.ep_size != 1) {
    return Support::no(Reason::kParallelConfig,
                       core::format("dp_size {}, ep_size {}: tokens stay on their rank",
                                    parallel.dp_size, parallel.ep_size));
  }
  if (config.apply_router_weight_on_input && config.topk != 1) {
    return Support::no(Reason::kRouterWeightOnInput,
                       core::format("topk {}: only for topk = 1", config.topk));
  }
  return Support::yes();
}

void check_preparation(const PrepareArgs& args) {
  const Device device = args.hidden_states.device();
  FUSEDMOE_CHECK_FAULT(args.stream.device == device, kDevice, "stream",
                       core::format("of {}", to_string(args.stream.device)),
                       core::format("of {}, as the hidden states", to_string(device)));
  if (args.preparation.apply_router_weight_on_input) {
    const std::int64_t topk = args.topk_ids.size(1);
    FUSEDMOE_CHECK(topk == 1, "apply_router_weight_on_input",
                   core::format("set with topk {}", topk), "set with topk = 1 only");
  }
  const std::optional<QuantKey>& key = args.preparation.quant;
  FUSEDMOE_CHECK_FAULT(!key || key->dynamic || args.preparation.scale, kNull, "preparation.scale",
                       "none", "that of the static activations");
}

std::size_t workspace_bytes_of(DType dtype, const Shape& shape) {
  return static_cast<std::size_t>(bytes(dtype, shape.numel()));
}

// The caller's rows as they travel: weighted and quantized where that is asked for. The same views
// in the workspace when sizes are computed and when the work is done.
class Rows {
 public:
  Rows(core::WorkspaceCutter& cutter, const ProblemSize& problem, const Preparation& preparation,
       Device device)
      : preparation_(preparation), values_dtype_(problem.dtype) {
    const Shape shape{problem.num_tokens, problem.hidden};
    const auto take = [&](DType dtype, const Shape& extents) {
      void* data = cutter.take(workspace_bytes_of(dtype, extents));
      return data ? TensorView(data, dtype, extents, device) : TensorView();
    };
    if (preparation.apply_router_weight_on_input) weighted_ = take(problem.dtype, shape);
    values_shape_ = shape;
    if (!preparation.quant) return;
    const QuantizedShape quantized =
        quantized_shape(*preparation.quant, problem.num_tokens, problem.hidden);
    values_dtype_ = quantized.values_dtype;
    values_shape_ = quantized.values;
    scales_dtype_ = quantized.scales_dtype;
    scales_shape_ = quantized.scales;
    values_ = take(values_dtype_, values_shape_);
    scales_ = take(scales_dtype_, scales_shape_);
  }

  // Columns of the values, and of the scales where each row has its own (else 0).
  DType values_dtype() const { return values_dtype_; }
  DType scales_dtype() const { return scales_dtype_; }
  std::int64_t value_columns() const { return values_shape_[1]; }
  std::int64_t scale_columns() const {
    return preparation_.quant && preparation_.quant->group.rows == 1 ? scales_shape_[1] : 0;
  }

  Prepared run(const PrepareArgs& args) const {
    const core::Backend& backend = backend_of(args.stream.device);
    const bool any = args.hidden_states.size(0) > 0;
    Prepared prepared;
    prepared.hidden_states = args.hidden_states;
    if (preparation_.apply_router_weight_on_input) {
      if (any) backend.weight_rows(args.hidden_states, args.topk_weights, weighted_, args.stream);
      prepared.hidden_states = weighted_;
    }
    if (!preparation_.quant) return prepared;
    if (any) {
      backend.quantize(prepared.hidden_states, *preparation_.quant, preparation_.scale, values_,
                       scales_, args.stream);
    }
    prepared.hidden_states = values_;
    prepared.hidden_scales = scales_;
    return prepared;
  }

 private:
  const Preparation& preparation_;
  DType values_dtype_, scales_dtype_ = DType::kF32;
  Shape values_shape_, scales_shape_;
  TensorView weighted_, values_, scales_;
};

ProblemSize problem_of(const PrepareArgs& args) {
  ProblemSize problem;
  problem.num_tokens = args.hidden_states.size(0);
  problem.topk = args.topk_ids ? args.topk_ids.size(1) : 0;
  problem.num_local_experts = args.num_local_experts;
  problem.hidden = args.hidden_states.size(1);
  problem.dtype = args.hidden_states.dtype();
  return problem;
}

class NoEp final : public PrepareAndFinalize {
 public:
  std::string_view name() const override { return "no_ep"; }
  ActivationFormat activation_format() const override { return ActivationFormat::kStandard; }
  Support supports(const MoeConfig& config) const override { return supports_one_rank(config); }
  // Knows no other rank: with tensor parallelism a reduction must follow.
  bool output_is_reduced() const override { return false; }
  bool accepts(WeightAndReduce kind) const override {
    return kind != WeightAndReduce::kNaiveBatched;
  }

  std::size_t workspace_bytes(const ProblemSize& caller,
                              const Preparation& preparation) const override {
    core::WorkspaceCutter cutter(nullptr);
    const Rows rows(cutter, caller, preparation, {});
    return cutter.used();
  }

  Prepared prepare(const PrepareArgs& args) const override {
    check_preparation(args);
    core::WorkspaceCutter cutter(args.workspace);
    const Rows rows(cutter, problem_of(args), args.preparation, args.hidden_states.device());
    return rows.run(args);
  }

  void finalize(const FinalizeArgs& args) const override {
    FUSEDMOE_CHECK(accepts(args.weight_and_reduce), "weight_and_reduce",
                   std::string(fusedmoe::name(args.weight_and_reduce)),
                   "no_op, contiguous or delegate");
    const core::Backend& backend = backend_of(args.stream.device);
    if (args.weight_and_reduce != WeightAndReduce::kNoOp) {
      backend.reduce(args, {});
    } else if (args.fused_output.data() != args.output.data()) {
      backend.copy(args.fused_output, args.output, args.stream);
    }
  }
};

// The assignment, which finalize must know, first in the workspace.
core::RowAssignment cut_assignment(core::WorkspaceCutter& cutter, std::int64_t num_tokens,
                                   std::int64_t topk, std::int64_t num_local_experts,
                                   Device device) {
  const auto part = [&](const Shape& shape) {
    void* data = cutter.take(workspace_bytes_of(DType::kI32, shape));
    return data ? TensorView(data, DType::kI32, shape, device) : TensorView();
  };
  core::RowAssignment assignment;
  assignment.expert_num_tokens = part({num_local_experts});
  assignment.slot_rows = part({num_tokens, topk});
  return assignment;
}

// All that prepare needs: the assignment, the rows before and behind the dispatch.
struct BatchedLayout {
  core::WorkspaceCutter cutter;
  core::RowAssignment assignment;
  Rows rows;
  Shape values_shape, scales_shape;  // (num_local_experts, capacity, ...)
  void* values;
  void* scales;  // null unless each row has scales of its own

  BatchedLayout(void* workspace, const ProblemSize& problem, const Preparation& preparation,
                Device device)
      : cutter(workspace),
        assignment(cut_assignment(cutter, problem.num_tokens, problem.topk,
                                  problem.num_local_experts, device)),
        rows(cutter, problem, preparation, device),
        values_shape{problem.num_local_experts, problem.num_tokens, rows.value_columns()},
        scales_shape{problem.num_local_experts, problem.num_tokens, rows.scale_columns()} {
    values = cutter.take(workspace_bytes_of(rows.values_dtype(), values_shape));
    scales = cutter.take(workspace_bytes_of(rows.scales_dtype(), scales_shape));
  }
};

class Batched final : public PrepareAndFinalize {
 public:
  std::string_view name() const override { return "batched"; }
  ActivationFormat activation_format() const override { return ActivationFormat::kBatchedExperts; }
  Support supports(const MoeConfig& config) const override { return supports_one_rank(config); }
  // Knows no other rank: with tensor parallelism a reduction must follow.
  bool output_is_reduced() const override { return false; }
  bool accepts(WeightAndReduce kind) const override {
    return kind == WeightAndReduce::kNaiveBatched || kind == WeightAndReduce::kDelegate;
  }

  std::size_t workspace_bytes(const ProblemSize& caller,
                              const Preparation& preparation) const override {
    return BatchedLayout(nullptr, caller, preparation, {}).cutter.used();
  }

  Prepared prepare(const PrepareArgs& args) const override {
    check_preparation(args);
    check_row_count(args);
    const core::Backend& backend = backend_of(args.stream.device);
    const Device device = args.stream.device;
    const BatchedLayout layout(args.workspace, problem_of(args), args.preparation, device);
    Prepared prepared = layout.rows.run(args);
    const TensorView values(layout.values, layout.rows.values_dtype(), layout.values_shape, device);
    const TensorView rows = std::exchange(prepared.hidden_states, values);
    prepared.expert_num_tokens = layout.assignment.expert_num_tokens;
    backend.assign_rows(args.topk_ids, args.expert_map, layout.assignment, args.stream);
    backend.dispatch(layout.assignment.slot_rows, rows, values, args.stream);
    if (layout.rows.scale_columns() == 0) return prepared;
    const TensorView scales(layout.scales, layout.rows.scales_dtype(), layout.scales_shape, device);
    const TensorView row_scales = std::exchange(prepared.hidden_scales, scales);
    backend.dispatch(layout.assignment.slot_rows, row_scales, scales, args.stream);
    return prepared;
  }

  void finalize(const FinalizeArgs& args) const override {
    FUSEDMOE_CHECK(accepts(args.weight_and_reduce), "weight_and_reduce",
                   std::string(fusedmoe::name(args.weight_and_reduce)),
                   "naive_batched or delegate");
    core::WorkspaceCutter cutter(args.workspace);
    const core::RowAssignment assignment =
        cut_assignment(cutter, args.topk_ids.size(0), args.topk_ids.size(1), args.num_local_experts,
                       args.stream.device);
    backend_of(args.stream.device).reduce(args, assignment.slot_rows);
  }

 private:
  // Rows are numbered in 32 bits, across experts.
  static void check_row_count(const PrepareArgs& args) {
    constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();
    const std::int64_t num_tokens = args.hidden_states.size(0);
    FUSEDMOE_CHECK_FAULT(
        num_tokens * args.num_local_experts <= kMaxRows, kShape, "hidden_states",
        core::format("{} rows for each of {} experts", num_tokens, args.num_local_experts),
        core::format("at most {} rows of all experts", kMaxRows));
  }
};

}  // namespace

Preparation make_preparation(const Experts& experts, const QuantScheme& scheme,
                             bool apply_router_weight_on_input, std::optional<float> a1_scale) {
  Preparation preparation;
  preparation.apply_router_weight_on_input = apply_router_weight_on_input;
  if (scheme.activations && !experts.expects_unquantized_inputs(scheme)) {
    preparation.quant = scheme.activations;
    preparation.scale = a1_scale;
  }
  return preparation;
}

std::shared_ptr<const PrepareAndFinalize> make_no_ep() {
  return std::make_shared<NoEp>();
}

std::shared_ptr<const PrepareAndFinalize> make_batched() {
  return std::make_shared<Batched>();
}

}  // namespace fusedmoe
