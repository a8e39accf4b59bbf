// One forward of a PrepareAndFinalize and an Experts, part by part, in buffers of exactly the
// planned sizes; see cases.h.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "fusedmoe/error.h"
#include "fusedmoe/formats.h"
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

void run_modular(const Inputs& in, const PrepareAndFinalize& prepare_finalize,
                 const ModularExperts& experts, const PackedWeights& packed, bool weight_on_input,
                 const ExpertsHooks* hooks, const TensorView& output) {
  const ProblemSize caller = ProblemSize::of(packed.info(), in.topk_ids.size(0),
                                             in.topk_ids.size(1), in.hidden_states.dtype());
  const Preparation preparation =
      make_preparation(experts, caller.scheme, weight_on_input, packed.info().a1_scale);
  const auto workspace = exact_buffer(prepare_finalize.workspace_bytes(caller, preparation));
  const ExpertsBuffers buffers(experts.plan(prepare_finalize.problem_size(caller)));

  PrepareArgs prepare;
  prepare.hidden_states = in.hidden_states;
  prepare.topk_ids = in.topk_ids;
  prepare.topk_weights = in.topk_weights;
  prepare.expert_map = in.expert_map;
  prepare.num_local_experts = caller.num_local_experts;
  prepare.preparation = preparation;
  prepare.workspace = workspace.get();
  const Prepared prepared = prepare_finalize.prepare(prepare);

  ExpertsArgs args;
  args.weights = &packed;
  args.output = buffers.output;
  args.hidden_states = prepared.hidden_states;
  args.hidden_scales = prepared.hidden_scales;
  args.topk_ids = prepared.topk_ids ? prepared.topk_ids : in.topk_ids;
  args.topk_weights = prepared.topk_weights ? prepared.topk_weights : in.topk_weights;
  args.expert_map = in.expert_map;
  args.expert_num_tokens = prepared.expert_num_tokens;
  args.router_weight_on_input = weight_on_input;
  args.hooks = hooks;
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

void run_monolithic(const Inputs& in, const PrepareAndFinalize& prepare_finalize,
                    const MonolithicExperts& experts, const PackedWeights& packed,
                    const RouterConfig& router, const TensorView& output) {
  const ProblemSize problem =
      ProblemSize::of(packed.info(), in.topk_ids.size(0), router.topk, in.hidden_states.dtype());
  PrepareArgs prepare;
  prepare.hidden_states = in.hidden_states;
  prepare.preparation = make_preparation(experts, problem.scheme, false, packed.info().a1_scale);
  const auto workspace =
      exact_buffer(prepare_finalize.workspace_bytes(problem, prepare.preparation));
  prepare.workspace = workspace.get();
  const Prepared prepared = prepare_finalize.prepare(prepare);
  const ExpertsBuffers buffers(experts.plan(problem));
  const Tensor logits = exact_tensor({problem.num_tokens, router.num_experts}, DType::kF32);

  MonolithicArgs args;
  args.weights = &packed;
  args.output = output;
  args.hidden_states = prepared.hidden_states;
  args.hidden_scales = prepared.hidden_scales;
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
                   const Experts& experts, const PackedWeights& packed, DType dtype,
                   const ExpertsHooks* hooks) {
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
    run_monolithic(in, prepare_finalize, static_cast<const MonolithicExperts&>(experts), packed,
                   router, output);
  } else {
    run_modular(in, prepare_finalize, static_cast<const ModularExperts&>(experts), packed,
                problem.spec.weight_on_input, hooks, output);
  }
  in.check_unchanged(problem);
  return output;
}

}  // namespace fusedmoe::testing
