#include "layer/checks.h"

#include <bitset>
#include <cstdint>
#include <span>

#include "core/check.h"
#include "fusedmoe/runtime.h"
#include "moe/check_args.h"
#include "moe/local_experts.h"

namespace fusedmoe::layer {

using core::check_buffer;
using core::check_row_buffer;

namespace {

/// What monolithic experts write lies apart from what they read, and from each other.
void check_routing_results(const ForwardArgs& args) {
  const NamedView ids{"topk_ids", &args.topk_ids}, weights{"topk_weights", &args.topk_weights};
  const NamedView logits{"router_logits", &args.router_logits};
  const NamedView hidden_states{"hidden_states", &args.hidden_states};
  const NamedView output{"output", &args.output};
  check_disjoint(ids, {weights, logits, hidden_states, output});
  check_disjoint(weights, {logits, hidden_states, output});
  if (args.router_weights) check_disjoint(logits, {hidden_states, output});
  check_disjoint({"expert_load", &args.expert_load}, {ids, weights, logits, hidden_states, output});
}

/// Experts that reduce write the output themselves; others leave rows that finalize converts.
void check_written_dtype(const ModularKernel& kernel, const ForwardSizes& sizes) {
  if (kernel.prepare_finalize().moves_rows()) return;  // sums are converted on their way
  const Experts& experts = kernel.experts();
  const ExpertsDescriptor& descriptor = experts.descriptor();
  const DType written = sizes.experts.output_dtype, asked = sizes.transport.caller.output_dtype;
  const bool reduced =
      descriptor.weight_and_reduce(experts.config().activation_format) == WeightAndReduce::kNoOp;
  FUSEDMOE_CHECK_FAULT(written == asked || (!reduced && asked == DType::kF32), kDType, "output",
                       std::string(name(asked)),
                       core::format("{}, which {} write", name(written), descriptor.name()));
}

}  // namespace

void check_ids(const TensorView& topk_ids, std::int64_t num_choices, const MoeConfig& config,
               const TensorView& expert_map) {
  const std::int64_t num_tokens = topk_ids.size(0), topk = topk_ids.size(1);
  const core::LocalExperts local_expert(expert_map, config.num_local_experts);
  const bool distinct = config.activation_format == ActivationFormat::kBatchedExperts;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const std::span row(topk_ids.as<const std::int32_t>() + token * topk,
                        static_cast<std::size_t>(topk));
    for (const std::int32_t& id : row) {
      FUSEDMOE_CHECK(id >= -1 && id < num_choices, "topk_ids",
                     core::format("{} at [{}, {}]", id, token, &id - row.data()),
                     core::format("-1 or in [0, {})", num_choices));
    }
    if (distinct) core::check_distinct(row, local_expert, token);
  }
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
      if (seen[static_cast<std::size_t>(local)]) {
        throw Error::invalid("expert_map",
                             core::format("expert_map names local expert {} twice, again at [{}]",
                                          map[expert], expert));
      }
      seen.set(static_cast<std::size_t>(local));
    }
  }
}

bool has_fixed_sizes(const ModularKernel& kernel, bool asked, Stream stream) {
  return asked || (kernel.prepare_finalize().moves_rows() && is_capturing(stream));
}

void check_chosen(const Selection& selection) {
  if (selection) return;
  throw Error::invalid("selection", "the selection is empty: no implementation fits");
}

void check_disjoint(NamedView written, std::initializer_list<NamedView> others) {
  for (const NamedView& other : others) {
    if (!written.view->defined() || !other.view->defined()) continue;
    core::check_apart(*written.view, written.name, *other.view, other.name);
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
  core::check_aligned(workspace.data, "workspace", 64);
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
    if (topk != 1) {
      throw Error::conflict("apply_router_weight_on_input", core::format("topk {}", topk),
                            "one row cannot have several weights");
    }
    check_buffer(args.topk_weights, "topk_weights", DType::kF32, {x.size(0), 1}, device);
  }
  if (args.expert_map) check_buffer(args.expert_map, "expert_map", DType::kI32, {-1}, device);
  if (batched) core::check_row_count(x.size(0), args.weights->info().num_experts);
}

void check_finalize_args(const PrepareAndFinalize& instance, const ForwardArgs& args) {
  const PrepareFinalizeDescriptor& descriptor = instance.descriptor();
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
  if (instance.moves_rows()) {  // fused_output has the rows that have arrived
    FUSEDMOE_CHECK_FAULT(args.step, kNull, "step", "null", "that of prepare");
    return;
  }
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
  FUSEDMOE_CHECK_FAULT(!batched || args.prepare_workspace, kWorkspace, "prepare_workspace", "null",
                       "that of prepare");
}

ForwardSizes check_forward_args(const ModularKernel& kernel, const ForwardArgs& args,
                                Workspace workspace) {
  const Experts& experts = kernel.experts();
  const MoeConfig& config = experts.config();
  const Device device = config.device;
  core::check_instance_args(experts, args);
  FUSEDMOE_CHECK(args.num_experts == 0 || args.num_experts == config.num_experts, "num_experts",
                 core::to_string(args.num_experts),
                 core::format("{}, for which the experts were selected", config.num_experts));
  check_row_buffer(args.hidden_states, "hidden_states", config.dtype, {-1, config.hidden}, device);
  ProblemSize problem = ProblemSize::of(config, args.hidden_states.size(0));
  const bool widened = args.output && args.output.dtype() == DType::kF32;
  check_row_buffer(args.output, "output", widened ? DType::kF32 : config.dtype,
                   {problem.num_tokens, config.hidden}, device);
  problem.output_dtype = args.output.dtype();
  problem.expected_rows = args.expected_rows;
  problem.max_tokens = args.max_tokens;
  problem.fixed_sizes = has_fixed_sizes(kernel, args.fixed_sizes, args.stream);
  problem.topk = core::check_routing_args(experts, args, problem.num_tokens);
  const ForwardSizes sizes = kernel.sizes(problem);
  check_written_dtype(kernel, sizes);
  if (config.monolithic) check_routing_results(args);
  FUSEDMOE_CHECK_FAULT(!config.monolithic || !kernel.prepare_finalize().moves_rows() ||
                           args.router_logits.dtype() == DType::kF32,
                       kDType, "router_logits", std::string(name(args.router_logits.dtype())),
                       "f32 across ranks");
  if (args.dropped_rows) check_buffer(args.dropped_rows, "dropped_rows", DType::kI32, {1}, device);

  const NamedView hidden_states{"hidden_states", &args.hidden_states};
  const NamedView expert_map{"expert_map", &args.expert_map};
  const NamedView output{"output", &args.output};
  const NamedView ids{"topk_ids", &args.topk_ids}, weights{"topk_weights", &args.topk_weights};
  const NamedView logits{"router_logits", &args.router_logits};
  check_output(args.output, args.hidden_states, args.inplace);
  check_disjoint(output, {ids, weights, logits, expert_map});
  check_workspace(workspace, sizes.bytes,
                  {output,
                   hidden_states,
                   ids,
                   weights,
                   logits,
                   expert_map,
                   {"score_correction_bias", &args.score_correction_bias},
                   {"expert_load", &args.expert_load},
                   {"dropped_rows", &args.dropped_rows}});
  // Values last: they mean nothing in memory that another argument claims. On a device they cannot
  // be read without waiting for it.
  if (!device.is_cpu()) return sizes;
  if (args.expert_map) check_expert_map(args.expert_map, config.num_local_experts);
  if (!config.monolithic) check_ids(args.topk_ids, config.num_experts, config, args.expert_map);
  return sizes;
}

}  // namespace fusedmoe::layer
