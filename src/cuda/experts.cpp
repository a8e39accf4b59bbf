// The Hopper experts: sm90_bf16, sm90_f16 and sm90_mxfp4, each standard, batched, unfused (with
// injection points), and batch-invariant: K in one piece and one kind of instruction, so that a row
// has the same bits in any batch.
#include "cuda/experts.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/device_runtime.h"
#include "core/experts_args.h"
#include "core/tuning.h"
#include "core/workspace.h"
#include "cuda/activation.h"
#include "cuda/combine.h"
#include "cuda/device/properties.h"
#include "cuda/gemm/heuristic.h"
#include "cuda/packed_weights.h"
#include "cuda/routing_data.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tune.h"

namespace fusedmoe::cuda {
namespace {

enum class Variant { kStandard, kBatched, kUnfused, kBatchInvariant };

std::string_view suffix(Variant variant) {
  switch (variant) {
    case Variant::kStandard:
      return "";
    case Variant::kBatched:
      return "_batched";
    case Variant::kUnfused:
      return "_unfused";
    case Variant::kBatchInvariant:
      return "_batch_invariant";
  }
  return "";
}

constexpr std::int64_t kMaxTopk = 64;                              // of the router's kernels
constexpr std::int64_t kFewWeightBytes = std::int64_t{256} << 20;  // a few times the L2
constexpr std::int64_t kPitchUnit = 8;  // elements: rows of activations start at 16 bytes

std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return ceil_div(value, unit) * unit;
}

void check_rows(const TensorView& view, const char* argument, DType dtype) {
  FUSEDMOE_CHECK(view.dtype() == dtype, argument, std::string(fusedmoe::name(view.dtype())),
                 std::string(fusedmoe::name(dtype)));
  FUSEDMOE_CHECK(reinterpret_cast<std::uintptr_t>(view.data()) % 16 == 0, argument, "misaligned",
                 "16-byte aligned");
}

void check_device(const TensorView& view, const char* argument, Device device) {
  FUSEDMOE_CHECK(!view || view.device() == device, argument,
                 fmt::format("on {}", to_string(view.device())),
                 fmt::format("on {}", to_string(device)));
}

void check_sizes(const ExpertWeights& weights) {
  FUSEDMOE_CHECK(weights.hidden % kPitchUnit == 0, "weights.hidden", fmt::to_string(weights.hidden),
                 fmt::format("a multiple of {}", kPitchUnit));
  FUSEDMOE_CHECK(weights.num_experts() <= kMaxExperts, "weights",
                 fmt::format("of {} experts", weights.num_experts()),
                 fmt::format("of up to {}", kMaxExperts));
}

/// What check_experts_args() does not ask for.
void check_args(const ExpertsArgs& args, DType dtype) {
  const Device device = args.weights->info().device;
  FUSEDMOE_CHECK(args.stream.device == device, "stream",
                 fmt::format("of {}", to_string(args.stream.device)),
                 fmt::format("of {}, where the packed weights are", to_string(device)));
  check_device(args.hidden_states, "hidden_states", device);
  check_device(args.output, "output", device);
  check_device(args.topk_ids, "topk_ids", device);
  check_device(args.topk_weights, "topk_weights", device);
  check_device(args.expert_map, "expert_map", device);
  check_device(args.expert_num_tokens, "expert_num_tokens", device);
  check_rows(args.hidden_states, "hidden_states", dtype);
  check_rows(args.output, "output", dtype);
}

std::size_t bytes_of(std::int64_t rows, std::int64_t pitch, DType dtype) {
  return static_cast<std::size_t>(bytes(dtype, Shape({rows, pitch}).numel()));
}

/// Scratch of one forward. With a null block only the size is meaningful.
struct Scratch {
  std::int64_t rows = 0;             // token rows of all experts, at most
  std::int64_t activated_pitch = 0;  // elements
  void* routing = nullptr;
  std::int32_t* counters = nullptr;
  void* permuted = nullptr;   // (rows, hidden): hidden states in expert order
  void* gate_up = nullptr;    // unfused: GEMM 1's rows
  void* activated = nullptr;  // (rows, activated_pitch)
  void* rows_out = nullptr;   // (splits, rows, hidden): GEMM 2's rows, for the combine
  std::size_t bytes = 0;

