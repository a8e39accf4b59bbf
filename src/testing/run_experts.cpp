// One forward of a PrepareAndFinalize and an Experts, part by part, in buffers of exactly the
// planned sizes; see cases.h.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace fusedmoe::testing {
namespace {

/// A buffer of exactly `bytes` bytes, poisoned: all ones, NaN in every format. On the host 64-byte
/// aligned, and no larger than it says, so that a sanitizer sees the first byte beyond.
Tensor exact_buffer(std::size_t bytes, Device device) {
  const Shape shape{static_cast<std::int64_t>(bytes)};
  if (!device.is_cpu()) {
    Tensor result = Tensor::empty(shape, DType::kU8, device);
    fill_bytes(result, 0xff, Stream{device});
    return result;
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, std::max<std::size_t>(bytes, 1)) != 0) throw std::bad_alloc();
  std::memset(memory, 0xff, bytes);
  return Tensor(TensorView(memory, DType::kU8, shape),
                std::shared_ptr<void>(memory, [](void* owned) { std::free(owned); }));
}

Tensor exact_tensor(const Shape& shape, DType dtype, Device device) {
  const Tensor buffer = exact_buffer(static_cast<std::size_t>(bytes(dtype, shape.numel())), device);
  return Tensor(TensorView(buffer.data(), dtype, shape, device), buffer.owner());
}

Tensor exact_copy(const TensorView& view, Device device) {
  Tensor result = exact_tensor(view.shape(), view.dtype(), device);
  copy(view, result, Stream{device});
  synchronize(Stream{device});
  return result;
}

/// The problem's inputs, copied to the device, and whether a run left them alone.
struct Inputs {
  Tensor hidden_states, topk_ids, topk_weights, expert_map;
  Stream stream;

  Inputs(const Problem& problem, DType dtype, Device device)
      : topk_ids(exact_copy(problem.topk_ids, device)),
        topk_weights(exact_copy(problem.topk_weights, device)),
        stream{device} {
    const Tensor rounded = Tensor::empty(problem.hidden_states.shape(), dtype);
    convert(problem.hidden_states, rounded);
    hidden_states = exact_copy(rounded, device);
    if (problem.expert_map) expert_map = exact_copy(problem.expert_map, device);
  }

  void check_unchanged(const Problem& problem) const {
    const Inputs fresh(problem, hidden_states.dtype(), {});
    const auto check = [](const Tensor& now, const Tensor& before, const char* argument) {
      if (!bitwise_equal(to_device(now, {}), before)) {
        throw Error(argument, "modified", "left as it is");
      }
    };
    check(hidden_states, fresh.hidden_states, "hidden_states");
    check(topk_ids, fresh.topk_ids, "topk_ids");
    check(topk_weights, fresh.topk_weights, "topk_weights");
    if (expert_map) check(expert_map, fresh.expert_map, "expert_map");
  }
};

/// workspace13 and the experts' output share memory, as in ModularKernel.
struct ExpertsBuffers {
  Tensor common, workspace2;
  TensorView output;

  ExpertsBuffers(const WorkspacePlan& plan, Device device)
      : common(exact_buffer(plan.common_bytes(), device)),
        workspace2(exact_buffer(plan.workspace2_bytes, device)),
        output(common.data(), plan.output_dtype, plan.output_shape, device) {}
};

void run_modular(const Inputs& in, const PrepareAndFinalize& prepare_finalize,
                 const ModularExperts& experts, const PackedWeights& packed, bool weight_on_input,
                 const ExpertsHooks* hooks, const TensorView& output) {
  const ProblemSize caller = ProblemSize::of(packed.info(), in.topk_ids.size(0),
                                             in.topk_ids.size(1), in.hidden_states.dtype());
  const Preparation preparation =
      make_preparation(experts, caller.scheme, weight_on_input, packed.info().a1_scale);
  const Device device = in.stream.device;
  const Tensor workspace =
      exact_buffer(prepare_finalize.workspace_bytes(caller, preparation), device);
  const ExpertsBuffers buffers(experts.plan(prepare_finalize.problem_size(caller)), device);

  PrepareArgs prepare;
  prepare.hidden_states = in.hidden_states;
  prepare.topk_ids = in.topk_ids;
  prepare.topk_weights = in.topk_weights;
  prepare.expert_map = in.expert_map;
  prepare.num_local_experts = caller.num_local_experts;
  prepare.preparation = preparation;
  prepare.workspace = workspace.data();
  prepare.stream = in.stream;
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
  args.workspace13 = buffers.common.data();
  args.workspace2 = buffers.workspace2.data();
  args.stream = in.stream;
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
  finalize.workspace = workspace.data();
  finalize.stream = in.stream;
  prepare_finalize.finalize(finalize);
}

