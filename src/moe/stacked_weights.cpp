// ExpertWeights as views into stacked tensors: every expert's part of w13, w2 and what belongs to
// them.
#include <algorithm>

#include "core/check.h"
#include "fusedmoe/weights.h"
#include "quant/weight_layout.h"

namespace fusedmoe {
namespace {

using core::GlobalScale;
using core::num_blocks;
using core::WeightLayout;

struct Halves {
  TensorView gate, up;
};

// Rows [begin, end) step `step` of a fused matrix.
struct Rows {
  std::int64_t begin, end, step;
};

// Where gate (or the only first matrix) and up lie in the rows of w13.
struct Split {
  Rows gate, up;
  bool gated;

  Split(std::int64_t rows, bool is_gated, GateUpLayout layout) : gated(is_gated) {
    const std::int64_t half = rows / 2;
    gate = up = {0, rows, 1};
    if (!gated) return;
    switch (layout) {
      case GateUpLayout::kGateUp:
        gate = {0, half, 1};
        up = {half, rows, 1};
        return;
      case GateUpLayout::kUpGate:
        gate = {half, rows, 1};
        up = {0, half, 1};
        return;
      case GateUpLayout::kInterleaved:
        gate = {0, rows, 2};
        up = {1, rows, 2};
        return;
    }
    throw Error("gate_up_layout", core::to_string(static_cast<int>(layout)), "a GateUpLayout");
  }

  // Tensors with one entry along dimension 0 per row.
  Halves operator()(const TensorView& fused) const {
    if (!fused.defined()) return {};
    Halves halves{fused.slice(0, gate.begin, gate.end, gate.step), {}};
    if (gated) halves.up = fused.slice(0, up.begin, up.end, up.step);
    return halves;
  }
};

// Values as (E, out, stored in).
TensorView matrix_stack(const Tensor& stacked, const char* argument, bool transposed,
                        const WeightLayout& layout) {
  FUSEDMOE_CHECK_FAULT(stacked.defined(), kNull, argument, "undefined", "given");
  const auto dtypes = layout.values_dtypes;
  FUSEDMOE_CHECK_FAULT(layout.packing == 1 || stacked.dtype() == dtypes.front(), kDType, argument,
                       core::describe(stacked), std::string(name(dtypes.front())));
  FUSEDMOE_CHECK(!transposed || layout.packing == 1, "transposed", "true",
                 "false for packed values");
  if (stacked.rank() == 4 && layout.rows_contiguous) {
    constexpr std::int64_t kBlockBytes = 16;  // 32 elements
    FUSEDMOE_CHECK_FAULT(stacked.size(3) == kBlockBytes && stacked.contiguous(), kShape, argument,
                         core::describe(stacked), "contiguous (E, rows, blocks, 16)");
    return stacked.reshape({stacked.size(0), stacked.size(1), stacked.size(2) * kBlockBytes});
  }
  FUSEDMOE_CHECK_FAULT(stacked.rank() == 3, kShape, argument, core::describe(stacked), "of rank 3");
  return transposed ? stacked.transpose(1, 2) : static_cast<const TensorView&>(stacked);
}

void check_given(const Tensor& stacked, const char* argument, bool needed, const QuantScheme& s) {
  FUSEDMOE_CHECK_FAULT(!needed || stacked.defined(), kNull, argument, "undefined",
                       "given for " + name(s));
  if (!needed && stacked.defined()) throw Error::conflict(argument, name(s));
}

void check_companion(const Tensor& stacked, const char* argument, const Shape& shape) {
  if (!stacked.defined()) return;
  FUSEDMOE_CHECK_FAULT(stacked.shape() == shape, kShape, argument, core::describe(stacked),
                       "of shape " + to_string(shape));
}

// Numbers of which each expert has one, or one each for gate and up, as (E, 1) or (E, 2).
TensorView scalar_stack(const Tensor& stacked, const char* argument, std::int64_t num_experts,
                        bool pairs, bool shared = false) {
  if (!stacked.defined()) return {};
  const std::int64_t count = stacked.numel();
  const bool one_for_all = shared && count == 1 && stacked.rank() <= 1;
  const bool has_experts = stacked.rank() >= 1 && stacked.size(0) == num_experts;
  const bool single = has_experts && count == num_experts;
  const bool pair = pairs && stacked.rank() == 2 && has_experts && stacked.size(1) == 2;
  FUSEDMOE_CHECK_FAULT(
      stacked.contiguous() && (one_for_all || single || pair), kShape, argument,
      core::describe(stacked),
      core::format("({0}){1}{2}", num_experts,
                   pairs ? core::format(" or ({}, 2)", num_experts) : "", shared ? " or (1)" : ""));
  if (one_for_all && !single) {
    return TensorView(stacked.data(), stacked.dtype(), {num_experts, 1}, {0, 1}, stacked.device());
  }
  return stacked.reshape({num_experts, pair ? 2 : 1});
}

TensorView expert_of(const TensorView& stacked, std::int64_t index) {
  return stacked.defined() ? stacked.select(0, index) : TensorView();
}

// Element `which` of an expert's (1) or (2) numbers, as (1).
TensorView scalar_of(const TensorView& stacked, std::int64_t expert, std::int64_t which) {
  if (!stacked.defined()) return {};
  const TensorView row = stacked.select(0, expert);
  const std::int64_t index = std::min(which, row.size(0) - 1);
  return row.slice(0, index, index + 1);
}

/// Views may have more without memory of their own; each takes some here.
constexpr std::int64_t kMostExperts = 1 << 20;

class Stacks {
 public:
  Stacks(const ExpertWeights::Stacked& stacked, const QuantScheme& scheme, bool gated)
      : source_(stacked),
        scheme_(scheme),
        key_(scheme.weights),
        layout_(core::weight_layout(key_, "scheme")),
        w13_(matrix_stack(stacked.w13, "w13", stacked.transposed, layout_)),
        w2_(matrix_stack(stacked.w2, "w2", stacked.transposed, layout_)),
        num_experts_(w13_.size(0)),
        rows_(w13_.size(1)),
        split_(rows_, gated, stacked.gate_up_layout) {
    FUSEDMOE_CHECK_FAULT(num_experts_ <= kMostExperts, kShape, "w13", core::describe(stacked.w13),
                         core::format("of at most {} experts", kMostExperts));
    FUSEDMOE_CHECK_FAULT(!gated || rows_ % 2 == 0, kShape, "w13", core::describe(stacked.w13),
                         "of an even number of gate and up rows");
    check_values();
    check_companion(stacked.w13_bias, "w13_bias", {num_experts_, rows_});
    check_companion(stacked.w2_bias, "w2_bias", {num_experts_, hidden()});
    check_scales();
  }