  Scratch(const ProblemSize& problem, Variant variant, const KernelConfig& config, void* block) {
    const bool batched = variant == Variant::kBatched;
    const std::int64_t experts = problem.num_local_experts;
    core::WorkspaceCutter cutter(block);
    rows = problem.num_tokens * (batched ? experts : problem.topk);
    activated_pitch = round_up(problem.intermediate, kPitchUnit);
    counters = static_cast<std::int32_t*>(
        cutter.take(4 * static_cast<std::size_t>(num_counters(config.tile, rows, experts))));
    if (!batched) {
      routing = cutter.take(routing_data_bytes(problem.num_tokens, problem.topk, experts));
      permuted = cutter.take(bytes_of(rows, problem.hidden, problem.dtype));
      rows_out =
          cutter.take(config.splits * bytes_of(rows, problem.hidden,
                                               config.rows_f32 ? DType::kF32 : problem.dtype));
    }
    if (variant == Variant::kUnfused) {
      gate_up = cutter.take(bytes_of(rows, 2 * problem.intermediate, problem.dtype));
    }
    activated = cutter.take(bytes_of(rows, activated_pitch, problem.dtype));
    bytes = cutter.used();
  }
};

class Sm90Experts final : public ModularExperts {
 public:
  Sm90Experts(const WeightFormat& format, Variant variant)
      : format_(format), variant_(variant), name_("sm90_") {
    name_ += format.name;
    name_ += suffix(variant);
  }

  std::string_view name() const override { return name_; }
  ActivationFormat activation_format() const override {
    return batched() ? ActivationFormat::kBatchedExperts : ActivationFormat::kStandard;
  }
  bool has_hooks() const override { return variant_ == Variant::kUnfused; }
  WeightAndReduce weight_and_reduce() const override {
    return batched() ? WeightAndReduce::kDelegate : WeightAndReduce::kNoOp;
  }
  bool accepts(const PackedWeights& weights) const override {
    const auto* packed = dynamic_cast<const CudaPackedWeights*>(&weights);
    return packed && &packed->format() == &format_;
  }

  Support supports(const MoeConfig& config) const override;
  WorkspacePlan plan(const ProblemSize& problem) const override;
  std::vector<std::string> tile_plans(const ProblemSize& problem, Device device) const override;
  std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                      const PackProgress& progress) const override {
    check_sizes(weights);
    if (variant_ != Variant::kBatchInvariant) tuned_plans();  // a broken file shows now
    return std::make_shared<CudaPackedWeights>(core::make_packed_info(*this, weights), format_,
                                               weights, progress);
  }
  ExpertWeights unpack(const PackedWeights& packed, std::int64_t expert) const override {
    core::check_expert(*this, packed, expert);
    return static_cast<const CudaPackedWeights&>(packed).unpack(expert);
  }
  void repack(const ExpertWeights& weights, std::int64_t expert,
              PackedWeights& packed) const override {
    core::check_expert(*this, packed, expert);
    core::check_replacement(weights, packed.info());
    static_cast<CudaPackedWeights&>(packed).replace(expert, weights.experts.front());
  }
  void apply(const ExpertsArgs& args) const override;

 private:
  bool batched() const { return variant_ == Variant::kBatched; }
  MlpShape shape_of(const ProblemSize& problem, Device device = {}) const;
  KernelConfig config_for(const ProblemSize& problem, Device device,
                          std::optional<std::string_view> requested) const;
  DType dtype() const { return format_.row_dtype; }
  FusedMlpParams make_params(const ExpertsArgs& args, const Scratch& scratch,
                             const KernelConfig& config) const;
  void apply_unfused(const ExpertsArgs& args, const FusedMlpParams& params, const Scratch& scratch,
                     const KernelConfig& config, const RoutingData& routing) const;

  const WeightFormat& format_;
  Variant variant_;
  std::string name_;
};

