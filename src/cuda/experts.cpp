// The Hopper experts: sm90_bf16, sm90_f16 and sm90_mxfp4, each standard, batched, unfused (with
// injection points), and batch-invariant: K in one piece and one kind of instruction, so that a row
// has the same bits in any batch.
#include "cuda/experts.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/check.h"
#include "core/device_runtime.h"
#include "core/workspace.h"
#include "cuda/activation.h"
#include "cuda/gemm/grouped_gemm.h"
#include "cuda/gemm/heuristic.h"
#include "cuda/packed_weights.h"
#include "cuda/rows/combine.h"
#include "cuda/rows/routing_data.h"
#include "fusedmoe/runtime.h"
#include "moe/experts_args.h"
#include "moe/tuning.h"
#include "tools/tune.h"

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

std::string_view name(WeightFormat format) {
  switch (format) {
    case WeightFormat::kBF16:
      return "bf16";
    case WeightFormat::kF16:
      return "f16";
    case WeightFormat::kMXFP4:
      return "mxfp4";
  }
  return "";
}

QuantScheme scheme_of(WeightFormat format) {
  return is_decoded(format) ? schemes::mxfp4_w4a16() : schemes::unquantized(row_dtype(format));
}

std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return ceil_div(value, unit) * unit;
}

void check_rows(const TensorView& view, const char* argument, DType dtype) {
  FUSEDMOE_CHECK(view.dtype() == dtype, argument, std::string(fusedmoe::name(view.dtype())),
                 std::string(fusedmoe::name(dtype)));
  FUSEDMOE_CHECK(reinterpret_cast<std::uintptr_t>(view.data()) % 16 == 0, argument, "misaligned",
                 "16-byte aligned");
}

void check_sizes(const ExpertWeights& weights) {
  FUSEDMOE_CHECK(weights.hidden % kPitchUnit == 0, "weights.hidden",
                 core::to_string(weights.hidden), core::format("a multiple of {}", kPitchUnit));
  FUSEDMOE_CHECK(weights.num_experts() <= kMaxExperts, "weights",
                 core::format("of {} experts", weights.num_experts()),
                 core::format("of up to {}", kMaxExperts));
}

/// What check_experts_args() does not ask for.
void check_args(const ExpertsArgs& args, DType dtype) {
  check_rows(args.hidden_states, "hidden_states", dtype);
  check_rows(args.output, "output", dtype);
}

/// Of rows in 16-bit numbers or f32.
std::size_t bytes_of(std::int64_t rows, std::int64_t pitch, bool f32 = false) {
  return static_cast<std::size_t>(Shape({rows, pitch}).numel() * (f32 ? 4 : 2));
}

/// Scratch of one forward. With a null block only the size is meaningful.
struct Scratch {
  std::int64_t rows = 0;             // of the grouped GEMM, at most
  std::int64_t activated_pitch = 0;  // elements
  void* routing = nullptr;
  std::int32_t* counters = nullptr;
  void* permuted = nullptr;   // (rows, hidden): hidden states in the order of the grouped GEMM
  void* gate_up = nullptr;    // unfused: GEMM 1's rows
  void* activated = nullptr;  // (rows, activated_pitch)
  void* rows_out = nullptr;   // (splits, rows, hidden): GEMM 2's rows, for the combine
  std::size_t bytes = 0;

  Scratch(const ProblemSize& problem, Variant variant, const GemmPlan& plan, void* block) {
    const bool batched = variant == Variant::kBatched;
    const std::int64_t experts = problem.num_local_experts;
    core::WorkspaceCutter cutter(block);
    rows = problem.num_tokens * (batched ? experts : problem.topk);
    activated_pitch = round_up(problem.intermediate, kPitchUnit);
    counters = static_cast<std::int32_t*>(
        cutter.take(4 * static_cast<std::size_t>(work_counters(plan.tile, rows, experts))));
    if (!batched) {
      routing = cutter.take(routing_data_bytes(problem.num_tokens, problem.topk, experts));
      permuted = cutter.take(bytes_of(rows, problem.hidden));
      rows_out = cutter.take(plan.splits * bytes_of(rows, problem.hidden, plan.rows_f32));
    }
    if (variant == Variant::kUnfused) {
      gate_up = cutter.take(bytes_of(rows, 2 * problem.intermediate));
    }
    activated = cutter.take(bytes_of(rows, activated_pitch));
    bytes = cutter.used();
  }
};