  std::int64_t num_experts() const { return num_experts_; }
  std::int64_t hidden() const { return w2_.size(1); }
  std::int64_t intermediate() const { return split_.gated ? rows_ / 2 : rows_; }

  ExpertMatrices expert(std::int64_t e) const {
    ExpertMatrices result;
    const auto each = [&](const Halves& halves, TensorView WeightMatrix::*member) {
      result.gate.*member = halves.gate;
      result.up.*member = halves.up;
    };
    each(split_(w13_.select(0, e)), &WeightMatrix::values);
    each(split_(expert_of(source_.w13_bias, e)), &WeightMatrix::bias);
    place_scales(e, result);
    each(global_of_rows() ? split_(expert_of(source_.w13_global_scales, e))
                          : scalars(w13_global_, e),
         &WeightMatrix::global_scale);
    each(scalars(w13_input_, e), &WeightMatrix::input_scale);

    WeightMatrix& down = result.down;
    down.values = w2_.select(0, e);
    down.bias = expert_of(source_.w2_bias, e);
    down.scales = expert_of(w2_scales_, e);
    down.zero_points = expert_of(source_.w2_zero_points, e);
    down.global_scale =
        global_of_rows() ? expert_of(source_.w2_global_scales, e) : scalar_of(w2_global_, e, 0);
    down.input_scale = scalar_of(w2_input_, e, 0);
    return result;
  }

 private:
  void check_values() const {
    const Shape w13 = layout_.values_shape(rows_, hidden());
    const Shape w2 = layout_.values_shape(hidden(), intermediate());
    // The hidden size comes from w2, so one with its dimensions exchanged would look like a wrong
    // w13.
    const std::int64_t columns = w13_.size(2);
    FUSEDMOE_CHECK_FAULT(w13[1] == columns || w2_.size(1) != intermediate(), kShape, "w2",
                         core::describe(source_.w2),
                         core::format("of {} rows for each expert, the hidden size of w13",
                                      columns * layout_.packing));
    check_companion(source_.w13, "w13", stacked_shape(source_.w13, w13));
    check_companion(source_.w2, "w2", stacked_shape(source_.w2, w2));
  }

  // (E, rows, stored columns) in the order of dimensions of `stacked`.
  Shape stacked_shape(const Tensor& stacked, const Shape& matrix) const {
    if (source_.transposed) return {num_experts_, matrix[1], matrix[0]};
    if (stacked.rank() == 3) return {num_experts_, matrix[0], matrix[1]};
    return {num_experts_, matrix[0], matrix[1] / stacked.size(3), stacked.size(3)};
  }