Support Sm90Experts::supports(const MoeConfig& config) const {
  const auto no = [](Reason reason, std::string text) {
    return Support::no(reason, std::move(text));
  };
  if (config.device.is_cpu()) return no(Reason::kDevice, "device is cpu, runs on cuda");
  if (std::string problem = device_problem(config.device); !problem.empty()) {
    return no(Reason::kDevice, fmt::format("{}: {}", to_string(config.device), problem));
  }
  if (config.dtype != dtype()) {
    return no(Reason::kDType, fmt::format("dtype is {}, takes {}", fusedmoe::name(config.dtype),
                                          fusedmoe::name(dtype())));
  }
  if (config.scheme != format_.scheme) {
    return no(Reason::kQuantScheme,
              fmt::format("scheme is {}, takes {}", fusedmoe::name(config.scheme),
                          fusedmoe::name(format_.scheme)));
  }
  // The rows that hooks see have no padding.
  const std::int64_t unit =
      variant_ == Variant::kUnfused ? kPitchUnit : std::int64_t{format_.codes_per_value};
  if (Support common = core::supports_anywhere(config, activation_format(), {kPitchUnit, unit});
      !common) {
    return common;
  }
  if (config.batch_invariant && variant_ != Variant::kBatchInvariant) {
    return no(Reason::kBatchInvariance, "the order of its sums depends on the batch");
  }
  if (config.topk > kMaxTopk) {
    return no(Reason::kShape, fmt::format("topk {}; takes up to {}", config.topk, kMaxTopk));
  }
  if (config.num_local_experts > kMaxExperts) {
    return no(Reason::kShape,
              fmt::format("{} experts; takes up to {}", config.num_local_experts, kMaxExperts));
  }
  return Support::yes();
}

WorkspacePlan Sm90Experts::plan(const ProblemSize& problem) const {
  WorkspacePlan plan;
  plan.output_shape = batched()
                          ? Shape{problem.num_local_experts, problem.num_tokens, problem.hidden}
                          : Shape{problem.num_tokens, problem.hidden};
  plan.output_dtype = problem.dtype;
  if (problem.num_tokens == 0) return plan;
  // Room for any configuration, for these and, as rows in f32 take more, for fewer tokens.
  const std::int64_t most_f32 = max_tokens_f32(shape_of(problem));
  for (const std::int64_t num_tokens :
       {problem.num_tokens, std::min(problem.num_tokens, most_f32)}) {
    if (num_tokens == 0) continue;
    ProblemSize smaller = problem;
    smaller.num_tokens = num_tokens;
    const Scratch scratch(smaller, variant_, largest_config(shape_of(smaller)), nullptr);
    plan.workspace2_bytes = std::max(plan.workspace2_bytes, scratch.bytes);
  }
  return plan;
}

MlpShape Sm90Experts::shape_of(const ProblemSize& problem, Device device) const {
  MlpShape shape;
  shape.format = &format_;
  shape.batched = batched();
  shape.unfused = variant_ == Variant::kUnfused;
  shape.batch_invariant = variant_ == Variant::kBatchInvariant;
  shape.num_tokens = problem.num_tokens;
  shape.topk = batched() ? 1 : problem.topk;
  shape.num_local_experts = problem.num_local_experts;
  shape.hidden = problem.hidden;
  shape.intermediate = problem.intermediate;
  const DeviceProperties* found = device.is_cpu() ? nullptr : device_properties(device.index);
  if (found && found->problem.empty()) shape.multiprocessors = found->multiprocessors;
  return shape;
}

/// What the caller requests, else what was tuned, else what the heuristic chooses. Tuned
/// configurations are for one number of tokens, so the batch-invariant experts do not look at them.
KernelConfig Sm90Experts::config_for(const ProblemSize& problem, Device device,
                                     std::optional<std::string_view> requested) const {
  const MlpShape shape = shape_of(problem, device);
  std::optional<KernelConfig> preferred;
  if (requested) {
    preferred = parse_config(*requested);
  } else if (!shape.batch_invariant) {
    ProblemSize key = problem;
    key.topk = shape.topk;
    preferred = tuned_config(device_name(device), name_, key);
  }
  return preferred && valid(shape, *preferred) ? *preferred : choose_config(shape);
}