class Sm90Experts final : public ModularExperts {
 public:
  Sm90Experts(WeightFormat format, Variant variant)
      : format_(format), variant_(variant), name_("sm90_") {
    name_ += cuda::name(format);
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
    return packed && packed->format() == format_;
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
  GemmShape shape_of(const ProblemSize& problem) const;
  GemmPlan plan_for(const ProblemSize& problem, Device device) const;
  DType dtype() const { return row_dtype(format_); }
  GroupedGemm make_problem(const ExpertsArgs& args, const Scratch& scratch,
                           const GemmPlan& plan) const;
  void apply_unfused(const ExpertsArgs& args, const GroupedGemm& gemm, const Scratch& scratch,
                     const GemmPlan& plan, const RoutingData& routing) const;

  WeightFormat format_;
  Variant variant_;
  std::string name_;
};

Support Sm90Experts::supports(const MoeConfig& config) const {
  const auto no = [](Reason reason, std::string text) {
    return Support::no(reason, std::move(text));
  };
  if (config.device.is_cpu()) return no(Reason::kDevice, "device is cpu, runs on cuda");
  if (std::string problem = device_problem(config.device); !problem.empty()) {
    return no(Reason::kDevice, core::format("{}: {}", to_string(config.device), problem));
  }
  if (config.dtype != dtype()) {
    return no(Reason::kDType, core::format("dtype is {}, takes {}", fusedmoe::name(config.dtype),
                                           fusedmoe::name(dtype())));
  }
  if (const QuantScheme scheme = scheme_of(format_); config.scheme != scheme) {
    return no(Reason::kQuantScheme,
              core::format("scheme is {}, takes {}", fusedmoe::name(config.scheme),
                           fusedmoe::name(scheme)));
  }
  // The rows that hooks see have no padding; two MXFP4 codes share a byte.
  const std::int64_t unit = variant_ == Variant::kUnfused ? kPitchUnit
                            : is_decoded(format_)         ? 2
                                                          : 1;
  if (Support common = core::supports_anywhere(config, activation_format(), {kPitchUnit, unit});
      !common) {
    return common;
  }
  if (config.batch_invariant && variant_ != Variant::kBatchInvariant) {
    return no(Reason::kBatchInvariance, "the order of its sums depends on the batch");
  }
  if (config.topk > kMaxTopk) {
    return no(Reason::kShape, core::format("topk {}; takes up to {}", config.topk, kMaxTopk));
  }
  if (config.num_local_experts > kMaxExperts) {
    return no(Reason::kShape,
              core::format("{} experts; takes up to {}", config.num_local_experts, kMaxExperts));
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
  // Room for any plan, for these and, as rows in f32 take more, for fewer tokens.
  const std::int64_t most_f32 = max_tokens_f32(shape_of(problem));
  for (const std::int64_t num_tokens :
       {problem.num_tokens, std::min(problem.num_tokens, most_f32)}) {
    if (num_tokens == 0) continue;
    ProblemSize smaller = problem;
    smaller.num_tokens = num_tokens;
    const Scratch scratch(smaller, variant_, largest_plan(shape_of(smaller)), nullptr);
    plan.workspace2_bytes = std::max(plan.workspace2_bytes, scratch.bytes);
  }
  return plan;
}

GemmShape Sm90Experts::shape_of(const ProblemSize& problem) const {
  GemmShape shape;
  shape.format = format_;
  shape.batched = batched();
  shape.unfused = variant_ == Variant::kUnfused;
  shape.batch_invariant = variant_ == Variant::kBatchInvariant;
  shape.num_tokens = problem.num_tokens;
  shape.topk = batched() ? 1 : problem.topk;
  shape.num_local_experts = problem.num_local_experts;
  shape.hidden = problem.hidden;
  shape.intermediate = problem.intermediate;
  return shape;
}

/// What is pinned, else what was tuned, else what the heuristic chooses. Tuned plans are for one
/// number of tokens, so the batch-invariant experts do not look at them.
GemmPlan Sm90Experts::plan_for(const ProblemSize& problem, Device device) const {
  const GemmShape shape = shape_of(problem);
  ProblemSize key = problem;
  key.topk = shape.topk;
  const std::string_view name = shape.batch_invariant
                                    ? core::pinned_tile_plan().value_or("")
                                    : core::preferred_tile_plan(device_name(device), name_, key);
  const std::optional<GemmPlan> preferred = parse_plan(name);
  return preferred && valid(shape, *preferred) ? *preferred : choose_plan(shape);
}

std::vector<std::string> Sm90Experts::tile_plans(const ProblemSize& problem, Device device) const {
  if (problem.num_tokens == 0) return {};
  std::vector<std::string> names{to_string(plan_for(problem, device))};
  for (const GemmPlan& plan : valid_plans(shape_of(problem))) {
    if (std::string name = to_string(plan); name != names.front()) names.push_back(std::move(name));
  }
  return names;
}

GroupedGemm Sm90Experts::make_problem(const ExpertsArgs& args, const Scratch& scratch,
                                      const GemmPlan& plan) const {
  const auto& weights = static_cast<const CudaPackedWeights&>(*args.weights);
  const PackedWeights::Info& info = weights.info();
  const bool gated = is_gated(info.activation.kind);
  GroupedGemm gemm;
  gemm.num_experts = static_cast<int>(info.num_experts);
  gemm.counters = scratch.counters;
  gemm.activation = info.activation;
  gemm.batch_invariant = variant_ == Variant::kBatchInvariant;

  GemmPhase& first = gemm.phases[0];
  weights.w13().set(first);
  first.k = static_cast<int>(info.hidden);
  first.x = batched() ? args.hidden_states.data() : scratch.permuted;
  first.x_rows = scratch.rows;
  first.x_pitch = info.hidden;
  first.out = scratch.activated;
  first.out_pitch = scratch.activated_pitch;
  first.width = static_cast<int>(info.intermediate);
  first.epilogue = gated ? Epilogue::kActivate : Epilogue::kStore;

  GemmPhase& second = gemm.phases[1];
  weights.w2().set(second);
  second.k = static_cast<int>(info.intermediate);
  second.x = scratch.activated;
  second.x_rows = scratch.rows;
  second.x_pitch = scratch.activated_pitch;
  second.out = batched() ? args.output.data() : scratch.rows_out;
  second.out_pitch = info.hidden;
  second.split_pitch = scratch.rows * info.hidden;
  second.width = static_cast<int>(info.hidden);
  second.splits = plan.splits;
  second.out_f32 = plan.rows_f32;

  // Measured: MXFP4 gains 3 to 5 % up to 32 tokens and loses nowhere; 16-bit weights, which come at
  // the memory's full rate, gain up to 6 % where they are few and lose 2 % where they are many.
  const std::int64_t most_hit = std::min(scratch.rows, info.num_experts);
  gemm.weights_evict_first =
      is_decoded(format_) ||
      most_hit * (first.expert_bytes + second.expert_bytes) <= kFewWeightBytes;
  return gemm;
}

void Sm90Experts::apply_unfused(const ExpertsArgs& args, const GroupedGemm& gemm,
                                const Scratch& scratch, const GemmPlan& plan,
                                const RoutingData& routing) const {
  static const ExpertsHooks kNone;
  const ExpertsHooks& hooks = args.hooks ? *args.hooks : kNone;
  const bool gated = is_gated(gemm.activation.kind);
  const std::int64_t width = gemm.phases[0].width, hidden = gemm.phases[1].width;
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

  GroupedGemm step = gemm;
  step.num_phases = 1;
  step.phases[0].out = scratch.gate_up;
  step.phases[0].out_pitch = (gated ? 2 : 1) * width;
  step.phases[0].epilogue = gated ? Epilogue::kStoreGateUp : Epilogue::kStore;
  grouped_gemm(step, format_, plan.tile, args.stream);
  const TensorView gate_up = view(scratch.gate_up, step.phases[0].out_pitch);
  call(hooks.after_gemm1, args.hidden_states, gate_up);

  const TensorView activated = view(scratch.activated, width);
  activate_rows(gemm.activation, dtype(), gate_up.data(), activated.data(), scratch.rows, width,
                routing.expert_offsets.as<const std::int32_t>() + gemm.num_experts, args.stream);
  call(hooks.after_activation, gate_up, activated);

  step.phases[0] = gemm.phases[1];
  step.overlap_previous = false;      // the hooks' work comes before
  step.counters = gemm.counters + 1;  // the first has moved its own
  grouped_gemm(step, format_, plan.tile, args.stream);
  call(hooks.after_gemm2, activated, view(scratch.rows_out, hidden));
}

void Sm90Experts::apply(const ExpertsArgs& args) const {
  const ProblemSize problem = core::check_experts_args(*this, args);
  check_args(args, dtype());
  FUSEDMOE_CHECK(variant_ != Variant::kUnfused || problem.intermediate % kPitchUnit == 0, "weights",
                 core::format("of intermediate size {}", problem.intermediate),
                 core::format("of a multiple of {}: hooks see rows without padding", kPitchUnit));
  if (problem.num_tokens == 0) return;
  const core::CurrentDevice current(args.stream.device);
  const GemmPlan plan = plan_for(problem, args.output.device());
  const Scratch scratch(problem, variant_, plan, args.workspace2);
  GroupedGemm gemm = make_problem(args, scratch, plan);
  const std::int64_t counters = work_counters(plan.tile, scratch.rows, problem.num_local_experts);

  if (batched()) {
    fill_bytes(TensorView(scratch.counters, DType::kI32, {counters}, args.output.device()), 0,
               args.stream);
    gemm.expert_num_tokens = args.expert_num_tokens.as<const std::int32_t>();
    gemm.capacity = problem.num_tokens;
    grouped_gemm(gemm, format_, plan.tile, args.stream);
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
  gemm.expert_num_tokens = routing.expert_num_tokens.as<const std::int32_t>();
  gemm.expert_offsets = routing.expert_offsets.as<const std::int32_t>();
  const std::int64_t slots = problem.num_tokens * problem.topk;
  if (variant_ != Variant::kUnfused && may_route_inline(slots, problem.num_local_experts)) {
    gemm.topk_ids = args.topk_ids.as<const std::int32_t>();
    gemm.num_slots = static_cast<int>(slots);
    gemm.local_experts = core::LocalExperts(args.expert_map, problem.num_local_experts);
    if (plan.rows_f32) gemm.phases[1].out_rows = routing.permuted_to_slot.as<const std::int32_t>();
  }
  gemm.overlap_previous = true;
  if (variant_ == Variant::kUnfused) {
    apply_unfused(args, gemm, scratch, plan, routing);
  } else {
    grouped_gemm(gemm, format_, plan.tile, args.stream);
  }

  Combine end;
  end.overlap_previous = variant_ != Variant::kUnfused;
  end.output = args.output;
  end.rows = scratch.rows_out;
  end.rows_f32 = plan.rows_f32;
  end.splits = plan.splits;
  end.split_pitch = scratch.rows * problem.hidden;
  if (!gemm.phases[1].out_rows) end.slot_to_permuted = routing.slot_to_permuted;
  end.topk_ids = args.topk_ids;
  end.local_experts = core::LocalExperts(args.expert_map, problem.num_local_experts);
  end.topk_weights = args.router_weight_on_input ? nullptr : args.topk_weights.as<const float>();
  end.topk = problem.topk;
  combine(end, args.stream);
}

}  // namespace

std::vector<std::shared_ptr<const Experts>> make_all_experts() {
  std::vector<std::shared_ptr<const Experts>> list;
  for (const WeightFormat format :
       {WeightFormat::kBF16, WeightFormat::kF16, WeightFormat::kMXFP4}) {
    for (const Variant variant :
         {Variant::kStandard, Variant::kBatchInvariant, Variant::kBatched, Variant::kUnfused}) {
      list.push_back(std::make_shared<Sm90Experts>(format, variant));
    }
  }
  return list;
}

}  // namespace fusedmoe::cuda