  void check_scales() {
    const auto& s = source_;
    check_given(s.w13_scales, "w13_scales", layout_.quantized(), scheme_);
    check_given(s.w2_scales, "w2_scales", layout_.quantized(), scheme_);
    check_given(s.w13_zero_points, "w13_zero_points", layout_.zero_points, scheme_);
    check_given(s.w2_zero_points, "w2_zero_points", layout_.zero_points, scheme_);
    const bool global = layout_.global_scale != GlobalScale::kNone;
    check_given(s.w13_global_scales, "w13_global_scales", global, scheme_);
    check_given(s.w2_global_scales, "w2_global_scales", global, scheme_);
    w13_input_ =
        scalar_stack(s.w13_input_scales, "w13_input_scales", num_experts_, split_.gated, true);
    w2_input_ = scalar_stack(s.w2_input_scales, "w2_input_scales", num_experts_, false, true);
    if (global_of_rows()) {
      check_companion(s.w13_global_scales, "w13_global_scales", globals(rows_, hidden()));
      check_companion(s.w2_global_scales, "w2_global_scales", globals(hidden(), intermediate()));
    } else {
      w13_global_ =
          scalar_stack(s.w13_global_scales, "w13_global_scales", num_experts_, split_.gated);
      w2_global_ = scalar_stack(s.w2_global_scales, "w2_global_scales", num_experts_, false);
    }
    if (!layout_.quantized()) return;
    if (per_tensor()) {
      const TensorView w2 = scalar_stack(s.w2_scales, "w2_scales", num_experts_, false);
      w13_scales_ = scalar_stack(s.w13_scales, "w13_scales", num_experts_, split_.gated);
      w2_scales_ = w2.reshape({num_experts_, 1, 1});
      return;
    }
    const Shape w13 = grid(rows_, hidden()), w2 = grid(hidden(), intermediate());
    check_companion(s.w13_scales, "w13_scales", w13);
    check_companion(s.w2_scales, "w2_scales", w2);
    check_companion(s.w13_zero_points, "w13_zero_points", w13);
    check_companion(s.w2_zero_points, "w2_zero_points", w2);
    w13_scales_ = s.w13_scales;
    w2_scales_ = s.w2_scales;
    FUSEDMOE_CHECK(
        !split_.gated || s.gate_up_layout != GateUpLayout::kInterleaved || key_.group.rows <= 1,
        "gate_up_layout", "interleaved", "in halves: scale blocks span several rows");
  }

  /// Whether every row has second-level scales of its own.
  bool global_of_rows() const {
    return layout_.global_scale == GlobalScale::kPerRow ||
           layout_.global_scale == GlobalScale::kPerBlock;
  }

  Shape globals(std::int64_t out, std::int64_t in) const {
    const Shape one = layout_.global_shape(out, in);
    return one.rank() == 1 ? Shape{num_experts_, one[0]} : Shape{num_experts_, one[0], one[1]};
  }

  bool per_tensor() const { return key_.group == GroupShape{-1, -1}; }

  Shape grid(std::int64_t out, std::int64_t in) const {
    return {num_experts_, num_blocks(out, key_.group.rows), num_blocks(in, key_.group.cols)};
  }

  Halves scalars(const TensorView& stack, std::int64_t e) const {
    return {scalar_of(stack, e, 0), split_.gated ? scalar_of(stack, e, 1) : TensorView()};
  }

  void place_scales(std::int64_t e, ExpertMatrices& result) const {
    if (!layout_.quantized()) return;
    if (per_tensor()) {
      const Halves halves = scalars(w13_scales_, e);
      result.gate.scales = halves.gate.reshape({1, 1});
      if (split_.gated) result.up.scales = halves.up.reshape({1, 1});
      return;
    }
    place_blocks(e, split_.gate, result.gate);
    if (split_.gated) place_blocks(e, split_.up, result.up);
  }

  // The blocks that hold `rows`; the first row may lie inside its block.
  void place_blocks(std::int64_t e, const Rows& rows, WeightMatrix& matrix) const {
    const std::int64_t extent = key_.group.rows;
    const auto part = [&](const TensorView& stack) {
      if (!stack.defined()) return TensorView();
      const TensorView blocks = stack.select(0, e);
      if (extent < 0) return blocks;
      if (extent == 1) return blocks.slice(0, rows.begin, rows.end, rows.step);
      return blocks.slice(0, rows.begin / extent, num_blocks(rows.end, extent));
    };
    matrix.scales = part(w13_scales_);
    matrix.zero_points = part(source_.w13_zero_points);
    if (extent > 1) matrix.first_row = rows.begin % extent;
  }