std::vector<std::string> Sm90Experts::tile_plans(const ProblemSize& problem, Device device) const {
  if (problem.num_tokens == 0) return {};
  std::vector<std::string> names{to_string(config_for(problem, device, core::pinned_tile_plan()))};
  for (const KernelConfig& config : valid_configs(shape_of(problem, device))) {
    if (std::string name = to_string(config); name != names.front()) {
      names.push_back(std::move(name));
    }
  }
  return names;
}

FusedMlpParams Sm90Experts::make_params(const ExpertsArgs& args, const Scratch& scratch,
                                        const KernelConfig& config) const {
  const auto& weights = static_cast<const CudaPackedWeights&>(*args.weights);
  const PackedWeights::Info& info = weights.info();
  const bool gated = is_gated(info.activation.kind);
  FusedMlpParams params;
  params.num_experts = static_cast<int>(info.num_experts);
  params.counters = scratch.counters;
  params.activation = info.activation;
  params.batch_invariant = variant_ == Variant::kBatchInvariant;

  GemmParams& first = params.gemms[0];
  weights.w13().set(first);
  first.k = static_cast<int>(info.hidden);
  first.activations = batched() ? args.hidden_states.data() : scratch.permuted;
  first.num_rows = scratch.rows;
  first.row_pitch = info.hidden;
  first.out = scratch.activated;
  first.out_pitch = scratch.activated_pitch;
  first.width = static_cast<int>(info.intermediate);
  first.epilogue = gated ? Epilogue::kActivate : Epilogue::kStore;

  GemmParams& second = params.gemms[1];
  weights.w2().set(second);
  second.k = static_cast<int>(info.intermediate);
  second.activations = scratch.activated;
  second.num_rows = scratch.rows;
  second.row_pitch = scratch.activated_pitch;
  second.out = batched() ? args.output.data() : scratch.rows_out;
  second.out_pitch = info.hidden;
  second.split_pitch = scratch.rows * info.hidden;
  second.width = static_cast<int>(info.hidden);
  second.splits = config.splits;
  second.out_f32 = config.rows_f32;

  // Measured: MXFP4 gains 3 to 5 % up to 32 tokens and loses nowhere; 16-bit weights, which come at
  // the memory's full rate, gain up to 6 % where they are few and lose 2 % where they are many.
  const std::int64_t most_hit = std::min(scratch.rows, info.num_experts);
  params.weights_evict_first =
      format_.decodes || most_hit * (first.expert_bytes + second.expert_bytes) <= kFewWeightBytes;
  return params;
}

void Sm90Experts::apply_unfused(const ExpertsArgs& args, const FusedMlpParams& params,
                                const Scratch& scratch, const KernelConfig& config,
                                const RoutingData& routing) const {
  static const ExpertsHooks kNone;
  const ExpertsHooks& hooks = args.hooks ? *args.hooks : kNone;
  const bool gated = is_gated(params.activation.kind);
  const std::int64_t width = params.gemms[0].width, hidden = params.gemms[1].width;
  const auto view = [&](void* data, std::int64_t columns) {
    return TensorView(data, dtype(), {scratch.rows, columns}, args.output.device());
  };
  HookArgs hook;
  hook.expert_offsets = routing.expert_offsets;
  hook.permuted_to_slot = routing.permuted_to_slot;
  hook.topk = args.topk_ids.size(1);
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
  fused_mlp(step, format_, config.tile, args.stream);
  const TensorView gate_up = view(scratch.gate_up, step.gemms[0].out_pitch);
  call(hooks.after_gemm1, args.hidden_states, gate_up);

  const TensorView activated = view(scratch.activated, width);
  activate_rows(params.activation, dtype(), gate_up.data(), activated.data(), scratch.rows, width,
                routing.expert_offsets.as<const std::int32_t>() + params.num_experts, args.stream);
  call(hooks.after_activation, gate_up, activated);

  step.gemms[0] = params.gemms[1];
  step.overlap_previous = false;        // the hooks' work comes before
  step.counters = params.counters + 1;  // the first has moved its own
  fused_mlp(step, format_, config.tile, args.stream);
  call(hooks.after_gemm2, activated, view(scratch.rows_out, hidden));
}