/// Logits that make a router that takes the topk best ones as weights return the routing of the
/// problem, but for the order of a token's slots. It has no -1: such a slot becomes an expert that
/// the token did not choose, with weight 0.
Tensor make_logits(const Problem& problem) {
  const std::int64_t num_experts = problem.spec.num_experts, topk = problem.spec.topk;
  Tensor logits = Tensor::empty({problem.spec.num_tokens, num_experts}, DType::kF32);
  for (std::int64_t token = 0; token < problem.spec.num_tokens; ++token) {
    float* row = logits.as<float>() + token * num_experts;
    std::fill_n(row, num_experts, -1.0f);
    std::int64_t missing = topk;
    for (std::int64_t flat = token * topk; flat < (token + 1) * topk; ++flat) {
      const std::int32_t id = problem.topk_ids.as<const std::int32_t>()[flat];
      if (id < 0) continue;
      row[id] = problem.topk_weights.as<const float>()[flat];
      --missing;
    }
    for (std::int64_t expert = 0; expert < num_experts && missing > 0; ++expert) {
      if (row[expert] >= 0) continue;
      row[expert] = 0;
      --missing;
    }
  }
  return logits;
}

/// A router that returns the routing of the problem: on the CPU by a callback, exactly.
RouterConfig make_router(const Problem& problem, const Inputs& in) {
  RouterConfig router;
  router.num_experts = problem.spec.num_experts;
  router.topk = problem.spec.topk;
  router.apply_router_weight_on_input = problem.spec.weight_on_input;
  if (!in.stream.device.is_cpu()) {
    router.scoring = ScoringFunc::kLogits;
    return router;
  }
  router.custom = [&in](const TensorView&, const TensorView& ids, const TensorView& weights) {
    copy(in.topk_ids, ids, {});
    copy(in.topk_weights, weights, {});
  };
  return router;
}

void run_monolithic(const Problem& source, const Inputs& in,
                    const PrepareAndFinalize& prepare_finalize, const MonolithicExperts& experts,
                    const PackedWeights& packed, const TensorView& output) {
  const RouterConfig router = make_router(source, in);
  const Device device = in.stream.device;
  const ProblemSize problem =
      ProblemSize::of(packed.info(), in.topk_ids.size(0), router.topk, in.hidden_states.dtype());
  PrepareArgs prepare;
  prepare.hidden_states = in.hidden_states;
  prepare.preparation = make_preparation(experts, problem.scheme, false, packed.info().a1_scale);
  const Tensor workspace =
      exact_buffer(prepare_finalize.workspace_bytes(problem, prepare.preparation), device);
  prepare.workspace = workspace.data();
  prepare.stream = in.stream;
  const Prepared prepared = prepare_finalize.prepare(prepare);
  const ExpertsBuffers buffers(experts.plan(problem), device);
  const Tensor logits = exact_copy(make_logits(source), device);

  MonolithicArgs args;
  args.weights = &packed;
  args.output = output;
  args.hidden_states = prepared.hidden_states;
  args.hidden_scales = prepared.hidden_scales;
  args.router_logits = logits;
  args.router = &router;
  args.expert_map = in.expert_map;
  args.workspace13 = buffers.common.data();
  args.workspace2 = buffers.workspace2.data();
  args.stream = in.stream;
  experts.apply(args);
}

}  // namespace

void poison(const TensorView& view) {
  const bool floating = view.dtype() == DType::kF64 || view.dtype() == DType::kF32 ||
                        view.dtype() == DType::kF16 || view.dtype() == DType::kBF16;
  fill_bytes(view, floating ? 0xff : 0x7f, Stream{view.device()});
  synchronize(Stream{view.device()});
}

Tensor run_experts(const Problem& problem, const PrepareAndFinalize& prepare_finalize,
                   const Experts& experts, const PackedWeights& packed, DType dtype,
                   const ExpertsHooks* hooks) {
  const Device device = packed.info().device;
  const Inputs in(problem, dtype, device);
  const Tensor output = exact_tensor(problem.hidden_states.shape(), dtype, device);
  if (experts.is_monolithic()) {
    run_monolithic(problem, in, prepare_finalize, static_cast<const MonolithicExperts&>(experts),
                   packed, output);
  } else {
    run_modular(in, prepare_finalize, static_cast<const ModularExperts&>(experts), packed,
                problem.spec.weight_on_input, hooks, output);
  }
  synchronize(in.stream);
  in.check_unchanged(problem);
  return to_device(output, {});
}

}  // namespace fusedmoe::testing