  const ExpertWeights::Stacked& source_;
  const QuantScheme& scheme_;
  const QuantKey& key_;
  WeightLayout layout_;
  TensorView w13_, w2_;  // (E, out, stored in)
  std::int64_t num_experts_, rows_;
  Split split_;
  TensorView w13_scales_, w2_scales_;  // (E, blocks, blocks); w13 per tensor (E, 1) or (E, 2)
  TensorView w13_global_, w2_global_, w13_input_, w2_input_;  // (E, 1) or (E, 2)
};

}  // namespace

namespace {

/// Tiled scales of a matrix of `rows` x `columns` for each expert as flat ones.
Tensor untiled(const Tensor& tiled, const char* argument, const Shape& flat) {
  FUSEDMOE_CHECK_FAULT(tiled.defined() && bits(tiled.dtype()) == 8, kDType, argument,
                       core::describe(tiled), "tiles of one-byte scales");
  const Shape shape = tiled_scales_shape(flat);
  FUSEDMOE_CHECK_FAULT(tiled.numel() == shape.numel() && tiled.contiguous(), kShape, argument,
                       core::describe(tiled),
                       core::format("contiguous, {} bytes for {} in tiles of 128 x 4",
                                    shape.numel(), to_string(flat)));
  core::check_device(tiled, argument, {});
  Tensor result = Tensor::empty(flat, tiled.dtype());
  untile_scales(tiled.reshape(shape), result);
  return result;
}

/// The stack with e2m1 as bytes and flat scales.
ExpertWeights::Stacked stored_form(const ExpertWeights::Stacked& stacked, const QuantKey& key,
                                   bool gated) {
  ExpertWeights::Stacked result = stacked;
  result.scale_layout = ScaleLayout::kFlat;
  if (key.value == DType::kE2M1) {
    result.w13 = Tensor(core::as_bytes(stacked.w13, "w13"), stacked.w13.owner());
    result.w2 = Tensor(core::as_bytes(stacked.w2, "w2"), stacked.w2.owner());
  }
  if (stacked.scale_layout == ScaleLayout::kFlat) return result;
  FUSEDMOE_CHECK(key.scale && bits(*key.scale) == 8 && key.group.rows == 1 && key.group.cols > 0,
                 "scale_layout", "kTiled128x4", "kFlat for " + name(QuantScheme{key, {}}));
  for (const auto& [values, argument] :
       {std::pair{&result.w13, "w13"}, std::pair{&result.w2, "w2"}}) {
    FUSEDMOE_CHECK_FAULT(values->rank() >= 3, kShape, argument, core::describe(*values),
                         "of rank 3");
  }
  const int row_dim = stacked.transposed ? 2 : 1;
  const std::int64_t experts = result.w13.size(0), rows = result.w13.size(row_dim);
  const std::int64_t hidden = result.w2.size(row_dim), inner = gated ? rows / 2 : rows;
  result.w13_scales = untiled(stacked.w13_scales, "w13_scales",
                              {experts, rows, num_blocks(hidden, key.group.cols)});
  result.w2_scales =
      untiled(stacked.w2_scales, "w2_scales", {experts, hidden, num_blocks(inner, key.group.cols)});
  return result;
}

}  // namespace

ExpertWeights ExpertWeights::from_stacked(const Stacked& given, QuantScheme scheme,
                                          Activation activation, ActivationParams params) {
  FUSEDMOE_CHECK_SUPPORTED(!scheme.down, kQuantScheme, "scheme", name(scheme),
                           "one format for all matrices of stacked tensors");
  const Stacked stacked = stored_form(given, scheme.weights, is_gated(activation));
  const Stacks stacks(stacked, scheme, is_gated(activation));
  ExpertWeights weights;
  weights.scheme = scheme;
  weights.hidden = stacks.hidden();
  weights.intermediate = stacks.intermediate();
  weights.activation = activation;
  weights.activation_params = params;
  for (std::int64_t e = 0; e < stacks.num_experts(); ++e) {
    weights.experts.push_back(stacks.expert(e));
  }
  for (const Tensor* tensor :
       {&stacked.w13, &stacked.w13_scales, &stacked.w13_zero_points, &stacked.w13_global_scales,
        &stacked.w13_input_scales, &stacked.w13_bias, &stacked.w2, &stacked.w2_scales,
        &stacked.w2_zero_points, &stacked.w2_global_scales, &stacked.w2_input_scales,
        &stacked.w2_bias}) {
    if (tensor->owner()) weights.owners.push_back(tensor->owner());
    weights.borrowed |= tensor->defined() && !tensor->owner() && tensor->numel() > 0;
  }
  weights.validate();
  return weights;
}

}  // namespace fusedmoe
