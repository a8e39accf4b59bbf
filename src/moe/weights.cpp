// ExpertWeights: checks, sizes, and views into stacked tensors.
#include "fusedmoe/weights.h"
#include "core/parallel.h"
#include "moe/experts_args.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "fusedmoe/quant.h"
#include "quant/quantize.h"
#include "quant/weight_layout.h"

namespace fusedmoe {
namespace {

using core::GlobalScale;
using core::num_blocks;
using core::WeightLayout;

void check_shape(const TensorView& view, const std::string& argument, const Shape& shape) {
  FUSEDMOE_CHECK_FAULT(view.defined(), kNull, argument, "undefined",
                       "given, of shape " + to_string(shape));
  FUSEDMOE_CHECK_FAULT(view.shape() == shape, kShape, argument, core::describe(view),
                       "of shape " + to_string(shape));
}

void check_dtype(const TensorView& view, const std::string& argument,
                 std::span<const DType> dtypes) {
  FUSEDMOE_CHECK_FAULT(std::find(dtypes.begin(), dtypes.end(), view.dtype()) != dtypes.end(),
                       kDType, argument, core::describe(view), core::names(dtypes));
}

void check_undefined(const TensorView& view, const std::string& argument, const QuantKey& key) {
  FUSEDMOE_CHECK(!view.defined(), argument, core::describe(view),
                 "undefined for " + name(QuantScheme{key, {}}));
}

// What every view must satisfy so that reading an element through its strides is defined.
void check_memory(const TensorView& view, const std::string& argument, Device device) {
  core::check_device(view, argument, device);
  for (std::int64_t stride : view.strides()) {
    FUSEDMOE_CHECK_FAULT(stride >= 0, kLayout, argument, "strides " + to_string(view.strides()),
                         "not negative");
  }
  const auto width = static_cast<std::uintptr_t>(std::max(bits(view.dtype()) / 8, 1));
  FUSEDMOE_CHECK_FAULT(reinterpret_cast<std::uintptr_t>(view.data()) % width == 0, kAlignment,
                       argument, "misaligned",
                       core::format("aligned to its element size, {} bytes", width));
}

void check_rows_contiguous(const TensorView& view, const std::string& argument) {
  FUSEDMOE_CHECK_FAULT(view.stride(1) == 1 || view.size(1) == 1, kLayout, argument,
                       "strides " + to_string(view.strides()), "contiguous along a row");
}

// `code` is the dtype that the bytes of u8 scales stand for.
void check_scales_finite(const TensorView& scales, DType code, const std::string& argument) {
  if (!scales.device().is_cpu()) return;
  const std::int64_t rows = scales.size(0), cols = scales.size(1), step = scales.stride(1);
  const DType dtype = scales.dtype() == DType::kU8 ? code : scales.dtype();
  const bool e8m0 = dtype == DType::kE8M0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t begin = row * scales.stride(0);
    // Millions of bytes of which none should be 255.
    if (e8m0 && step == 1 &&
        !std::memchr(scales.as<const char>() + begin, 255, static_cast<std::size_t>(cols))) {
      continue;
    }
    for (std::int64_t block = 0; block < cols; ++block) {
      const float value = load_f32(scales.data(), dtype, begin + block * step);
      FUSEDMOE_CHECK(std::isfinite(value), argument,
                     core::format("{} at row {}, block {}",
                                  e8m0 ? "255 (NaN)" : core::to_string(value), row, block),
                     e8m0 ? "E8M0 codes from 0 to 254" : "finite");
    }
  }
}

// (rows), or by blocks.
void check_global_scale_finite(const TensorView& scale, const std::string& argument) {
  if (scale.rank() == 2) return check_scales_finite(scale, scale.dtype(), argument);
  if (!scale.device().is_cpu()) return;
  for (std::int64_t row = 0; row < scale.size(0); ++row) {
    const float value = scale.as<const float>()[row * scale.stride(0)];
    FUSEDMOE_CHECK(std::isfinite(value), argument, core::format("{} at {}", value, row), "finite");
  }
}

void check_input_scale_positive(const TensorView& scale, const std::string& argument) {
  if (!scale.device().is_cpu()) return;
  const float value = *scale.as<const float>();
  FUSEDMOE_CHECK(std::isfinite(value) && value > 0, argument, core::to_string(value),
                 "finite and positive");
}

// A scale that the scheme does not use is not looked at: checkpoints for static scales have them.
bool needs_input_scale(const std::optional<QuantKey>& activations) {
  return activations && (!activations->dynamic || activations->global_scale);
}

class MatrixChecker {
 public:
  /// `reads_scales`: their values, too.
  MatrixChecker(const QuantKey& key, Device device, bool reads_scales = true)
      : key_(key),
        layout_(core::weight_layout(key, "weights.scheme")),
        device_(device),
        reads_scales_(reads_scales) {}

