// The two PrepareAndFinalize of one rank: "no_ep" (standard format) and "batched".
//
// Neither quantizes: activations keep the dtype of the hidden states. Both are stateless; what
// finalize must know of prepare lies in the workspace.
#include "fusedmoe/prepare_finalize.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/experts_args.h"
#include "core/workspace.h"
#include "layer/element.h"
#include "layer/weight_and_reduce.h"

namespace fusedmoe {
namespace {

using layer::dispatch_element;
using layer::kParallelElements;
using layer::local_expert;

// What holds for every PrepareAndFinalize of one CPU rank.
Support supports_one_rank(const MoeConfig& config) {
  if (!config.device.is_cpu()) {
    return Support::no(Reason::kDevice,
                       fmt::format("{}: this build has no CUDA kernels", to_string(config.device)));
  }
  if (!core::is_activation_dtype(config.dtype)) {
    return Support::no(Reason::kDType,
                       fmt::format("{}: hidden states are f32, bf16 or f16", name(config.dtype)));
  }
  if (config.scheme.activations && config.scheme.activations->quantized()) {
    return Support::no(Reason::kQuantScheme,
                       fmt::format("{}: activations are not quantized", name(config.scheme)));
  }
  const ParallelConfig& parallel = config.parallel;
  if (parallel.dp_size != 1 || parallel.ep_size != 1) {
    return Support::no(Reason::kParallelConfig,
                       fmt::format("dp_size {}, ep_size {}: tokens stay on their rank",
                                   parallel.dp_size, parallel.ep_size));
  }
  if (config.apply_router_weight_on_input && config.topk != 1) {
    return Support::no(Reason::kRouterWeightOnInput,
                       fmt::format("topk {}: only for topk = 1", config.topk));
  }
  return Support::yes();
}

void check_weight_on_input(const PrepareArgs& args) {
  if (!args.apply_router_weight_on_input) return;
  const std::int64_t topk = args.topk_ids.size(1);
  FUSEDMOE_CHECK(topk == 1, "apply_router_weight_on_input", fmt::format("set with topk {}", topk),
                 "set with topk = 1 only");
}

// target = rnd(source * rnd(weight)) in the dtype of the hidden states.
template <typename Element>
void weight_row(const typename Element::Storage* source, float weight,
                typename Element::Storage* target, std::int64_t hidden) {
  const float rounded = Element::load(Element::store(weight));
  for (std::int64_t i = 0; i < hidden; ++i) {
    target[i] = Element::store(Element::load(source[i]) * rounded);
  }
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

  std::size_t workspace_bytes(const ProblemSize& caller, bool weight_on_input) const override {
    if (!weight_on_input) return 0;
    return core::round_up_workspace(static_cast<std::size_t>(
        bytes(caller.dtype, Shape{caller.num_tokens, caller.hidden}.numel())));
  }

  Prepared prepare(const PrepareArgs& args) const override {
    check_weight_on_input(args);
    Prepared prepared;
    prepared.hidden_states = args.hidden_states;
    if (!args.apply_router_weight_on_input) return prepared;
    const TensorView& x = args.hidden_states;
    prepared.hidden_states = TensorView(args.workspace, x.dtype(), x.shape(), x.device());
    dispatch_element(x.dtype(), [&](auto element) {
      weight_rows<decltype(element)>(args, prepared.hidden_states);
    });
    return prepared;
  }

  void finalize(const FinalizeArgs& args) const override {
    FUSEDMOE_CHECK(accepts(args.weight_and_reduce), "weight_and_reduce",
                   std::string(fusedmoe::name(args.weight_and_reduce)),
                   "no_op, contiguous or delegate");
    if (args.weight_and_reduce == WeightAndReduce::kNoOp) {
      layer::copy_reduced(args);
    } else {
      layer::reduce_contiguous(args);
    }
  }

 private:
  template <typename Element>
  static void weight_rows(const PrepareArgs& args, const TensorView& weighted) {
    using Storage = typename Element::Storage;
    const std::int64_t num_tokens = weighted.size(0), hidden = weighted.size(1);
    const auto* weights = args.topk_weights.as<const float>();
    const auto* source = args.hidden_states.as<const Storage>();
    auto* target = weighted.as<Storage>();
#pragma omp parallel for schedule(static) \
    num_threads(num_threads()) if (num_tokens * hidden >= kParallelElements)
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      weight_row<Element>(source + token * hidden, weights[token], target + token * hidden, hidden);
    }
  }
};

// What prepare leaves in the workspace: rows per expert, the row of each slot inside its expert
// (meaningless for slots without a local expert), and the dispatched hidden states.
struct BatchedLayout {
  std::int32_t* expert_num_tokens;  // (num_local_experts)
  std::int32_t* slot_rows;          // (num_tokens * topk)
  void* hidden_states;              // (num_local_experts, capacity, hidden)
  std::size_t bytes;

