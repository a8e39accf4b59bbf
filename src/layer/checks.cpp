#include "layer/checks.h"

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <limits>

#include "core/check.h"
#include "moe/experts_args.h"

namespace fusedmoe::layer {
namespace {

bool aligned(const void* data, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(data) % alignment == 0;
}

/// Routing arguments of a modular kernel; returns topk.
std::int64_t check_routing(const ForwardArgs& args, std::int64_t num_tokens,
                           std::int64_t num_experts) {
  const Device device = args.stream.device;
  check_buffer(args.topk_ids, "topk_ids", DType::kI32, {num_tokens, -1}, device);
  const std::int64_t topk = args.topk_ids.size(1);
  FUSEDMOE_CHECK_FAULT(topk >= 1 && topk <= num_experts, kShape, "topk_ids",
                       core::format("{} experts per token", topk),
                       core::format("1 to {} (num_experts) columns", num_experts));
  check_buffer(args.topk_weights, "topk_weights", DType::kF32, {num_tokens, topk}, device);
  FUSEDMOE_CHECK(!args.apply_router_weight_on_input || topk == 1, "apply_router_weight_on_input",
                 core::format("set with topk {}", topk), "set with topk = 1 only");
  return topk;
}

/// Router arguments of a monolithic kernel; returns topk.
std::int64_t check_router(const MoeConfig& config, const ForwardArgs& args,
                          std::int64_t num_tokens) {
  const Device device = args.stream.device;
  const std::int64_t num_experts = config.num_experts;
  core::check_router_args(config, args, num_tokens);
  FUSEDMOE_CHECK(!args.apply_router_weight_on_input && !args.router->apply_router_weight_on_input,
                 "apply_router_weight_on_input", "set", "unset for a monolithic kernel");
  FUSEDMOE_CHECK_SUPPORTED(!args.router->custom || device.is_cpu(), kDevice, "router.custom",
                           core::format("set on {}", to_string(device)),
                           "unset: the callback of a custom routing runs on the cpu");
  check_buffer(args.router_logits, "router_logits", args.router_logits.dtype(),
               {num_tokens, num_experts}, device);
  if (args.score_correction_bias) {
    check_buffer(args.score_correction_bias, "score_correction_bias", DType::kF32, {num_experts},
                 device);
  }
  if (args.expert_load) {
    check_buffer(args.expert_load, "expert_load", DType::kI32, {num_experts}, device);
  }
  check_buffer(args.topk_ids, "topk_ids", DType::kI32, {num_tokens, args.router->topk}, device);
  check_buffer(args.topk_weights, "topk_weights", DType::kF32, args.topk_ids.shape(), device);
  const NamedView ids{"topk_ids", &args.topk_ids}, weights{"topk_weights", &args.topk_weights};
  const NamedView logits{"router_logits", &args.router_logits};
  const NamedView hidden_states{"hidden_states", &args.hidden_states};
  const NamedView output{"output", &args.output};
  check_disjoint(ids, {weights, logits, hidden_states, output});
  check_disjoint(weights, {logits, hidden_states, output});
  if (args.router_weights) check_disjoint(logits, {hidden_states, output});
  check_disjoint({"expert_load", &args.expert_load}, {ids, weights, logits, hidden_states, output});
  return args.router->topk;
}

/// Global number of experts, from the argument, the map, or the local experts.
std::int64_t check_experts(const ForwardArgs& args, const Experts& experts) {
  FUSEDMOE_CHECK_FAULT(args.weights, kNull, "weights", "null", "packed weights");
  const PackedWeights::Info& info = args.weights->info();
  FUSEDMOE_CHECK(experts.accepts(*args.weights), "weights",
                 core::format("packed by \"{}\": {} experts of {} x {}, {}", info.implementation,
                              info.num_experts, info.hidden, info.intermediate, name(info.scheme)),
                 core::format("packed by \"{}\" for the configuration that was selected",
                              experts.descriptor().name()));
  FUSEDMOE_CHECK_FAULT(args.stream.device == info.device, kDevice, "stream",
                       core::format("of {}", to_string(args.stream.device)),
                       core::format("of {}, where the packed weights are", to_string(info.device)));
  const MoeConfig& config = experts.config();
  const std::int64_t num_experts = args.num_experts ? args.num_experts : config.num_experts;
  FUSEDMOE_CHECK(num_experts == config.num_experts, "num_experts", core::to_string(num_experts),
                 core::format("{}, for which the experts were selected", config.num_experts));
  if (!args.expert_map) {
    FUSEDMOE_CHECK_FAULT(
        num_experts == info.num_experts, kNull, "expert_map", "undefined",
        core::format("given: {} of {} experts are local", info.num_experts, num_experts));
    return num_experts;
  }
  check_buffer(args.expert_map, "expert_map", DType::kI32, {num_experts}, args.stream.device);
  return num_experts;
}

/// Rows are numbered in 32 bits, across experts.
void check_row_count(std::int64_t num_tokens, std::int64_t num_local_experts) {
  constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();
  FUSEDMOE_CHECK_FAULT(
      num_tokens * num_local_experts <= kMaxRows, kShape, "hidden_states",
      core::format("{} rows for each of {} experts", num_tokens, num_local_experts),
      core::format("at most {} rows of all experts", kMaxRows));
}

}  // namespace

void check_ids(const TensorView& topk_ids, std::int64_t num_experts) {
  const auto* ids = topk_ids.as<const std::int32_t>();
  const std::int64_t topk = topk_ids.size(1), count = topk_ids.numel();
  const auto bad =
      std::find_if(ids, ids + count, [&](std::int32_t id) { return id < -1 || id >= num_experts; });
  if (bad == ids + count) return;
  const std::int64_t flat = bad - ids;
  throw Error("topk_ids", core::format("{} at [{}, {}]", *bad, flat / topk, flat % topk),
              core::format("-1 or in [0, {})", num_experts));
}

void check_expert_map(const TensorView& expert_map, std::int64_t num_local_experts) {
  const auto* map = expert_map.as<const std::int32_t>();
  const std::int64_t num_experts = expert_map.size(0);
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    FUSEDMOE_CHECK(map[expert] >= -1 && map[expert] < num_local_experts, "expert_map",
                   core::format("{} at [{}]", map[expert], expert),
                   core::format("-1 or in [0, {})", num_local_experts));
  }
  // Windows of a fixed size, because forward allocates nothing.
  constexpr std::int64_t kWindow = 4096;
  for (std::int64_t begin = 0; begin < num_local_experts; begin += kWindow) {
    std::bitset<kWindow> seen;
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      const std::int64_t local = map[expert] - begin;
      if (local < 0 || local >= kWindow || map[expert] < 0) continue;
      FUSEDMOE_CHECK(!seen[static_cast<std::size_t>(local)], "expert_map",
                     core::format("local expert {} again at [{}]", map[expert], expert),
                     "a map that names every local expert at most once");
      seen.set(static_cast<std::size_t>(local));
    }
  }
}

