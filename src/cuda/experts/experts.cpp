// The experts on CUDA, in four variants: standard, batched, "unfused" (with injection points) and
// batch-invariant. A batch-invariant row has the same bits in any batch: its sums over K are made
// in one piece, always by the same kind of instruction. The scheme decides the format of the
// weights (formats/weight_format.h).
#include "cuda/experts/experts.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/check.h"
#include "cuda/backend.h"
#include "cuda/device/properties.h"
#include "cuda/experts/launch_mlp.h"
#include "cuda/experts/one_token_experts.h"
#include "cuda/experts/operand_rows.h"
#include "cuda/experts/packed_weights.h"
#include "cuda/experts/planner.h"
#include "cuda/formats/format_kernels.h"
#include "cuda/router/fused_route.h"
#include "cuda/router/router.h"
#include "cuda/rows/activation.h"
#include "cuda/rows/combine.h"
#include "cuda/rows/routing_data.h"
#include "moe/experts_args.h"
#include "moe/problem_size.h"
#include "moe/routed_experts.h"

namespace fusedmoe::cuda {
namespace {

constexpr std::int64_t kFewWeightBytes = std::int64_t{256} << 20;  // a few times the L2

class CudaExperts final : public core::RoutedExperts {
 public:
  CudaExperts(const ExpertsDescriptor& descriptor, const KernelFamily& family,
              const MoeConfig& config, const Context& context);

  bool accepts(const PackedWeights& weights) const override {
    const auto* packed = dynamic_cast<const CudaPackedWeights*>(&weights);
    // Rows in f16 and in bf16 have formats of their own for the same scheme.
    return packed && packed->format().name == format().name &&
           core::matches(weights.info(), config()) &&
           (!config().compute_capability ||
            plans_for(config(), multiprocessor_count(config().device)));
  }
  WorkspaceSizes workspace_sizes(const ProblemSize& problem) const override {
    return planner_.workspace_sizes(problem);
  }
  std::vector<std::string> kernel_configs(const ProblemSize& problem) const override {
    return planner_.kernel_configs(problem);
  }
  int find_kernel_config(std::string_view name) const override {
    return find_config(planner_.family(), name);
  }
  std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                      const PackOptions& options) const override;
  std::shared_ptr<PackedWeights> from_parts(PackedWeights::Info info,
                                            const PackedParts& parts) const override;
  ExpertWeights unpack(const PackedWeights& packed, std::int64_t expert) const override {
    core::check_expert(*this, packed, expert);
    return static_cast<const CudaPackedWeights&>(packed).unpack(expert);
  }
  void repack(const ExpertWeights& weights, std::int64_t expert,
              PackedWeights& packed) const override {
    core::check_expert(*this, packed, expert);
    core::check_replacement(weights, packed.info());
    static_cast<CudaPackedWeights&>(packed).replace(expert, weights.experts.front(),
                                                    Stream{config().device});
  }
  PackedParts expert_parts(const PackedWeights& packed, std::int64_t expert) const override {
    const auto* of_cuda = dynamic_cast<const CudaPackedWeights*>(&packed);
    FUSEDMOE_CHECK(of_cuda, "packed", packed.info().implementation, "packed on cuda");
    return of_cuda->expert_parts(expert);
  }
  void replace_expert(PackedWeights& packed, std::int64_t expert, const PackedWeights& one,
                      Stream stream) const override {
    core::check_expert(*this, packed, expert);
    static_cast<CudaPackedWeights&>(packed).replace_expert(expert, one, stream);
  }
  std::shared_ptr<PackedWeights> make_room(const PackedWeights& like) const override;

 private:
  void check_here() const;
  void run_routed(const ForwardArgs& args) const override;
  void route_and_run(const ForwardArgs& args) const override;

  const WeightFormat& format() const { return planner_.format(); }
  bool unfused() const { return planner_.variant() == Variant::kUnfused; }
  DType dtype() const { return format().row_dtype; }
  FusedMlpParams make_params(const ForwardArgs& args, const Scratch& scratch,
                             const KernelConfig& config) const;
  RoutingDataExtras make_extras(const ForwardArgs& args, const Scratch& scratch) const;
  void run_batched(const ForwardArgs& args, const Scratch& scratch,
                   const KernelConfig& config) const;
  void run_standard(const ForwardArgs& args, const Scratch& scratch, const KernelConfig& config,
                    const RoutingData& routing, bool ids_are_old) const;
  void apply_unfused(const ForwardArgs& args, const FusedMlpParams& params, const Scratch& scratch,
                     const KernelConfig& config, const RoutingData& routing) const;