  BatchedLayout(void* workspace, const ProblemSize& problem) {
    core::WorkspaceCutter cutter(workspace);
    const auto part = [&](DType dtype, const Shape& shape) {
      return cutter.take(static_cast<std::size_t>(fusedmoe::bytes(dtype, shape.numel())));
    };
    expert_num_tokens =
        static_cast<std::int32_t*>(part(DType::kI32, Shape{problem.num_local_experts}));
    slot_rows =
        static_cast<std::int32_t*>(part(DType::kI32, Shape{problem.num_tokens, problem.topk}));
    hidden_states =
        part(problem.dtype, Shape{problem.num_local_experts, problem.num_tokens, problem.hidden});
    bytes = cutter.used();
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

  std::size_t workspace_bytes(const ProblemSize& caller, bool) const override {
    return BatchedLayout(nullptr, caller).bytes;
  }

  Prepared prepare(const PrepareArgs& args) const override {
    check_weight_on_input(args);
    const ProblemSize problem = problem_of(args.topk_ids, args.num_local_experts,
                                           args.hidden_states.size(1), args.hidden_states.dtype());
    const BatchedLayout layout(args.workspace, problem);
    assign_rows(args, layout);
    dispatch_element(problem.dtype, [&](auto element) {
      copy_rows<decltype(element)>(args, layout, problem.num_tokens);
    });

    const Device device = args.hidden_states.device();
    Prepared prepared;
    prepared.hidden_states =
        TensorView(layout.hidden_states, problem.dtype,
                   Shape{problem.num_local_experts, problem.num_tokens, problem.hidden}, device);
    prepared.expert_num_tokens =
        TensorView(layout.expert_num_tokens, DType::kI32, Shape{problem.num_local_experts}, device);
    return prepared;
  }

  void finalize(const FinalizeArgs& args) const override {
    FUSEDMOE_CHECK(accepts(args.weight_and_reduce), "weight_and_reduce",
                   std::string(fusedmoe::name(args.weight_and_reduce)),
                   "naive_batched or delegate");
    const BatchedLayout layout(
        args.workspace, problem_of(args.topk_ids, args.num_local_experts, args.output.size(1),
                                   args.output.dtype()));
    layer::reduce_batched(args, layout.slot_rows);
  }

 private:
  static ProblemSize problem_of(const TensorView& topk_ids, std::int64_t num_local_experts,
                                std::int64_t hidden, DType dtype) {
    ProblemSize problem;
    problem.num_tokens = topk_ids.size(0);
    problem.topk = topk_ids.size(1);
    problem.num_local_experts = num_local_experts;
    problem.hidden = hidden;
    problem.dtype = dtype;
    return problem;
  }

  /// Rows in ascending token order, so a row's place depends on earlier tokens only. Serial: it is
  /// a few operations per slot against a copy of `hidden` elements.
  static void assign_rows(const PrepareArgs& args, const BatchedLayout& layout) {
    const std::int64_t num_tokens = args.topk_ids.size(0), topk = args.topk_ids.size(1);
    const auto* ids = args.topk_ids.as<const std::int32_t>();
    std::fill_n(layout.expert_num_tokens, args.num_local_experts, 0);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      const std::int32_t* row = ids + token * topk;
      for (std::int64_t slot = 0; slot < topk; ++slot) {
        const std::int64_t local = local_expert(row[slot], args.expert_map, args.num_local_experts);
        if (local < 0) continue;
        FUSEDMOE_CHECK(std::find(row, row + slot, row[slot]) == row + slot, "topk_ids",
                       fmt::format("expert {} twice for token {}", row[slot], token),
                       "distinct within a token in the batched format");
        layout.slot_rows[token * topk + slot] = layout.expert_num_tokens[local]++;
      }
    }
  }

  template <typename Element>
  static void copy_rows(const PrepareArgs& args, const BatchedLayout& layout,
                        std::int64_t capacity) {
    using Storage = typename Element::Storage;
    const std::int64_t num_tokens = args.topk_ids.size(0), topk = args.topk_ids.size(1);
    const std::int64_t hidden = args.hidden_states.size(1);
    const auto* ids = args.topk_ids.as<const std::int32_t>();
    const auto* weights = args.topk_weights.as<const float>();
    const auto* source = args.hidden_states.as<const Storage>();
    auto* target = static_cast<Storage*>(layout.hidden_states);
#pragma omp parallel for schedule(static) \
    num_threads(num_threads()) if (num_tokens * topk * hidden >= kParallelElements)
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      for (std::int64_t flat = token * topk; flat < (token + 1) * topk; ++flat) {
        const std::int64_t local = local_expert(ids[flat], args.expert_map, args.num_local_experts);
        if (local < 0) continue;
        const Storage* from = source + token * hidden;
        Storage* to = target + (local * capacity + layout.slot_rows[flat]) * hidden;
        if (args.apply_router_weight_on_input) {
          weight_row<Element>(from, weights[flat], to, hidden);
        } else {
          std::memcpy(to, from, static_cast<std::size_t>(hidden) * sizeof(Storage));
        }
      }
    }
  }
};

}  // namespace

std::shared_ptr<const PrepareAndFinalize> make_no_ep() {
  return std::make_shared<NoEp>();
}

std::shared_ptr<const PrepareAndFinalize> make_batched() {
  return std::make_shared<Batched>();
}

}  // namespace fusedmoe