void check_buffer(const TensorView& view, const char* name, DType dtype, const Shape& shape,
                  Device device) {
  core::check_tensor(view, name, dtype, shape);
  core::check_place(view, name, device, false);
  // Kernels on CUDA read logits and rows of 16-bit elements 16 bytes at a time.
  if (!device.is_cpu() && bits(dtype) == 16) core::check_aligned(view.data(), name, 16);
}

void check_row_buffer(const TensorView& view, const char* name, DType dtype, const Shape& shape,
                      Device device) {
  core::check_rows(view, name, dtype, shape);
  core::check_place(view, name, device, true);
}

void check_disjoint(NamedView written, std::initializer_list<NamedView> others) {
  for (const NamedView& other : others) {
    if (!written.view->defined() || !other.view->defined()) continue;
    FUSEDMOE_CHECK_FAULT(!core::overlap(*written.view, *other.view), kOverlap, written.name,
                         core::format("overlapping {}", other.name), "memory of its own");
  }
}

void check_output(const TensorView& output, const TensorView& hidden_states, bool inplace) {
  if (inplace && output.data() == hidden_states.data() && output.dtype() == hidden_states.dtype() &&
      (output.size(0) < 2 || output.stride(0) == hidden_states.stride(0))) {
    return;
  }
  check_disjoint({"output", &output}, {{"hidden_states", &hidden_states}});
}