  // out x in is the shape of the matrix before packing.
  void check(const WeightMatrix& matrix, const std::string& argument, std::int64_t out,
             std::int64_t in) const {
    const std::string values = argument + ".values";
    const bool e2m1 = key_.value == DType::kE2M1;
    const TensorView stored = e2m1 ? core::as_bytes(matrix.values, values) : matrix.values;
    check_shape(stored, values, layout_.values_shape(out, in));
    check_dtype(stored, values, layout_.values_dtypes);
    check_memory(stored, values);
    if (layout_.rows_contiguous) check_rows_contiguous(stored, values);
    check_scales(matrix, argument, out, in);
    check_global_scale(matrix.global_scale, argument + ".global_scale", out, in);
    if (!matrix.bias.defined()) return;
    const std::string bias = argument + ".bias";
    check_shape(matrix.bias, bias, {out});
    FUSEDMOE_CHECK_FAULT(core::is_activation_dtype(matrix.bias.dtype()), kDType, bias,
                         core::describe(matrix.bias), "f32, bf16 or f16");
    check_memory(matrix.bias, bias);
  }

 private:
  void check_memory(const TensorView& view, const std::string& argument) const {
    fusedmoe::check_memory(view, argument, device_);
  }

  void check_scales(const WeightMatrix& matrix, const std::string& argument, std::int64_t out,
                    std::int64_t in) const {
    const std::string scales = argument + ".scales", zero_points = argument + ".zero_points";
    if (!layout_.zero_points) check_undefined(matrix.zero_points, zero_points, key_);
    if (!layout_.quantized()) return check_undefined(matrix.scales, scales, key_);
    check_first(matrix.first_row, argument + ".first_row", key_.group.rows);
    const bool blocks = layout_.global_scale == GlobalScale::kPerBlock;
    check_first(matrix.first_col, argument + ".first_col", blocks ? 1 : key_.group.cols);
    const Shape grid{num_blocks(out, key_.group.rows, matrix.first_row),
                     num_blocks(in, key_.group.cols, matrix.first_col)};
    check_shape(matrix.scales, scales, grid);
    check_dtype(matrix.scales, scales, layout_.scales_dtypes);
    check_memory(matrix.scales, scales);
    if (reads_scales_) check_scales_finite(matrix.scales, *key_.scale, scales);
    if (!layout_.zero_points) return;
    check_shape(matrix.zero_points, zero_points, grid);
    FUSEDMOE_CHECK_FAULT(matrix.zero_points.dtype() == DType::kU8, kDType, zero_points,
                         core::describe(matrix.zero_points), "u8");
    check_memory(matrix.zero_points, zero_points);
  }

  static void check_first(std::int64_t first, const std::string& argument, std::int64_t extent) {
    const std::int64_t limit = std::max<std::int64_t>(extent, 1);
    FUSEDMOE_CHECK(first >= 0 && first < limit, argument, core::to_string(first),
                   core::format("in [0, {}), the extent of a scale block", limit));
  }

  void check_global_scale(const TensorView& view, const std::string& argument, std::int64_t out,
                          std::int64_t in) const {
    if (layout_.global_scale == GlobalScale::kNone) return check_undefined(view, argument, key_);
    check_shape(view, argument, layout_.global_shape(out, in));
    FUSEDMOE_CHECK_FAULT(view.dtype() == layout_.global_dtype(), kDType, argument,
                         core::describe(view), std::string(name(layout_.global_dtype())));
    check_memory(view, argument);
    if (reads_scales_) check_global_scale_finite(view, argument);
  }

  const QuantKey& key_;
  WeightLayout layout_;
  Device device_;
  bool reads_scales_;
};

class InputScaleChecker {
 public:
  InputScaleChecker(const std::optional<QuantKey>& activations, Device device)
      : needed_(needs_input_scale(activations)), device_(device) {}

  void check(const TensorView& view, const std::string& argument) const {
    if (!needed_) return;
    check_shape(view, argument, {1});
    FUSEDMOE_CHECK_FAULT(view.dtype() == DType::kF32, kDType, argument, core::describe(view),
                         "f32");
    check_memory(view, argument, device_);
    check_input_scale_positive(view, argument);
  }

 private:
  bool needed_;
  Device device_;
};

std::int64_t stored_bytes(const WeightMatrix& matrix) {
  std::int64_t total = 0;
  for (const TensorView* view : {&matrix.values, &matrix.scales, &matrix.zero_points,
                                 &matrix.global_scale, &matrix.input_scale, &matrix.bias}) {
    if (view->defined()) total += view->nbytes();
  }
  return total;
}

void check_even(std::int64_t size, const char* argument) {
  FUSEDMOE_CHECK_FAULT(size % 2 == 0, kShape, argument, core::to_string(size),
                       "even: e2m1 packs two per byte");
}

}  // namespace

namespace core {

void check_matrix(const WeightMatrix& matrix, const QuantKey& key, const std::string& argument,
                  std::int64_t out, std::int64_t in) {
  MatrixChecker(key, matrix.values.device()).check(matrix, argument, out, in);
}

void check_scale_values(const WeightMatrix& matrix, const QuantScheme& scheme,
                        const std::string& argument) {
  if (matrix.scales) {
    check_scales_finite(matrix.scales, *scheme.weights.scale, argument + ".scales");
  }
  if (matrix.global_scale) {
    check_global_scale_finite(matrix.global_scale, argument + ".global_scale");
  }
  if (needs_input_scale(scheme.activations)) {
    check_input_scale_positive(matrix.input_scale, argument + ".input_scale");
  }
}

}  // namespace core

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

