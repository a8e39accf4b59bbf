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

/// The steps of ModularKernel::apply, each in buffers of its own.
void run_steps(ForwardArgs args, const ModularKernel& kernel) {
  const Experts& experts = kernel.experts();
  const PrepareAndFinalize& prepare_finalize = kernel.prepare_finalize();
  const Device device = args.stream.device;
  const ProblemSize caller = ProblemSize::of(experts.config(), args.hidden_states.size(0));
  args.preparation = make_preparation(experts.descriptor(), caller.scheme,
                                      experts.config().apply_router_weight_on_input,
                                      args.weights->info().a1_scale);
  const TransportSizes transport = prepare_finalize.sizes(caller, args.preparation);
  const Tensor workspace = exact_buffer(transport.workspace_bytes, device);
  args.prepare_workspace = workspace.data();
  // workspace13 and the experts' output share memory, as in ModularKernel.
  const WorkspaceSizes sizes = experts.workspace_sizes(transport.experts);
  const Tensor common = exact_buffer(sizes.common_bytes(), device);
  const Tensor workspace2 = exact_buffer(sizes.workspace2_bytes, device);
  args.workspace13 = common.data();
  args.workspace2 = workspace2.data();
  args.fused_output = TensorView(common.data(), sizes.output_dtype, sizes.output_shape, device);
  args.weight_and_reduce =
      experts.descriptor().weight_and_reduce(experts.config().activation_format);
  prepare_finalize.start_prepare(args);
  prepare_finalize.finish_prepare(args);
  experts.apply(args);
  prepare_finalize.start_finalize(args);
  prepare_finalize.finish_finalize(args);
}

}  // namespace

void poison(const TensorView& view) {
  const bool floating = view.dtype() == DType::kF64 || view.dtype() == DType::kF32 ||
                        view.dtype() == DType::kF16 || view.dtype() == DType::kBF16;
  fill_bytes(view, floating ? 0xff : 0x7f, Stream{view.device()});
  synchronize(Stream{view.device()});
}

Tensor run_experts(const Problem& problem, const ModularKernel& kernel, const PackedWeights& packed,
                   const RunOptions& options) {
  const MoeConfig& config = kernel.experts().config();
  const Inputs in(problem, config.dtype, config.device);
  const Tensor output = exact_tensor(problem.hidden_states.shape(), config.dtype, config.device);
  ForwardArgs args;
  args.weights = &packed;
  args.hidden_states = in.hidden_states;
  args.output = output;
  args.expert_map = in.expert_map;
  args.hooks = options.hooks;
  args.kernel_config = options.kernel_config;
  args.stream = in.stream;
  RouterConfig router;
  Tensor logits, ids, weights;
  if (config.monolithic) {
    router = make_router(problem, in);
    logits = exact_copy(make_logits(problem), config.device);
    args.router_logits = logits;
    args.router = &router;
    ids = exact_tensor(problem.topk_ids.shape(), DType::kI32, config.device);
    weights = exact_tensor(problem.topk_weights.shape(), DType::kF32, config.device);
    args.topk_ids = ids;
    args.topk_weights = weights;
  } else {
    args.topk_ids = in.topk_ids;
    args.topk_weights = in.topk_weights;
  }
  run_steps(args, kernel);
  synchronize(in.stream);
  in.check_unchanged(problem);
  return to_device(output, {});
}

Tensor run_variant(const Problem& problem, const Variant& variant, DType dtype, Device device,
                   const RunOptions& options) {
  const ModularKernel kernel = variant.create(make_config(problem.spec, dtype, device), {});
  const auto packed = kernel.experts().pack(problem.weights);
  return run_experts(problem, kernel, *packed, options);
}

}  // namespace fusedmoe::testing