void check_workspace(Workspace workspace, std::size_t needed,
                     std::initializer_list<NamedView> tensors) {
  if (needed == 0) return;
  FUSEDMOE_CHECK_FAULT(workspace.data, kWorkspace, "workspace", "null",
                       core::format("{} bytes", needed));
  FUSEDMOE_CHECK_FAULT(workspace.bytes >= needed, kWorkspace, "workspace",
                       core::format("{} bytes", workspace.bytes),
                       core::format("at least {} bytes", needed));
  FUSEDMOE_CHECK_FAULT(aligned(workspace.data, 64), kAlignment, "workspace",
                       core::format("at {}", workspace.data), "64-byte aligned");
  const TensorView block(workspace.data, DType::kU8, {static_cast<std::int64_t>(needed)});
  for (const NamedView& tensor : tensors) check_disjoint({"workspace", &block}, {tensor});
}

void check_prepare_args(const PrepareFinalizeDescriptor& descriptor, const ForwardArgs& args) {
  FUSEDMOE_CHECK_FAULT(args.weights, kNull, "weights", "null", "packed weights");
  const Device device = args.stream.device;
  const TensorView& x = args.hidden_states;
  core::check_activation_dtype(x, "hidden_states");
  check_row_buffer(x, "hidden_states", x.dtype(), {-1, args.weights->info().hidden}, device);
  const std::optional<QuantKey>& key = args.preparation.quant;
  FUSEDMOE_CHECK_FAULT(!key || key->dynamic || args.preparation.scale, kNull, "preparation.scale",
                       "none", "that of the static activations");
  const bool batched = descriptor.activation_format() == ActivationFormat::kBatchedExperts;
  if (batched || args.preparation.apply_router_weight_on_input) {
    check_buffer(args.topk_ids, "topk_ids", DType::kI32, {x.size(0), -1}, device);
  }
  if (args.preparation.apply_router_weight_on_input) {
    const std::int64_t topk = args.topk_ids.size(1);
    FUSEDMOE_CHECK(topk == 1, "apply_router_weight_on_input",
                   core::format("set with topk {}", topk), "set with topk = 1 only");
    check_buffer(args.topk_weights, "topk_weights", DType::kF32, {x.size(0), 1}, device);
  }
  if (args.expert_map) check_buffer(args.expert_map, "expert_map", DType::kI32, {-1}, device);
  if (batched) check_row_count(x.size(0), args.weights->info().num_experts);
}

void check_finalize_args(const PrepareFinalizeDescriptor& descriptor, const ForwardArgs& args) {
  FUSEDMOE_CHECK_FAULT(args.weights, kNull, "weights", "null", "packed weights");
  const Device device = args.stream.device;
  const std::int64_t hidden = args.weights->info().hidden;
  core::check_activation_dtype(args.output, "output");
  check_row_buffer(args.output, "output", args.output.dtype(), {-1, hidden}, device);
  FUSEDMOE_CHECK_FAULT(args.fused_output.defined() && args.fused_output.device() == device, kDevice,
                       "fused_output", core::describe(args.fused_output),
                       core::format("on {}", to_string(device)));
  FUSEDMOE_CHECK(descriptor.accepts(args.weight_and_reduce), "weight_and_reduce",
                 std::string(name(args.weight_and_reduce)),
                 core::format("one that {} can finalize", descriptor.name()));
  if (args.weight_and_reduce == WeightAndReduce::kNoOp) {
    if (args.fused_output.data() == args.output.data()) return;
    check_buffer(args.output, "output", args.output.dtype(), args.output.shape(), device);
    return check_buffer(args.fused_output, "fused_output", args.output.dtype(), args.output.shape(),
                        device);
  }
  check_buffer(args.topk_ids, "topk_ids", DType::kI32, {args.output.size(0), -1}, device);
  check_buffer(args.topk_weights, "topk_weights", DType::kF32, args.topk_ids.shape(), device);
  const bool batched = descriptor.activation_format() == ActivationFormat::kBatchedExperts;
  const std::int64_t num_tokens = args.output.size(0);
  const Shape rows = batched ? Shape{args.weights->info().num_experts, num_tokens, hidden}
                             : Shape{args.topk_ids.numel(), hidden};
  const DType dtype = args.fused_output.dtype();
  core::check_activation_dtype(args.fused_output, "fused_output");
  FUSEDMOE_CHECK_FAULT(args.output.dtype() == dtype || args.output.dtype() == DType::kF32, kDType,
                       "output", core::describe(args.output),
                       core::format("f32, or {} as fused_output", name(dtype)));
  check_buffer(args.fused_output, "fused_output", dtype, rows, device);
  if (args.expert_map) check_buffer(args.expert_map, "expert_map", DType::kI32, {-1}, device);
  FUSEDMOE_CHECK_FAULT(!batched || num_tokens == 0 || args.prepare_workspace, kWorkspace,
                       "prepare_workspace", "null", "that of prepare");
}

