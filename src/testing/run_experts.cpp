// One forward of a PrepareAndFinalize and an Experts, part by part, in buffers of exactly the
// planned sizes; see cases.h.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "fusedmoe/error.h"
#include "fusedmoe/formats.h"
#include "fusedmoe/quantize.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::testing {
namespace {

/// Memory of exactly `bytes` bytes, 64-byte aligned, poisoned: all ones, NaN in every format.
std::shared_ptr<void> exact_buffer(std::size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, std::max<std::size_t>(bytes, 1)) != 0) throw std::bad_alloc();
  std::memset(memory, 0xff, bytes);
  return {memory, std::free};
}

Tensor exact_tensor(const Shape& shape, DType dtype) {
  auto memory = exact_buffer(static_cast<std::size_t>(bytes(dtype, shape.numel())));
  void* data = memory.get();
  return Tensor(TensorView(data, dtype, shape), std::move(memory));
}

Tensor exact_copy(const TensorView& view) {
  Tensor result = exact_tensor(view.shape(), view.dtype());
  std::memcpy(result.data(), view.data(), static_cast<std::size_t>(view.nbytes()));
  return result;
}

/// The problem's inputs, copied, and whether a run left them alone.
struct Inputs {
  Tensor hidden_states, topk_ids, topk_weights, expert_map;

  Inputs(const Problem& problem, DType dtype)
      : hidden_states(exact_tensor(problem.hidden_states.shape(), dtype)),
        topk_ids(exact_copy(problem.topk_ids)),
        topk_weights(exact_copy(problem.topk_weights)) {
    convert(problem.hidden_states, hidden_states);
    if (problem.expert_map) expert_map = exact_copy(problem.expert_map);
  }

  void check_unchanged(const Problem& problem) const {
    const Inputs fresh(problem, hidden_states.dtype());
    const auto check = [](const TensorView& now, const TensorView& before, const char* argument) {
      if (!bitwise_equal(now, before)) throw Error(argument, "modified", "left as it is");
    };
    check(hidden_states, fresh.hidden_states, "hidden_states");
    check(topk_ids, fresh.topk_ids, "topk_ids");
    check(topk_weights, fresh.topk_weights, "topk_weights");
    if (expert_map) check(expert_map, fresh.expert_map, "expert_map");
  }
};

/// workspace13 and the experts' output share memory, as in ModularKernel.
struct ExpertsBuffers {
  std::shared_ptr<void> common, workspace2;
  TensorView output;

  explicit ExpertsBuffers(const WorkspacePlan& plan)
      : common(exact_buffer(plan.common_bytes())),
        workspace2(exact_buffer(plan.workspace2_bytes)),
        output(common.get(), plan.output_dtype, plan.output_shape) {}
};

/// What prepare returned, quantized here where the experts expect that and prepare has not done it.
struct QuantizedInputs {
  TensorView hidden_states, hidden_scales;
  std::shared_ptr<const void> values_owner, scales_owner;
};

QuantizedInputs quantized_inputs(const Prepared& prepared, const Experts& experts,
                                 const PackedWeights::Info& info) {
  QuantizedInputs result{prepared.hidden_states, prepared.hidden_scales, {}, {}};
  const std::optional<QuantKey>& key = info.scheme.activations;
  if (!key || experts.expects_unquantized_inputs(info.scheme) || prepared.hidden_scales) {
    return result;
  }
  // Rows of an expert behind expert_num_tokens hold anything; a scale of the tensor is of the real
  // ones, which a copy with zeros in the others has too.
  TensorView x = prepared.hidden_states;
  const Shape shape = x.shape();
  const std::int64_t hidden = shape[shape.rank() - 1],
                     rows = x.numel() / std::max<std::int64_t>(hidden, 1);
  const Tensor copy = exact_copy(x);
  if (prepared.expert_num_tokens) {
    const std::int64_t capacity = shape[1];
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto real = prepared.expert_num_tokens.as<const std::int32_t>()[row / capacity];
      if (row % capacity < real) continue;
      const std::int64_t row_bytes = bytes(x.dtype(), hidden);
      std::memset(copy.as<char>() + row * row_bytes, 0, static_cast<std::size_t>(row_bytes));
    }
  }
  const QuantizedShape sizes = quantized_shape(*key, rows, hidden);
  const Tensor values = exact_tensor(sizes.values, sizes.values_dtype);
  const Tensor scales = exact_tensor(sizes.scales, sizes.scales_dtype);
  quantize(copy.reshape({rows, hidden}), *key, values, scales,
           key->dynamic ? std::nullopt : info.a1_scale);
  result.values_owner = values.owner();
  result.scales_owner = scales.owner();
  result.hidden_states = values.reshape(shape);
  result.hidden_scales = scales;
  if (key->group.rows == 1 && shape.rank() == 3) {
    result.hidden_scales = scales.reshape({shape[0], shape[1], sizes.scales[1]});
  }
  return result;
}