  RowPass cut_pass(const RowTransform& rows, const FusedMlpParams& params, const Scratch& scratch,
                   const TileShape& tile) const;
  void run_gemms(const ForwardArgs& args, const FusedMlpParams& params, const Scratch& scratch,
                 const KernelConfig& config) const;
  void run_gemms_apart(const ForwardArgs& args, const FusedMlpParams& params,
                       const Scratch& scratch, const KernelConfig& config) const;

  const Planner planner_;
  const FormatKernels& kernels_;
  const OperandRows rows_;
  const OneTokenExperts one_token_;
};

CudaExperts::CudaExperts(const ExpertsDescriptor& descriptor, const KernelFamily& family,
                         const MoeConfig& config, const Context& context)
    : RoutedExperts(descriptor, config, context, backend()),
      planner_(this->config(), context, family,
               config.compute_capability ? limits_of_capability(*config.compute_capability)
                                         : limits_of(config.device)),
      kernels_(kernels_of(planner_.format())),
      rows_(this->config(), planner_.format(), family),
      one_token_(this->config(), planner_.format(), rows_, planner_.one_token()) {}

/// Throws Error unless the weights that would be made can run here.
void CudaExperts::check_here() const {
  check_device(*this);
  const int here = multiprocessor_count(config().device);
  if (!plans_for(config(), here)) {
    throw Error::invalid(
        "config.compute_capability",
        core::format("config.compute_capability stands for a GPU of {} multiprocessors, but {} has "
                     "{}: leave it out to run there",
                     planner_.multiprocessors(), to_string(config().device), here));
  }
}

std::shared_ptr<PackedWeights> CudaExperts::pack(const ExpertWeights& weights,
                                                 const PackOptions& options) const {
  check_here();
  return std::make_shared<CudaPackedWeights>(core::make_packed_info(*this, weights, options),
                                             kernels_, weights, options);
}

std::shared_ptr<PackedWeights> CudaExperts::from_parts(PackedWeights::Info info,
                                                       const PackedParts& parts) const {
  check_here();
  return std::make_shared<CudaPackedWeights>(std::move(info), kernels_, parts);
}

std::shared_ptr<PackedWeights> CudaExperts::make_room(const PackedWeights& like) const {
  const auto* of_cuda = dynamic_cast<const CudaPackedWeights*>(&like);
  FUSEDMOE_CHECK(of_cuda, "like", like.info().implementation, "packed on cuda");
  PackedWeights::Info info = like.info();
  info.num_experts = config().num_local_experts;
  info.read_only = false;
  return std::make_shared<CudaPackedWeights>(std::move(info), *of_cuda);
}

FusedMlpParams CudaExperts::make_params(const ForwardArgs& args, const Scratch& scratch,
                                        const KernelConfig& config) const {
  const auto& weights = static_cast<const CudaPackedWeights&>(*args.weights);
  const PackedWeights::Info& info = weights.info();
  const bool gated = is_gated(info.activation.kind);
  FusedMlpParams params;
  params.num_experts = static_cast<int>(info.num_experts);
  params.counters = scratch.counters;
  params.activation = info.activation;
  params.batch_invariant = planner_.variant() == Variant::kBatchInvariant;

  params.quantizer = rows_.inner_quantizer(weights);

  GemmParams& first = params.gemms[0];
  weights.w13().set(first);
  rows_.set_hidden(args, scratch, first);
  first.out = scratch.activated;
  first.out_pitch = scratch.activated_pitch;
  first.width = static_cast<int>(info.intermediate);
  first.epilogue = gated ? Epilogue::kActivate : Epilogue::kActivateGate;

  GemmParams& second = params.gemms[1];
  weights.w2().set(second);
  rows_.set_activated(scratch, second);
  second.out = batched() ? args.fused_output.data() : scratch.rows_out;
  second.out_pitch = info.hidden;
  second.split_pitch = scratch.rows * info.hidden;
  second.width = static_cast<int>(info.hidden);
  second.splits = config.splits;
  second.out_f32 = config.rows_f32;

  // Measured: MXFP4 gains 3 to 5 % up to 32 tokens and loses nowhere, and so may other formats that
  // are decoded; 16-bit weights, which come at the memory's full rate, gain up to 6 % where they
  // are few and lose 2 % where they are many.
  const std::int64_t most_hit = std::min(scratch.rows, info.num_experts);
  params.weights_evict_first =
      format().decodes || most_hit * (first.expert_bytes + second.expert_bytes) <= kFewWeightBytes;
  return params;
}

void CudaExperts::apply_unfused(const ForwardArgs& args, const FusedMlpParams& params,
                                const Scratch& scratch, const KernelConfig& config,
                                const RoutingData& routing) const {
  static const ExpertsHooks kNone;
  const ExpertsHooks& hooks = args.hooks ? *args.hooks : kNone;
  const bool gated = is_gated(params.activation.kind);
  const std::int64_t width = params.gemms[0].width, hidden = params.gemms[1].width;
  const auto view = [&](void* data, std::int64_t columns) {
    return TensorView(data, dtype(), {scratch.rows, columns}, args.stream.device);
  };
  HookArgs hook;
  hook.expert_offsets = routing.expert_offsets;
  hook.permuted_to_slot = routing.permuted_to_slot;
  hook.topk = args.topk_ids.size(1);
  hook.origins = args.origins;
  hook.stream = args.stream;
  const auto call = [&](const std::function<void(const HookArgs&)>& function,
                        const TensorView& input, const TensorView& output) {
    if (!function) return;
    hook.input = input;
    hook.output = output;
    function(hook);
  };

  FusedMlpParams step = params;
  step.num_gemms = 1;
  step.gemms[0].out = scratch.gate_up;
  step.gemms[0].out_pitch = (gated ? 2 : 1) * width;
  step.gemms[0].epilogue = gated ? Epilogue::kStoreGateUp : Epilogue::kStore;
  fused_mlp(step, planner_.family(), format(), config.tile, args.stream);
  const TensorView gate_up = view(scratch.gate_up, step.gemms[0].out_pitch);
  call(hooks.after_gemm1, args.hidden_states, gate_up);

  const TensorView activated = view(scratch.activated, width);
  activate_rows(params.activation, dtype(), gate_up.data(), activated.data(), scratch.rows, width,
                routing.expert_offsets.as<const std::int32_t>() + params.num_experts, args.stream);
  call(hooks.after_activation, gate_up, activated);

  step.gemms[0] = params.gemms[1];
  if (rows_.quantizes()) {
    rows_.transform_activated(args, scratch, params);
    step.gemms[0].activations = scratch.quantized.codes;
  }
  step.order = LaunchOrder::kApart;     // the hooks' work comes before
  step.counters = params.counters + 1;  // the first has moved its own
  fused_mlp(step, planner_.family(), format(), config.tile, args.stream);
  call(hooks.after_gemm2, activated, view(scratch.rows_out, hidden));
}

RoutingDataExtras CudaExperts::make_extras(const ForwardArgs& args, const Scratch& scratch) const {
  RoutingDataExtras extras;
  extras.zeroed = scratch.counters;
  extras.num_zeroed = scratch.num_zeroed;
  if (!rows_.needs_hidden_pass() && !rows_.are_coded(args) && !args.row_sources) {
    extras.rows = rows_.hidden(args, scratch);
  }
  return extras;
}

void CudaExperts::run_batched(const ForwardArgs& args, const Scratch& scratch,
                              const KernelConfig& config) const {
  FusedMlpParams params = make_params(args, scratch, config);
  fill_bytes(TensorView(scratch.counters, DType::kI32, {scratch.num_zeroed}, args.stream.device), 0,
             args.stream);
  if (rows_.quantizes()) {
    rows_.transform_hidden(args, scratch);
    params.order = LaunchOrder::kBehind;
  }
  params.expert_num_tokens = args.expert_num_tokens.as<const std::int32_t>();
  params.capacity = args.hidden_states.size(1);
  run_gemms(args, params, scratch, config);
}

/// The row pass between the GEMMs, cut into tiles: about one for each multiprocessor where there
/// are few rows, but at most two for each row.
RowPass CudaExperts::cut_pass(const RowTransform& rows, const FusedMlpParams& params,
                              const Scratch& scratch, const TileShape& tile) const {
  const std::int64_t token_tiles =
      std::min<std::int64_t>(scratch.rows, params.num_experts) + scratch.rows / tile.max_tokens;
  const std::int64_t most = ceil_div(2 * scratch.rows, token_tiles);
  const std::int64_t tiles =
      std::clamp<std::int64_t>(ceil_div(planner_.multiprocessors(), token_tiles), 1, most);
  return {rows, static_cast<int>(tiles), 0};
}

/// In one launch, unless the rows between the GEMMs take one of their own. With one token (in the
/// batched format a capacity of one) that is faster than the row pass in sm90, as GEMM 2 is ready
/// sooner, and as fast in sm80 (INT8 of three models on an H200: 2 % slower to 1 % faster).
void CudaExperts::run_gemms(const ForwardArgs& args, const FusedMlpParams& params,
                            const Scratch& scratch, const KernelConfig& config) const {
  FusedMlpParams step = params;
  const std::int64_t most_tokens = args.hidden_states.size(args.hidden_states.rank() - 2);
  if (rows_.stores_codes()) {
    rows_.set_codes(args, scratch, step.gemms[0]);
  } else if (rows_.stores_groups(config.tile)) {
    rows_.set_groups(scratch, step.gemms[0]);
  } else if (rows_.joins_groups(config.tile)) {
    step.pass = {rows_.activated(args, scratch, params), 0, scratch.group_counters};
  } else if (planner_.family().has_row_pass(format(), config.tile) && rows_.may_have_row_pass() &&
             most_tokens > 1) {
    step.pass = cut_pass(rows_.activated(args, scratch, params), params, scratch, config.tile);
  } else if (rows_.has_coded_rows()) {
    return run_gemms_apart(args, params, scratch, config);
  }
  fused_mlp(step, planner_.family(), format(), config.tile, args.stream);
}

/// In three launches or, with a scale of the whole tensor, four: between the GEMMs rows are
/// quantized.
void CudaExperts::run_gemms_apart(const ForwardArgs& args, const FusedMlpParams& params,
                                  const Scratch& scratch, const KernelConfig& config) const {
  FusedMlpParams step = params;
  step.num_gemms = 1;
  step.topk_weights = nullptr;  // those are for GEMM 2
  if (step.order == LaunchOrder::kBesideRouting) step.order = LaunchOrder::kFirstBesideRouting;
  fused_mlp(step, planner_.family(), format(), config.tile, args.stream);
  rows_.transform_activated(args, scratch, params);
  step.gemms[0] = params.gemms[1];
  step.topk_weights = params.topk_weights;
  step.counters = params.counters + 1;  // the first has moved its own
  // GEMM 1, or the launch that brings its rows, waited for the counts before it let the next one
  // start, and all have started before this launch does. So it reads the counts, and need not make
  // them from the ids.
  step.order = LaunchOrder::kBesideRows;
  step.topk_ids = nullptr;
  fused_mlp(step, planner_.family(), format(), config.tile, args.stream);
}

/// The fused MLP and the combine, behind the launch that makes the routing data. `ids_are_old`: the
/// ids were there before that launch began.
void CudaExperts::run_standard(const ForwardArgs& args, const Scratch& scratch,
                               const KernelConfig& config, const RoutingData& routing,
                               bool ids_are_old) const {
  const std::int64_t topk = args.topk_ids.size(1), hidden = args.fused_output.size(1);
  const std::int64_t num_local_experts = this->config().num_local_experts;
  const bool unfused = this->unfused();
  FusedMlpParams params = make_params(args, scratch, config);
  params.order = LaunchOrder::kBehind;
  if (args.row_sources) {
    params.order = LaunchOrder::kBesideArrivals;
    params.arrivals = rows_.gather_hidden(args, scratch, routing);
  } else if (ids_are_old ? rows_.needs_hidden_pass() || rows_.are_coded(args) : rows_.quantizes()) {
    rows_.permute_hidden(args, scratch, routing);
  }
  params.expert_num_tokens = routing.expert_num_tokens.as<const std::int32_t>();
  params.expert_offsets = routing.expert_offsets.as<const std::int32_t>();
  params.row_slots = routing.permuted_to_slot.as<const std::int32_t>();
  const std::int64_t slots = args.topk_ids.numel();
  if (!unfused && !args.row_sources && ids_are_old && may_route_inline(slots, num_local_experts)) {
    params.order = LaunchOrder::kBesideRouting;
    params.topk_ids = args.topk_ids.as<const std::int32_t>();
    params.num_slots = static_cast<int>(slots);
    params.local_experts = core::LocalExperts(args.expert_map, num_local_experts);
    const bool has_row_for_each = slots <= scratch.rows;
    if (config.rows_f32 && has_row_for_each) params.gemms[1].out_rows = params.row_slots;
  }
  const float* topk_weights =
      this->config().apply_router_weight_on_input ? nullptr : args.topk_weights.as<const float>();
  if (format().weights_rows && !unfused && !config.rows_f32) {
    params.topk_weights = std::exchange(topk_weights, nullptr);  // the combine only adds
  }
  if (unfused) {
    apply_unfused(args, params, scratch, config, routing);
  } else {
    run_gemms(args, params, scratch, config);
  }

  Combine end;
  end.overlap_previous = !unfused;
  end.output = args.fused_output;
  end.accumulate = args.accumulate;
  if (args.row_targets) end.targets = *args.row_targets;
  end.rows = scratch.rows_out;
  end.rows_dtype = config.rows_f32 ? DType::kF32 : dtype();
  end.splits = config.splits;
  end.split_pitch = scratch.rows * hidden;
  if (!params.gemms[1].out_rows) end.slot_to_permuted = routing.slot_to_permuted;
  end.topk_ids = args.topk_ids;
  end.local_experts = core::LocalExperts(args.expert_map, num_local_experts);
  end.topk_weights = topk_weights;
  end.topk = topk;
  combine(end, args.stream);
}

void CudaExperts::run_routed(const ForwardArgs& args) const {
  const ProblemSize problem = core::experts_problem(*this, args);
  if (problem.num_tokens == 0) return;
  const KernelConfig config = planner_.config_for(
      problem, args.kernel_config, rows_.are_coded(args) || args.row_sources || args.row_targets);
  const Scratch scratch = planner_.scratch_of(problem, config, args.workspace2);
  if (batched()) return run_batched(args, scratch, config);
  if (config.one_token) {
    return one_token_.run(args, scratch, make_params(args, scratch, config), problem);
  }
  const RoutingData routing =
      build_routing_data(args.topk_ids, args.expert_map, problem.num_local_experts, scratch.routing,
                         make_extras(args, scratch), args.stream);
  run_standard(args, scratch, config, routing, true);
}

/// Few tokens: one launch makes logits, ids, weights, routing data and permuted rows.
void CudaExperts::route_and_run(const ForwardArgs& args) const {
  const ProblemSize problem = core::experts_problem(*this, args);
  if (unfused() || rows_.are_coded(args) ||
      !may_fuse(*args.router, problem.num_tokens, problem.num_local_experts,
                limits_of(args.stream.device))) {
    route(args);
    return run_routed(args);
  }
  const KernelConfig config = planner_.config_for(problem, args.kernel_config);
  const Scratch scratch = planner_.scratch_of(problem, config, args.workspace2);
  FusedRoute fused;
  fused.config = args.router;
  fused.correction_bias = args.score_correction_bias;
  if (args.router_weights) {
    fused.weight = args.router_weights->weight;
    fused.bias = args.router_weights->bias;
    fused.correction_bias = args.router_weights->score_correction_bias;
  }
  fused.hidden_states = args.hidden_states;
  fused.logits = args.router_logits;
  fused.out = {args.topk_ids, args.topk_weights};
  fused.expert_load = args.expert_load;
  fused.expert_map = args.expert_map;
  fused.num_local_experts = problem.num_local_experts;
  fused.routing_data = scratch.routing;
  if (!config.one_token) fused.extras = make_extras(args, scratch);
  const RoutingData routing = fused_route(fused, args.stream);
  if (config.one_token) {
    return one_token_.run(args, scratch, make_params(args, scratch, config), problem);
  }
  run_standard(args, scratch, config, routing, false);
}

}  // namespace

std::shared_ptr<const Experts> make_experts(const ExpertsDescriptor& descriptor,
                                            const KernelFamily& family, const MoeConfig& config,
                                            const Context& context) {
  return std::make_shared<CudaExperts>(descriptor, family, config, context);
}

}  // namespace fusedmoe::cuda
