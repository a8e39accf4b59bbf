// ExpertWeights: checks, sizes, and views into stacked tensors.
#include "fusedmoe/weights.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace fusedmoe {
namespace {

constexpr std::int64_t kBlock = 32;  // elements that share one MXFP4 scale

bool is_mxfp4(const QuantScheme& scheme) {
  return scheme.weights == schemes::mxfp4_w4a16().weights;
}

bool is_bias_dtype(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

void check_shape(const TensorView& view, const std::string& argument, const Shape& shape) {
  FUSEDMOE_CHECK(view.defined(), argument, "undefined", "given, of shape " + to_string(shape));
  FUSEDMOE_CHECK(view.shape() == shape, argument, core::describe(view),
                 "of shape " + to_string(shape));
}

// What every view must satisfy so that reading an element through its strides is defined.
void check_memory(const TensorView& view, const std::string& argument) {
  FUSEDMOE_CHECK(view.device().is_cpu(), argument, to_string(view.device()), "in host memory");
  for (std::int64_t stride : view.strides()) {
    FUSEDMOE_CHECK(stride >= 0, argument, "strides " + to_string(view.strides()), "not negative");
  }
  const auto width = static_cast<std::uintptr_t>(std::max(bits(view.dtype()) / 8, 1));
  FUSEDMOE_CHECK(reinterpret_cast<std::uintptr_t>(view.data()) % width == 0, argument, "misaligned",
                 fmt::format("aligned to its element size, {} bytes", width));
}

void check_rows_contiguous(const TensorView& view, const std::string& argument) {
  FUSEDMOE_CHECK(view.stride(1) == 1 || view.size(1) == 1, argument,
                 "strides " + to_string(view.strides()), "contiguous along a row");
}

void check_scales_finite(const TensorView& scales, const std::string& argument) {
  constexpr int kNan = 255;
  for (std::int64_t row = 0; row < scales.size(0); ++row) {
    const auto* codes = scales.as<const std::uint8_t>() + row * scales.stride(0);
    const void* found = std::memchr(codes, kNan, static_cast<std::size_t>(scales.size(1)));
    FUSEDMOE_CHECK(!found, argument,
                   fmt::format("255 (NaN) at row {}, block {}", row,
                               static_cast<const std::uint8_t*>(found) - codes),
                   "E8M0 codes from 0 to 254");
  }
}

class Validator {
 public:
  explicit Validator(const ExpertWeights& weights)
      : weights_(weights), mxfp4_(is_mxfp4(weights.scheme)) {
    FUSEDMOE_CHECK(!weights.scheme.activations &&
                       (mxfp4_ || weights.scheme == schemes::unquantized(DType::kBF16) ||
                        weights.scheme == schemes::unquantized(DType::kF16) ||
                        weights.scheme == schemes::unquantized(DType::kF32)),
                   "weights.scheme", name(weights.scheme), "f32, f16, bf16 or mxfp4_w4a16");
  }

  // rows x cols is the shape of the matrix before packing.
  void check(const WeightMatrix& matrix, const std::string& argument, std::int64_t rows,
             std::int64_t cols) const {
    const std::string values = argument + ".values", scales = argument + ".scales";
    check_shape(matrix.values, values, {rows, mxfp4_ ? cols / 2 : cols});
    const DType dtype = mxfp4_ ? DType::kU8 : weights_.scheme.weights.value;
    FUSEDMOE_CHECK(matrix.values.dtype() == dtype, values, core::describe(matrix.values),
                   std::string(name(dtype)));
    check_memory(matrix.values, values);
    if (mxfp4_) {
      check_rows_contiguous(matrix.values, values);
      check_shape(matrix.scales, scales, {rows, cols / kBlock});
      FUSEDMOE_CHECK(matrix.scales.dtype() == DType::kU8 || matrix.scales.dtype() == DType::kE8M0,
                     scales, core::describe(matrix.scales), "u8 or e8m0");
      check_memory(matrix.scales, scales);
      check_rows_contiguous(matrix.scales, scales);
      check_scales_finite(matrix.scales, scales);
    } else {
      FUSEDMOE_CHECK(!matrix.scales.defined(), scales, core::describe(matrix.scales),
                     "undefined for " + name(weights_.scheme));
    }
    if (matrix.bias.defined()) {
      check_shape(matrix.bias, argument + ".bias", {rows});
      FUSEDMOE_CHECK(is_bias_dtype(matrix.bias.dtype()), argument + ".bias",
                     core::describe(matrix.bias), "f32, bf16 or f16");
      check_memory(matrix.bias, argument + ".bias");
    }
  }

 private:
  const ExpertWeights& weights_;
  bool mxfp4_;
};

std::int64_t stored_bytes(const WeightMatrix& matrix) {
  std::int64_t total = 0;
  for (const TensorView* view : {&matrix.values, &matrix.scales, &matrix.bias}) {
    if (view->defined()) total += view->nbytes();
  }
  return total;
}

struct Halves {
  TensorView gate, up;
};

// Splits dimension 0 of 2I rows.
Halves split(const TensorView& fused, GateUpLayout layout) {
  const std::int64_t rows = fused.size(0);
  switch (layout) {
    case GateUpLayout::kGateUp:
      return {fused.slice(0, 0, rows / 2), fused.slice(0, rows / 2, rows)};
    case GateUpLayout::kUpGate:
      return {fused.slice(0, rows / 2, rows), fused.slice(0, 0, rows / 2)};
    case GateUpLayout::kInterleaved:
      return {fused.slice(0, 0, rows, 2), fused.slice(0, 1, rows, 2)};
  }
  throw Error("gate_up_layout", fmt::to_string(static_cast<int>(layout)), "a GateUpLayout");
}

// Stacked values as (E, out, in), or (E, out, in / 2) for MXFP4.
TensorView matrix_stack(const Tensor& stacked, const char* argument, bool transposed, bool mxfp4) {
  FUSEDMOE_CHECK(stacked.defined(), argument, "undefined", "given");
  if (mxfp4) {
    FUSEDMOE_CHECK(stacked.dtype() == DType::kU8, argument, core::describe(stacked), "u8");
    FUSEDMOE_CHECK(!transposed, "transposed", "true", "false for MXFP4");
    constexpr std::int64_t kBlockBytes = kBlock / 2;
    if (stacked.rank() == 4) {
      FUSEDMOE_CHECK(stacked.size(3) == kBlockBytes && stacked.contiguous(), argument,
                     core::describe(stacked), "contiguous (E, rows, blocks, 16)");
      return stacked.reshape({stacked.size(0), stacked.size(1), stacked.size(2) * kBlockBytes});
    }
  }
  FUSEDMOE_CHECK(stacked.rank() == 3, argument, core::describe(stacked), "of rank 3");
  return transposed ? stacked.transpose(1, 2) : static_cast<const TensorView&>(stacked);
}

// Optional tensors beside the values: expert `index` of them, or undefined.
TensorView expert_of(const Tensor& stacked, std::int64_t index) {
  return stacked.defined() ? stacked.select(0, index) : TensorView();
}

void check_companion(const Tensor& stacked, const char* argument, const Shape& shape,
                     bool required) {
  FUSEDMOE_CHECK(stacked.defined() || !required, argument, "undefined",
                 "given, of shape " + to_string(shape));
  if (stacked.defined()) check_shape(stacked, argument, shape);
}

}  // namespace

bool ExpertWeights::has_bias() const {
  for (const ExpertMatrices& expert : experts) {
    if (expert.gate.bias.defined() || expert.up.bias.defined() || expert.down.bias.defined()) {
      return true;
    }
  }
  return false;
}

std::int64_t ExpertWeights::nbytes() const {
  std::int64_t total = 0;
  for (const ExpertMatrices& expert : experts) {
    total += stored_bytes(expert.gate) + stored_bytes(expert.up) + stored_bytes(expert.down);
  }
  return total;
}

void ExpertWeights::validate() const {
  FUSEDMOE_CHECK(!experts.empty(), "weights.experts", "0 experts", "at least 1");
  FUSEDMOE_CHECK(hidden > 0, "weights.hidden", fmt::to_string(hidden), "positive");
  FUSEDMOE_CHECK(intermediate > 0, "weights.intermediate", fmt::to_string(intermediate),
                 "positive");
  if (is_mxfp4(scheme)) {
    FUSEDMOE_CHECK(hidden % kBlock == 0, "weights.hidden", fmt::to_string(hidden),
                   "a multiple of 32, the MXFP4 block");
    FUSEDMOE_CHECK(intermediate % kBlock == 0, "weights.intermediate", fmt::to_string(intermediate),
                   "a multiple of 32, the MXFP4 block");
  }
  resolve(activation, activation_params);
  const bool gated = is_gated(activation);
  const Validator validator(*this);
  const ExpertMatrices& first = experts.front();
  for (std::size_t e = 0; e < experts.size(); ++e) {
    const ExpertMatrices& expert = experts[e];
    const std::string prefix = fmt::format("weights.experts[{}]", e);
    validator.check(expert.gate, prefix + ".gate", intermediate, hidden);
    if (gated) {
      validator.check(expert.up, prefix + ".up", intermediate, hidden);
    } else {
      FUSEDMOE_CHECK(!expert.up.values.defined(), prefix + ".up.values",
                     core::describe(expert.up.values),
                     fmt::format("undefined for {}", name(activation)));
    }
    validator.check(expert.down, prefix + ".down", hidden, intermediate);
    const bool bias13 = first.gate.bias.defined();
    FUSEDMOE_CHECK(expert.gate.bias.defined() == bias13 &&
                       expert.up.bias.defined() == (bias13 && gated) &&
                       expert.down.bias.defined() == first.down.bias.defined(),
                   prefix + ".bias", "given for some matrices only",
                   "given for both or none of gate and up, and alike for every expert");
  }
}

ExpertWeights ExpertWeights::from_stacked(const Stacked& stacked, QuantScheme scheme,
                                          Activation activation, ActivationParams params) {
  const bool mxfp4 = is_mxfp4(scheme);
  const bool gated = is_gated(activation);
  const TensorView w13 = matrix_stack(stacked.w13, "w13", stacked.transposed, mxfp4);
  const TensorView w2 = matrix_stack(stacked.w2, "w2", stacked.transposed, mxfp4);
  const std::int64_t num_experts = w13.size(0), rows = w13.size(1);
  FUSEDMOE_CHECK(!gated || rows % 2 == 0, "w13", core::describe(stacked.w13),
                 "of an even number of gate and up rows");

  ExpertWeights weights;
  weights.scheme = scheme;
  weights.hidden = mxfp4 ? w13.size(2) * 2 : w13.size(2);
  weights.intermediate = gated ? rows / 2 : rows;
  weights.activation = activation;
  weights.activation_params = params;
  const std::int64_t hidden = weights.hidden, intermediate = weights.intermediate;

  check_shape(w2, "w2", {num_experts, hidden, mxfp4 ? intermediate / 2 : intermediate});
  check_companion(stacked.w13_bias, "w13_bias", {num_experts, rows}, false);
  check_companion(stacked.w2_bias, "w2_bias", {num_experts, hidden}, false);
  if (mxfp4) {
    check_companion(stacked.w13_scales, "w13_scales", {num_experts, rows, hidden / kBlock}, true);
    check_companion(stacked.w2_scales, "w2_scales", {num_experts, hidden, intermediate / kBlock},
                    true);
  } else {
    FUSEDMOE_CHECK(!stacked.w13_scales.defined() && !stacked.w2_scales.defined(), "scales", "given",
                   "undefined for " + name(weights.scheme));
  }

  const auto split_or_whole = [&](const TensorView& fused) {
    if (!fused.defined()) return Halves{};
    return gated ? split(fused, stacked.gate_up_layout) : Halves{fused, TensorView()};
  };
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const Halves values = split_or_whole(w13.select(0, e));
    const Halves scales = split_or_whole(expert_of(stacked.w13_scales, e));
    const Halves bias = split_or_whole(expert_of(stacked.w13_bias, e));
    const auto matrix = [](const TensorView& value, const TensorView& scale,
                           const TensorView& offset) {
      WeightMatrix result;
      result.values = value;
      result.scales = scale;
      result.bias = offset;
      return result;
    };
    weights.experts.push_back(
        {matrix(values.gate, scales.gate, bias.gate), matrix(values.up, scales.up, bias.up),
         matrix(w2.select(0, e), expert_of(stacked.w2_scales, e), expert_of(stacked.w2_bias, e))});
  }
  for (const Tensor* tensor : {&stacked.w13, &stacked.w13_scales, &stacked.w13_bias, &stacked.w2,
                               &stacked.w2_scales, &stacked.w2_bias}) {
    if (tensor->owner()) weights.owners.push_back(tensor->owner());
  }
  weights.validate();
  return weights;
}

}  // namespace fusedmoe