void run_modular(const Inputs& in, const PrepareAndFinalize& prepare_finalize,
                 const ModularExperts& experts, const PackedWeights& packed, bool weight_on_input,
                 const TensorView& output) {
  ProblemSize caller;
  caller.num_tokens = in.topk_ids.size(0);
  caller.topk = in.topk_ids.size(1);
  caller.num_local_experts = packed.info().num_experts;
  caller.hidden = packed.info().hidden;
  caller.intermediate = packed.info().intermediate;
  caller.dtype = in.hidden_states.dtype();
  caller.scheme = packed.info().scheme;
  const auto workspace = exact_buffer(prepare_finalize.workspace_bytes(caller, weight_on_input));
  const ExpertsBuffers buffers(experts.plan(prepare_finalize.problem_size(caller)));

  PrepareArgs prepare;
  prepare.hidden_states = in.hidden_states;
  prepare.topk_ids = in.topk_ids;
  prepare.topk_weights = in.topk_weights;
  prepare.expert_map = in.expert_map;
  prepare.num_local_experts = caller.num_local_experts;
  prepare.apply_router_weight_on_input = weight_on_input;
  prepare.workspace = workspace.get();
  const Prepared prepared = prepare_finalize.prepare(prepare);

  const QuantizedInputs inputs = quantized_inputs(prepared, experts, packed.info());

  ExpertsArgs args;
  args.weights = &packed;
  args.output = buffers.output;
  args.hidden_states = inputs.hidden_states;
  args.hidden_scales = inputs.hidden_scales;
  args.topk_ids = prepared.topk_ids ? prepared.topk_ids : in.topk_ids;
  args.topk_weights = prepared.topk_weights ? prepared.topk_weights : in.topk_weights;
  args.expert_map = in.expert_map;
  args.expert_num_tokens = prepared.expert_num_tokens;
  args.router_weight_on_input = weight_on_input;
  args.workspace13 = buffers.common.get();
  args.workspace2 = buffers.workspace2.get();
  experts.apply(args);

  FinalizeArgs finalize;
  finalize.output = output;
  finalize.fused_output = buffers.output;
  finalize.topk_ids = args.topk_ids;
  finalize.topk_weights = args.topk_weights;
  finalize.expert_map = in.expert_map;
  finalize.num_local_experts = caller.num_local_experts;
  finalize.router_weight_on_input = weight_on_input;
  finalize.weight_and_reduce = experts.weight_and_reduce();
  finalize.workspace = workspace.get();
  prepare_finalize.finalize(finalize);
}

void run_monolithic(const Inputs& in, const MonolithicExperts& experts, const PackedWeights& packed,
                    const RouterConfig& router, const TensorView& output) {
  ProblemSize problem;
  problem.num_tokens = in.topk_ids.size(0);
  problem.topk = router.topk;
  problem.num_local_experts = packed.info().num_experts;
  problem.hidden = packed.info().hidden;
  problem.intermediate = packed.info().intermediate;
  problem.dtype = in.hidden_states.dtype();
  problem.scheme = packed.info().scheme;
  const ExpertsBuffers buffers(experts.plan(problem));
  const Tensor logits = exact_tensor({problem.num_tokens, router.num_experts}, DType::kF32);

  MonolithicArgs args;
  args.weights = &packed;
  args.output = output;
  args.hidden_states = in.hidden_states;
  args.router_logits = logits;
  args.router = &router;
  args.expert_map = in.expert_map;
  args.workspace13 = buffers.common.get();
  args.workspace2 = buffers.workspace2.get();
  experts.apply(args);
}

}  // namespace

void poison(const TensorView& view) {
  const bool floating = view.dtype() == DType::kF64 || view.dtype() == DType::kF32 ||
                        view.dtype() == DType::kF16 || view.dtype() == DType::kBF16;
  std::memset(view.data(), floating ? 0xff : 0x7f, static_cast<std::size_t>(view.nbytes()));
}

Tensor run_experts(const Problem& problem, const PrepareAndFinalize& prepare_finalize,
                   const Experts& experts, const PackedWeights& packed, DType dtype) {
  const Inputs in(problem, dtype);
  Tensor output = exact_tensor(problem.hidden_states.shape(), dtype);
  if (experts.is_monolithic()) {
    RouterConfig router;
    router.num_experts = problem.spec.num_experts;
    router.topk = problem.spec.topk;
    router.apply_router_weight_on_input = problem.spec.weight_on_input;
    router.custom = [&](const TensorView&, const TensorView& ids, const TensorView& weights) {
      std::memcpy(ids.data(), in.topk_ids.data(), static_cast<std::size_t>(ids.nbytes()));
      std::memcpy(weights.data(), in.topk_weights.data(),
                  static_cast<std::size_t>(weights.nbytes()));
    };
    run_monolithic(in, static_cast<const MonolithicExperts&>(experts), packed, router, output);
  } else {
    run_modular(in, prepare_finalize, static_cast<const ModularExperts&>(experts), packed,
                problem.spec.weight_on_input, output);
  }
  in.check_unchanged(problem);
  return output;
}

}  // namespace fusedmoe::testing
