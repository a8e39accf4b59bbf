#include "moe/check_args.h"

#include <algorithm>
#include <limits>

#include "core/ceil_div.h"
#include "core/check.h"
#include "moe/experts_args.h"
#include "moe/problem_size.h"

namespace fusedmoe::core {
namespace {

void check_counts(const ForwardArgs& args, const ProblemSize& problem, Device device) {
  check_buffer(args.expert_num_tokens, "expert_num_tokens", DType::kI32,
               {problem.num_local_experts}, device);
  if (!device.is_cpu()) return;  // would have to wait for the values
  for (std::int64_t e = 0; e < problem.num_local_experts; ++e) {
    const std::int32_t count = args.expert_num_tokens.as<const std::int32_t>()[e];
    FUSEDMOE_CHECK(count >= 0 && count <= problem.num_tokens, "expert_num_tokens",
                   core::format("{} for expert {}", count, e),
                   core::format("in [0, max_tokens = {}]", problem.num_tokens));
  }
}

/// On CUDA reading the value would have to wait: the kernels multiply by that of the weights.
void check_static_scale(const ForwardArgs& args) {
  const std::optional<float>& wanted = args.weights->info().a1_scale;
  if (!wanted || args.hidden_states.numel() == 0) return;
  const auto given = *args.hidden_scales.as<const float>();
  FUSEDMOE_CHECK(given == *wanted, "hidden_scales", core::format("{}", given),
                 core::format("{}, the static scale of the weights", *wanted));
}

void check_hidden_scales(const ForwardArgs& args, const QuantKey& key, std::int64_t hidden,
                         Device device) {
  const TensorView& x = args.hidden_states;
  const std::int64_t group = key.group.cols;
  Shape shape{1, 1};
  const bool of_ranks = key.dynamic && args.hidden_scales && args.hidden_scales.size(0) != 1;
  if (key.group.rows == 1 || of_ranks) {
    shape = x.shape();
    shape[x.rank() - 1] = group < 0 ? 1 : ceil_div(hidden, group);
  }
  check_buffer(args.hidden_scales, "hidden_scales", *key.scale, shape, device);
  if (!key.dynamic && device.is_cpu()) check_static_scale(args);
}

/// The hidden states as prepare hands them over, and the scales beside them.
void check_prepared_rows(const Experts& experts, const ForwardArgs& args) {
  const MoeConfig& config = experts.config();
  const QuantScheme& scheme = config.scheme;
  const TensorView& x = args.hidden_states;
  const ExpertsDescriptor& descriptor = experts.descriptor();
  const bool fused = !config.hooks && !experts.batched();
  const bool takes_codes =
      scheme.activations && args.hidden_scales && descriptor.takes_quantized_inputs(scheme);
  const bool quantized = (scheme.activations && !descriptor.expects_unquantized_inputs(scheme)) ||
                         (takes_codes && fused);
  const bool by_address = descriptor.reads_rows_by_address() && fused;
  if (args.row_addresses && !by_address) {
    throw Error::unsupported(Reason::kOperation, "row_addresses",
                             core::format("row_addresses are given to {}, which read rows from one "
                                          "place",
                                          descriptor.name()));
  }
  if (args.row_sources && !(descriptor.reads_row_sources() && fused)) {
    throw Error::unsupported(Reason::kOperation, "row_sources",
                             core::format("row_sources are given to {}, which read rows from one "
                                          "place",
                                          descriptor.name()));
  }
  if (args.row_sources && scheme.activations && !args.hidden_scales) {
    throw Error::unsupported(Reason::kOperation, "row_sources",
                             "row_sources of rows that are not quantized are given to experts that "
                             "quantize rows");
  }
  if (args.row_targets && args.accumulate) throw Error::conflict("row_targets", "accumulate");
  if (args.row_targets && (!descriptor.writes_row_targets() || experts.batched())) {
    throw Error::unsupported(Reason::kOperation, "row_targets",
                             core::format("row_targets are given to {}, which write rows to one "
                                          "place",
                                          descriptor.name()));
  }
  DType dtype = config.dtype;
  std::int64_t columns = config.hidden;
  if (quantized) {
    const QuantizedShape form = quantized_shape(*scheme.activations, 1, config.hidden);
    dtype = form.values_dtype;
    columns = form.values[1];
  }
  if (experts.batched()) {
    check_tensor(x, "hidden_states", dtype, {config.num_local_experts, -1, columns});
    check_place(x, "hidden_states", config.device, true);
  } else {
    check_row_buffer(x, "hidden_states", dtype, {-1, columns}, config.device);
  }
  if (quantized) {
    check_hidden_scales(args, *scheme.activations, config.hidden, config.device);
  } else {
    FUSEDMOE_CHECK(!args.hidden_scales, "hidden_scales", describe(args.hidden_scales),
                   "undefined: hidden_states are not quantized");
  }
}

/// The router of monolithic experts, and what it reads and adds to.
void check_router(const MoeConfig& config, const ForwardArgs& args, std::int64_t num_tokens) {
  FUSEDMOE_CHECK_FAULT(args.router, kNull, "router", "null", "given to monolithic experts");
  args.router->validate();
  const std::int64_t num_experts = config.num_experts;
  FUSEDMOE_CHECK(args.router->num_experts == num_experts, "router.num_experts",
                 core::to_string(args.router->num_experts), core::format("{}", num_experts));
  if (args.router->apply_router_weight_on_input) {
    throw Error::conflict("router.apply_router_weight_on_input", "monolithic experts");
  }
  if (args.router->num_zero_experts > 0) {
    throw Error::conflict("router.num_zero_experts", "monolithic experts");
  }
  check_custom_routing(*args.router, config.device);
  check_activation_dtype(args.router_logits, "router_logits");
  const DType logits = args.router_weights ? DType::kF32 : args.router_logits.dtype();
  check_buffer(args.router_logits, "router_logits", logits, {num_tokens, num_experts},
               config.device);
  const auto check_optional = [&](const TensorView& view, const char* argument, DType dtype,
                                  const Shape& shape) {
    if (!view) return;
    check_tensor(view, argument, dtype, shape);
    check_place(view, argument, config.device, false);
  };
  check_optional(args.score_correction_bias, "score_correction_bias", DType::kF32, {num_experts});
  check_optional(args.expert_load, "expert_load", DType::kI32, {num_experts});
  if (!args.router_weights) return;
  const auto& [weight, bias, correction_bias] = *args.router_weights;
  check_activation_dtype(weight, "router_weights.weight");
  check_optional(weight, "router_weights.weight", weight.dtype(), {num_experts, config.hidden});
  if (bias) check_activation_dtype(bias, "router_weights.bias");
  check_optional(bias, "router_weights.bias", bias.dtype(), {num_experts});
  check_optional(correction_bias, "router_weights.score_correction_bias", DType::kF32,
                 {num_experts});
}

}  // namespace

void check_place(const TensorView& view, const char* argument, Device device, bool rows) {
  if (!view) return;
  FUSEDMOE_CHECK_FAULT(view.device() == device, kDevice, argument,
                       core::format("on {}", to_string(view.device())),
                       core::format("on {}", to_string(device)));
  const bool wide = rows && !device.is_cpu();
  const auto element = static_cast<std::size_t>(std::max(bits(view.dtype()) / 8, 1));
  check_aligned(view.data(), argument, wide ? 16 : element);
  if (!wide || view.rank() < 2 || view.size(view.rank() - 2) < 2) return;
  const std::int64_t stride = view.stride(view.rank() - 2);
  FUSEDMOE_CHECK_FAULT(bytes(view.dtype(), stride) % 16 == 0, kLayout, argument,
                       core::format("rows with a stride of {} elements", stride),
                       "rows with a stride of a multiple of 16 bytes");
}

void check_buffer(const TensorView& view, const char* argument, DType dtype, const Shape& shape,
                  Device device) {
  check_tensor(view, argument, dtype, shape);
  check_place(view, argument, device, false);
  if (!device.is_cpu() && bits(dtype) == 16) check_aligned(view.data(), argument, 16);
}

void check_row_buffer(const TensorView& view, const char* argument, DType dtype, const Shape& shape,
                      Device device) {
  check_rows(view, argument, dtype, shape);
  check_place(view, argument, device, true);
}

namespace {

// The kernels go in steps of up to 2^15 rows.
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max() - (1 << 16);

}  // namespace

void check_num_tokens(const Experts& experts, std::int64_t num_tokens) {
  const MoeConfig& config = experts.config();
  const std::int64_t most = kMaxRows / (experts.batched() ? config.num_local_experts : config.topk);
  FUSEDMOE_CHECK(num_tokens >= 0 && num_tokens <= most, "num_tokens", core::to_string(num_tokens),
                 core::format("from 0 to {}", most));
}

void check_apart(const TensorView& written, const char* argument, const TensorView& other,
                 const char* other_argument) {
  if (!overlap(written, other)) return;
  throw Error::invalid(
      argument, format("{} overlaps {}: it needs memory of its own", argument, other_argument),
      Fault::kOverlap);
}

void check_custom_routing(const RouterConfig& router, Device device) {
  if (!router.custom || device.is_cpu()) return;
  throw Error::unsupported(
      Reason::kDevice, "router.custom",
      format("router.custom cannot be used on {}: its callback runs on the cpu",
             to_string(device)));
}

void check_row_count(std::int64_t num_tokens, std::int64_t rows_per_token) {
  FUSEDMOE_CHECK_FAULT(num_tokens <= kMaxRows / rows_per_token, kShape, "hidden_states",
                       core::format("{} tokens with {} rows each", num_tokens, rows_per_token),
                       core::format("at most {} rows of all experts", kMaxRows));
}

void check_instance_args(const Experts& experts, const ForwardArgs& args) {
  const std::string_view name = experts.descriptor().name();
  const MoeConfig& config = experts.config();
  FUSEDMOE_CHECK_FAULT(args.weights, kNull, "weights", "null", "packed weights");
  const PackedWeights::Info& info = args.weights->info();
  FUSEDMOE_CHECK(
      experts.accepts(*args.weights), "weights",
      core::format("packed by \"{}\": {} experts of {} x {}, {}", info.implementation,
                   info.num_experts, info.hidden, info.intermediate, fusedmoe::name(info.scheme)),
      core::format("packed by \"{}\" for the configuration that was selected", name));
  FUSEDMOE_CHECK_FAULT(args.stream.device == config.device, kDevice, "stream",
                       core::format("of {}", to_string(args.stream.device)),
                       core::format("of {}, the device of the experts", to_string(config.device)));
  if (args.hooks && !config.hooks) {
    throw Error::unsupported(
        Reason::kHooks, "hooks",
        core::format("hooks are given to {}, made for a configuration without hooks", name));
  }
  if (!args.expert_map) return;
  check_buffer(args.expert_map, "expert_map", DType::kI32, {config.num_experts}, config.device);
}

std::int64_t check_routing_args(const Experts& experts, const ForwardArgs& args,
                                std::int64_t num_tokens) {
  const MoeConfig& config = experts.config();
  FUSEDMOE_CHECK_FAULT(args.expert_map || config.num_experts == config.num_local_experts, kNull,
                       "expert_map", "undefined",
                       core::format("given: {} of {} experts are local", config.num_local_experts,
                                    config.num_experts));
  std::int64_t topk = -1;
  if (config.monolithic) {
    check_router(config, args, num_tokens);
    topk = args.router->topk;
  }
  check_buffer(args.topk_ids, "topk_ids", DType::kI32, {num_tokens, topk}, config.device);
  topk = args.topk_ids.size(1);
  FUSEDMOE_CHECK_FAULT(topk >= 1 && topk <= config.num_experts, kShape, "topk_ids",
                       core::format("{} experts per token", topk),
                       core::format("1 to {} (num_experts) columns", config.num_experts));
  check_buffer(args.topk_weights, "topk_weights", DType::kF32, {num_tokens, topk}, config.device);
  FUSEDMOE_CHECK(!config.apply_router_weight_on_input || topk == 1, "topk_ids",
                 core::format("{} experts per token", topk),
                 "1, as the router weight is applied on the input");
  check_row_count(num_tokens, experts.batched() ? config.num_local_experts : topk);
  return topk;
}

void check_distinct(std::span<const std::int32_t> ids, const LocalExperts& local_expert,
                    std::int64_t token) {
  for (auto id = ids.begin(); id != ids.end(); ++id) {
    const std::int32_t local = local_expert(*id);
    const auto same = [&](std::int32_t other) { return local_expert(other) == local; };
    if (local >= 0 && std::any_of(ids.begin(), id, same)) {
      throw Error::invalid(
          "topk_ids", core::format("topk_ids name expert {} twice for token {}: in the batched "
                                   "format the local experts of a token are distinct",
                                   *id, token));
    }
  }
}

void check_experts_args(const Experts& experts, const ForwardArgs& args) {
  const MoeConfig& config = experts.config();
  check_instance_args(experts, args);
  check_prepared_rows(experts, args);
  FUSEDMOE_CHECK_FAULT(args.fused_output.defined(), kNull, "fused_output", "undefined", "given");
  const ProblemSize problem = experts_problem(experts, args);
  if (experts.batched()) {
    check_row_count(problem.num_tokens, problem.num_local_experts);
    check_counts(args, problem, config.device);
  } else {
    check_routing_args(experts, args, problem.num_tokens);
  }
  const WorkspaceSizes sizes = experts.workspace_sizes(problem);
  FUSEDMOE_CHECK_FAULT(
      args.fused_output.dtype() == config.dtype || args.fused_output.dtype() == DType::kF32, kDType,
      "fused_output", describe(args.fused_output), core::format("{} or f32", name(config.dtype)));
  check_row_buffer(args.fused_output, "fused_output", sizes.output_dtype, sizes.output_shape,
                   config.device);
  FUSEDMOE_CHECK_FAULT(args.workspace13 || sizes.workspace13_bytes == 0, kWorkspace, "workspace13",
                       "null", core::format("of {} bytes", sizes.workspace13_bytes));
  FUSEDMOE_CHECK_FAULT(args.workspace2 || sizes.workspace2_bytes == 0, kWorkspace, "workspace2",
                       "null", core::format("of {} bytes", sizes.workspace2_bytes));
}

}  // namespace fusedmoe::core