Device ExpertWeights::device() const {
  return experts.empty() ? Device{} : experts.front().gate.values.device();
}

void ExpertWeights::validate() const {
  core::check_weights(*this, true);
}

void core::check_weights(const ExpertWeights& weights, bool reads_scales) {
  const std::vector<ExpertMatrices>& experts = weights.experts;
  const QuantScheme& scheme = weights.scheme;
  const std::int64_t hidden = weights.hidden, intermediate = weights.intermediate;
  const Device device = weights.device();
  FUSEDMOE_CHECK_FAULT(!experts.empty(), kNull, "weights.experts", "0 experts", "at least 1");
  FUSEDMOE_CHECK(hidden > 0, "weights.hidden", core::to_string(hidden), "positive");
  FUSEDMOE_CHECK(intermediate > 0, "weights.intermediate", core::to_string(intermediate),
                 "positive");
  const MatrixChecker checker(scheme.weights, device, reads_scales);
  const MatrixChecker of_down(scheme.down_weights(), device, reads_scales);
  const InputScaleChecker input_scale(scheme.activations, device);
  if (scheme.weights.value == DType::kE2M1) check_even(hidden, "weights.hidden");
  if (scheme.down_weights().value == DType::kE2M1) check_even(intermediate, "weights.intermediate");
  resolve(weights.activation, weights.activation_params);
  const bool gated = is_gated(weights.activation);
  const ExpertMatrices& first = experts.front();
  for (std::size_t e = 0; e < experts.size(); ++e) {
    const ExpertMatrices& expert = experts[e];
    const std::string prefix = core::format("weights.experts[{}]", e);
    const auto check = [&](const WeightMatrix& matrix, const char* part, std::int64_t out,
                           std::int64_t in) {
      (&matrix == &expert.down ? of_down : checker).check(matrix, prefix + part, out, in);
      input_scale.check(matrix.input_scale, prefix + part + ".input_scale");
    };
    check(expert.gate, ".gate", intermediate, hidden);
    if (gated) {
      check(expert.up, ".up", intermediate, hidden);
    } else {
      FUSEDMOE_CHECK(!expert.up.values.defined(), prefix + ".up.values",
                     core::describe(expert.up.values),
                     core::format("undefined for {}", name(weights.activation)));
    }
    check(expert.down, ".down", hidden, intermediate);
    const bool bias13 = first.gate.bias.defined();
    FUSEDMOE_CHECK(expert.gate.bias.defined() == bias13 &&
                       expert.up.bias.defined() == (bias13 && gated) &&
                       expert.down.bias.defined() == first.down.bias.defined(),
                   prefix + ".bias", "given for some matrices only",
                   "given for both or none of gate and up, and alike for every expert");
  }
}

namespace {

/// The only scale of a matrix.
float scale_of(const WeightMatrix& matrix) {
  return load_f32(matrix.scales.data(), matrix.scales.dtype(), 0);
}

/// Codes of `half` for the scale of the other one.
void take_scale(WeightMatrix& half, const WeightMatrix& other,
                std::vector<std::shared_ptr<const void>>& owners) {
  const TensorView old = half.values;
  const QuantKey key = keys::e4m3_tensor();
  const float from = scale_of(half), to = scale_of(other);
  const std::int64_t out = old.size(0), in = old.size(1);
  const Tensor values = Tensor::empty({out, in}, DType::kE4M3);
  core::parallel_for(default_executor(), out, out * in >= (1 << 18), [&](std::int64_t r) {
    std::vector<float> row(static_cast<std::size_t>(in));
    for (std::int64_t i = 0; i < in; ++i)
      row[i] = load_f32(old.data(), DType::kE4M3, r * old.stride(0) + i * old.stride(1)) * from;
    core::quantize_row(row.data(), in, key, to, values.as<std::uint8_t>() + r * in, nullptr);
  });
  owners.push_back(values.owner());
  half.values = values;
  half.scales = other.scales;
}

}  // namespace

void merge_gate_up_scales(ExpertWeights& weights) {
  const QuantKey& key = weights.scheme.weights;
  FUSEDMOE_CHECK(key == keys::e4m3_tensor(), "weights.scheme", name(weights.scheme),
                 "with e4m3 weights that have one scale per matrix");
  weights.validate();
  for (ExpertMatrices& expert : weights.experts) {
    if (!expert.up.values.defined()) continue;
    const float gate = scale_of(expert.gate);
    const float up = scale_of(expert.up);
    if (gate < up) take_scale(expert.gate, expert.up, weights.owners);
    if (up < gate) take_scale(expert.up, expert.gate, weights.owners);
  }
}

}  // namespace fusedmoe
