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

void check_memory(const TensorView& view, const char* name, Device device) {
  FUSEDMOE_CHECK_FAULT(view.device() == device, kDevice, name,
                       core::format("on {}", to_string(view.device())),
                       core::format("on {}", to_string(device)));
  // Kernels on CUDA read and write rows of 16-bit elements 16 bytes at a time.
  const bool rows = !device.is_cpu() && bits(view.dtype()) == 16;
  const auto width =
      rows ? std::size_t{16} : static_cast<std::size_t>(std::max(bits(view.dtype()) / 8, 1));
  FUSEDMOE_CHECK_FAULT(aligned(view.data(), width), kAlignment, name,
                       core::format("at {}", view.data()),
                       core::format("aligned to {} bytes", width));
}

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

/// Routing arguments of a modular kernel; returns topk.
std::int64_t check_routing(const KernelArgs& args, std::int64_t num_tokens,
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
std::int64_t check_router(const KernelArgs& args, std::int64_t num_tokens,
                          std::int64_t num_experts) {
  const Device device = args.stream.device;
  FUSEDMOE_CHECK_FAULT(args.router, kNull, "router", "null", "given to a monolithic kernel");
  args.router->validate();
  FUSEDMOE_CHECK(args.router->num_experts == num_experts, "router.num_experts",
                 core::to_string(args.router->num_experts), core::format("{}", num_experts));
  FUSEDMOE_CHECK(!args.apply_router_weight_on_input && !args.router->apply_router_weight_on_input,
                 "apply_router_weight_on_input", "set", "unset for a monolithic kernel");
  FUSEDMOE_CHECK(!args.router->custom || device.is_cpu(), "router.custom",
                 core::format("set on {}", to_string(device)),
                 "unset: the callback of a custom routing runs on the cpu");
  check_buffer(args.router_logits, "router_logits", DType::kF32, {num_tokens, num_experts}, device);
  if (args.score_correction_bias) {
    check_buffer(args.score_correction_bias, "score_correction_bias", DType::kF32, {num_experts},
                 device);
  }
  return args.router->topk;
}

/// Global number of experts, from the argument, the map, or the local experts.
std::int64_t check_experts(const KernelArgs& args, const Experts& experts) {
  FUSEDMOE_CHECK_FAULT(args.weights, kNull, "weights", "null", "packed weights");
  const PackedWeights::Info& info = args.weights->info();
  FUSEDMOE_CHECK(experts.accepts(*args.weights), "weights",
                 core::format("packed by \"{}\"", info.implementation),
                 core::format("packed by \"{}\"", experts.name()));
  FUSEDMOE_CHECK_FAULT(args.stream.device == info.device, kDevice, "stream",
                       core::format("of {}", to_string(args.stream.device)),
                       core::format("of {}, where the packed weights are", to_string(info.device)));
  const std::int64_t num_experts = args.num_experts ? args.num_experts : info.num_experts;
  if (!args.expert_map) {
    FUSEDMOE_CHECK(
        num_experts == info.num_experts, "num_experts", core::to_string(num_experts),
        core::format("{}, the number of local experts, without an expert_map", info.num_experts));
    return num_experts;
  }
  FUSEDMOE_CHECK(num_experts >= info.num_experts, "num_experts", core::to_string(num_experts),
                 core::format("at least {}, the number of local experts", info.num_experts));
  check_buffer(args.expert_map, "expert_map", DType::kI32, {num_experts}, args.stream.device);
  return num_experts;
}

}  // namespace

void check_buffer(const TensorView& view, const char* name, DType dtype, const Shape& shape,
                  Device device) {
  core::check_tensor(view, name, dtype, shape);
  check_memory(view, name, device);
}

void check_activations(const TensorView& view, const char* name, Device device) {
  core::check_activation_dtype(view, name);
  check_buffer(view, name, view.dtype(), {-1, -1}, device);
}

void check_disjoint(NamedView written, std::initializer_list<NamedView> others) {
  for (const NamedView& other : others) {
    if (!written.view->defined() || !other.view->defined()) continue;
    FUSEDMOE_CHECK_FAULT(!core::overlap(*written.view, *other.view), kOverlap, written.name,
                         core::format("overlapping {}", other.name), "memory of its own");
  }
}

void check_output(const TensorView& output, const TensorView& hidden_states, bool inplace) {
  if (inplace && output.data() == hidden_states.data()) return;
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

ProblemSize check_kernel_args(const ModularKernel& kernel, const KernelArgs& args,
                              Workspace workspace) {
  const Device device = args.stream.device;
  const std::int64_t num_experts = check_experts(args, kernel.experts());
  const PackedWeights::Info& info = args.weights->info();

  FUSEDMOE_CHECK_SUPPORTED(!args.hooks || kernel.experts().has_hooks(), kHooks, "hooks",
                           core::format("given to {}", kernel.experts().name()),
                           "given to experts with injection points only");
  check_activations(args.hidden_states, "hidden_states", device);
  const std::int64_t num_tokens = args.hidden_states.size(0);
  FUSEDMOE_CHECK_FAULT(args.hidden_states.size(1) == info.hidden, kShape, "hidden_states",
                       core::describe(args.hidden_states),
                       core::format("of {} columns, the hidden size of the weights", info.hidden));
  FUSEDMOE_CHECK_FAULT(num_tokens <= std::numeric_limits<std::int32_t>::max(), kShape,
                       "hidden_states", core::format("{} tokens", num_tokens),
                       "fewer than 2^31 tokens");
  check_buffer(args.output, "output", args.hidden_states.dtype(), {num_tokens, info.hidden},
               device);

  const bool monolithic = kernel.experts().is_monolithic();
  const std::int64_t topk = monolithic ? check_router(args, num_tokens, num_experts)
                                       : check_routing(args, num_tokens, num_experts);
  const ProblemSize problem = ProblemSize::of(info, num_tokens, topk, args.hidden_states.dtype());

  const NamedView hidden_states{"hidden_states", &args.hidden_states};
  const NamedView expert_map{"expert_map", &args.expert_map};
  const NamedView output{"output", &args.output};
  const NamedView first = monolithic ? NamedView{"router_logits", &args.router_logits}
                                     : NamedView{"topk_ids", &args.topk_ids};
  const NamedView second = monolithic
                               ? NamedView{"score_correction_bias", &args.score_correction_bias}
                               : NamedView{"topk_weights", &args.topk_weights};
  check_output(args.output, args.hidden_states, args.inplace);
  check_disjoint(output, {first, second, expert_map});
  check_workspace(workspace, kernel.workspace_bytes(problem, args.apply_router_weight_on_input),
                  {output, hidden_states, first, second, expert_map});
  // Values last: they mean nothing in memory that another argument claims. On a device they cannot
  // be read without waiting for it.
  if (!device.is_cpu()) return problem;
  if (args.expert_map) check_expert_map(args.expert_map, info.num_experts);
  if (!monolithic) check_ids(args.topk_ids, num_experts);
  return problem;
}

}  // namespace fusedmoe::layer