ProblemSize check_forward_args(const ModularKernel& kernel, const ForwardArgs& args,
                               Workspace workspace) {
  const Device device = args.stream.device;
  const Experts& experts = kernel.experts();
  const MoeConfig& config = experts.config();
  const std::int64_t num_experts = check_experts(args, experts);
  FUSEDMOE_CHECK_SUPPORTED(!args.hooks || config.hooks, kHooks, "hooks",
                           core::format("given to {}", experts.descriptor().name()),
                           "given to experts of a configuration with hooks only");
  check_row_buffer(args.hidden_states, "hidden_states", config.dtype, {-1, config.hidden}, device);
  const std::int64_t num_tokens = args.hidden_states.size(0);
  FUSEDMOE_CHECK_FAULT(num_tokens <= std::numeric_limits<std::int32_t>::max(), kShape,
                       "hidden_states", core::format("{} tokens", num_tokens),
                       "fewer than 2^31 tokens");
  const bool widened = args.output && args.output.dtype() == DType::kF32;
  check_row_buffer(args.output, "output", widened ? DType::kF32 : config.dtype,
                   {num_tokens, config.hidden}, device);
  FUSEDMOE_CHECK(args.apply_router_weight_on_input == config.apply_router_weight_on_input,
                 "apply_router_weight_on_input",
                 args.apply_router_weight_on_input ? "set" : "not set",
                 "as in the configuration that was selected");

  ProblemSize problem = ProblemSize::of(config, num_tokens);
  problem.output_dtype = args.output.dtype();
  problem.expected_rows = args.expected_rows;
  problem.topk = config.monolithic ? check_router(config, args, num_tokens)
                                   : check_routing(args, num_tokens, num_experts);
  if (experts.batched()) check_row_count(num_tokens, config.num_local_experts);

  const NamedView hidden_states{"hidden_states", &args.hidden_states};
  const NamedView expert_map{"expert_map", &args.expert_map};
  const NamedView output{"output", &args.output};
  const NamedView ids{"topk_ids", &args.topk_ids}, weights{"topk_weights", &args.topk_weights};
  const NamedView logits{"router_logits", &args.router_logits};
  check_output(args.output, args.hidden_states, args.inplace);
  check_disjoint(output, {ids, weights, logits, expert_map});
  check_workspace(workspace, kernel.workspace_bytes(problem),
                  {output,
                   hidden_states,
                   ids,
                   weights,
                   logits,
                   expert_map,
                   {"score_correction_bias", &args.score_correction_bias},
                   {"expert_load", &args.expert_load}});
  // Values last: they mean nothing in memory that another argument claims. On a device they cannot
  // be read without waiting for it.
  if (!device.is_cpu()) return problem;
  if (args.expert_map) check_expert_map(args.expert_map, config.num_local_experts);
  if (!config.monolithic) check_ids(args.topk_ids, num_experts);
  return problem;
}

}  // namespace fusedmoe::layer