void Sm90Experts::apply(const ExpertsArgs& args) const {
  const ProblemSize problem = core::check_experts_args(*this, args);
  check_args(args, dtype());
  FUSEDMOE_CHECK(variant_ != Variant::kUnfused || problem.intermediate % kPitchUnit == 0, "weights",
                 fmt::format("of intermediate size {}", problem.intermediate),
                 fmt::format("of a multiple of {}: hooks see rows without padding", kPitchUnit));
  if (problem.num_tokens == 0) return;
  const core::CurrentDevice current(args.stream.device);
  // The one place where the caller's choice of configuration enters.
  const KernelConfig config = config_for(problem, args.output.device(), core::pinned_tile_plan());
  const Scratch scratch(problem, variant_, config, args.workspace2);
  FusedMlpParams params = make_params(args, scratch, config);
  const std::int64_t counters = num_counters(config.tile, scratch.rows, problem.num_local_experts);

  if (batched()) {
    fill_bytes(TensorView(scratch.counters, DType::kI32, {counters}, args.output.device()), 0,
               args.stream);
    params.expert_num_tokens = args.expert_num_tokens.as<const std::int32_t>();
    params.capacity = problem.num_tokens;
    fused_mlp(params, format_, config.tile, args.stream);
    return;
  }

  RoutingDataExtras extras;
  extras.zeroed = scratch.counters;
  extras.num_zeroed = counters;
  extras.rows = args.hidden_states.data();
  extras.permuted = scratch.permuted;
  extras.row_bytes = bytes(dtype(), problem.hidden);
  const RoutingData routing =
      build_routing_data(args.topk_ids, args.expert_map, problem.num_local_experts, scratch.routing,
                         extras, args.stream);
  params.expert_num_tokens = routing.expert_num_tokens.as<const std::int32_t>();
  params.expert_offsets = routing.expert_offsets.as<const std::int32_t>();
  params.row_slots = routing.permuted_to_slot.as<const std::int32_t>();
  const std::int64_t slots = problem.num_tokens * problem.topk;
  if (variant_ != Variant::kUnfused && may_route_inline(slots, problem.num_local_experts)) {
    params.topk_ids = args.topk_ids.as<const std::int32_t>();
    params.num_slots = static_cast<int>(slots);
    params.local_experts = core::LocalExperts(args.expert_map, problem.num_local_experts);
    if (config.rows_f32) params.gemms[1].out_rows = params.row_slots;
  }
  const float* topk_weights =
      args.router_weight_on_input ? nullptr : args.topk_weights.as<const float>();
  if (format_.weights_rows && variant_ != Variant::kUnfused && !config.rows_f32) {
    params.topk_weights = std::exchange(topk_weights, nullptr);  // the combine only adds
  }
  params.overlap_previous = true;
  if (variant_ == Variant::kUnfused) {
    apply_unfused(args, params, scratch, config, routing);
  } else {
    fused_mlp(params, format_, config.tile, args.stream);
  }

  Combine end;
  end.overlap_previous = variant_ != Variant::kUnfused;
  end.output = args.output;
  end.rows = scratch.rows_out;
  end.rows_f32 = config.rows_f32;
  end.splits = config.splits;
  end.split_pitch = scratch.rows * problem.hidden;
  if (!params.gemms[1].out_rows) end.slot_to_permuted = routing.slot_to_permuted;
  end.topk_ids = args.topk_ids;
  end.local_experts = core::LocalExperts(args.expert_map, problem.num_local_experts);
  end.topk_weights = topk_weights;
  end.topk = problem.topk;
  combine(end, args.stream);
}

}  // namespace

std::vector<std::shared_ptr<const Experts>> make_all_experts() {
  std::vector<std::shared_ptr<const Experts>> list;
  for (const WeightFormat& format : weight_formats()) {
    for (const Variant variant :
         {Variant::kStandard, Variant::kBatchInvariant, Variant::kBatched, Variant::kUnfused}) {
      list.push_back(std::make_shared<Sm90Experts>(format, variant));
    }
  }
  return list;
}

}  // namespace fusedmoe::cuda
