// Quantization of weight matrices: every key as one of three ways to find scales. Formulas:
// docs/number-formats.md, "Quantization formulas".
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "quant/quantize.h"
#include "quant/quantize_elements.h"
#include "quant/weight_layout.h"

namespace fusedmoe {
namespace {

using core::GlobalScale;
using core::num_blocks;
using core::WeightLayout;

constexpr float kE4M3Max = 448.0F;
constexpr float kMinBlockAmax = 1e-4F;
constexpr float kMinRange = 1e-5F;  // of an asymmetric integer group

void load_row(const TensorView& values, std::int64_t row, float* out) {
  const std::int64_t in = values.size(1), begin = row * values.stride(0), step = values.stride(1);
  const DType dtype = values.dtype();
  if (dtype == DType::kF32) {
    const auto* source = values.as<const float>() + begin;
    for (std::int64_t i = 0; i < in; ++i) out[i] = source[i * step];
  } else if (dtype == DType::kBF16) {
    const auto* source = values.as<const std::uint16_t>() + begin;
    for (std::int64_t i = 0; i < in; ++i) {
      out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(source[i * step]) << 16);
    }
  } else {
    const auto* source = values.as<const std::uint16_t>() + begin;
    for (std::int64_t i = 0; i < in; ++i) out[i] = f16_to_f32(source[i * step]);
  }
}

/// One matrix on its way. Rows are independent but for the scales that span several.
class WeightQuantizer {
 public:
  WeightQuantizer(const TensorView& values, const QuantKey& key, const QuantizeOptions& options)
      : values_(values),
        key_(key),
        options_(options),
        layout_(core::weight_layout(key, "key")),
        out_(values.size(0)),
        in_(values.size(1)) {
    const bool may_choose = integer() || key.value == DType::kIq4;
    const DType chosen = layout_.scales_dtypes.size() == 3 && may_choose ? options.scale_dtype
                         : layout_.quantized() ? layout_.scales_dtypes.front()
                                               : DType::kF32;
    result_.values = Tensor::empty(layout_.values_shape(out_, in_), layout_.values_dtypes.front());
    if (!layout_.quantized()) return;
    const Shape grid{num_blocks(out_, key.group.rows), num_blocks(in_, key.group.cols)};
    result_.scales = Tensor::empty(grid, chosen);
    if (layout_.zero_points) result_.zero_points = Tensor::empty(grid, DType::kU8);
    if (layout_.global_scale != GlobalScale::kNone) {
      result_.global_scale = Tensor::empty(layout_.global_shape(out_, in_), layout_.global_dtype());
    }
  }

  QuantizedMatrix run(std::optional<float> global_amax) {
    if (!layout_.quantized()) {
      check_finite();
      convert(values_, result_.values);
      return result_;
    }
    if (key_.group.rows != 1) {
      quantize_blocks();
      return result_;
    }
    const float largest = check_finite();
    if (layout_.global_scale == GlobalScale::kPerMatrix) {
      *result_.global_scale.as<float>() = core::nvfp4_global_scale(global_amax.value_or(largest));
    }
    for_each_row([&](std::int64_t row, const float* x) {
      if (layout_.global_scale == GlobalScale::kPerBlock) {
        quantize_blocks_of_row(row, x);
      } else if (key_.value == DType::kIq4) {
        quantize_iq4_row(row, x);
      } else if (integer()) {
        quantize_integer_row(row, x);
      } else {
        quantize_float_row(row, x);
      }
    });
    return result_;
  }

 private:
  bool integer() const { return key_.value == DType::kI4 || key_.value == DType::kU8; }

  template <typename Function>
  void for_each_row(const Function& function) const {
    const bool worthwhile = values_.numel() >= core::kParallelWeights;
    core::parallel_ranges(default_executor(), out_, worthwhile,
                          [&](std::int64_t begin, std::int64_t end) {
                            std::vector<float> x(static_cast<std::size_t>(in_));
                            for (std::int64_t row = begin; row < end; ++row) {
                              load_row(values_, row, x.data());
                              function(row, x.data());
                            }
                          });
  }

  /// Largest magnitude; throws Error for a value that is not finite.
  float check_finite() const {
    std::vector<float> largest(static_cast<std::size_t>(out_));
    for_each_row([&](std::int64_t row, const float* x) {
      const bool nan = std::any_of(x, x + in_, [](float value) { return value != value; });
      largest[static_cast<std::size_t>(row)] = nan ? INFINITY : core::amax(x, in_);
    });
    const auto worst = std::max_element(largest.begin(), largest.end());
    if (worst == largest.end()) return 0;
    FUSEDMOE_CHECK(std::isfinite(*worst), "values",
                   core::format("NaN or infinite in row {}", worst - largest.begin()), "finite");
    return *worst;
  }

  // e4m3 with scales that span rows: per tensor, or blocks.
  void quantize_blocks() {
    const std::int64_t columns = result_.scales.size(1);
    const std::int64_t width = key_.group.cols < 0 ? in_ : key_.group.cols;
    const std::int64_t height = key_.group.rows < 0 ? out_ : key_.group.rows;
    check_finite();
    std::vector<float> row_amax(static_cast<std::size_t>(out_ * columns));
    for_each_row([&](std::int64_t row, const float* x) {
      for (std::int64_t block = 0; block < columns; ++block) {
        const std::int64_t begin = block * width;
        row_amax[row * columns + block] = core::amax(x + begin, std::min(width, in_ - begin));
      }
    });
    auto* scales = result_.scales.as<float>();
    for (std::int64_t i = 0; i < result_.scales.numel(); ++i) {
      float largest = 0;
      const std::int64_t begin = i / columns * height, end = std::min(out_, begin + height);
      for (std::int64_t row = begin; row < end; ++row) {
        largest = std::max(largest, row_amax[row * columns + i % columns]);
      }
      const bool whole = key_.group == GroupShape{-1, -1};
      scales[i] = whole ? core::tensor_scale(largest) : std::max(largest, kMinBlockAmax) / kE4M3Max;
    }
    auto* codes = result_.values.as<std::uint8_t>();
    for_each_row([&](std::int64_t row, const float* x) {
      for (std::int64_t block = 0; block < columns; ++block) {
        const std::int64_t begin = block * width;
        core::quantize_row(x + begin, std::min(width, in_ - begin), keys::e4m3_tensor(),
                           scales[row / height * columns + block], codes + row * in_ + begin,
                           nullptr);
      }
    });
  }

  // Formats that quantize rows of weights as they do rows of activations.
  void quantize_float_row(std::int64_t row, const float* x) {
    QuantKey key = key_;
    key.dynamic = true;
    key.scale_rule = options_.scale_rule;
    const bool global = layout_.global_scale == GlobalScale::kPerMatrix;
    const std::int64_t row_scales = result_.scales.size(1) * bytes(result_.scales.dtype(), 1);
    core::quantize_row(x, in_, key, global ? *result_.global_scale.as<float>() : 1,
                       result_.values.as<std::uint8_t>() + row * result_.values.size(1),
                       result_.scales.as<std::uint8_t>() + row * row_scales);
  }

  struct IntegerGroup {
    float scale;
    float zero;
  };

  /// Scale and zero point of one group. The range always includes 0.
  IntegerGroup integer_group(const float* x, std::int64_t count, DType scale_dtype) const {
    const auto [low, high] = std::minmax_element(x, x + count);
    const float min = std::min(*low, 0.0F), max = std::max(*high, 0.0F);
    const bool four = key_.value == DType::kI4;
    const auto rounded = [&](float scale) {
      float stored = 0;
      store_f32(&stored, scale_dtype, 0, scale);
      stored = load_f32(&stored, scale_dtype, 0);
      return stored > 0 ? stored : 1.0F;
    };
    if (key_.symmetric) {
      const float largest = four ? 7.0F : 127.0F;
      return {rounded(std::max(max / largest, -min / (largest + 1))),
              static_cast<float>(layout_.zero)};
    }
    const float largest = four ? 15.0F : 255.0F;
    const float scale = rounded(std::max(max - min, kMinRange) / largest);
    return {scale, std::min(std::nearbyint(-min / scale), largest)};
  }

  void quantize_integer_row(std::int64_t row, const float* x) {
    const std::int64_t groups = result_.scales.size(1);
    const std::int64_t width = key_.group.cols < 0 ? in_ : key_.group.cols;
    const bool w4a8 = layout_.global_scale == GlobalScale::kPerRow;
    const float largest = key_.value == DType::kI4 ? 15.0F : 255.0F;
    std::vector<float> scales(static_cast<std::size_t>(groups));
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(in_));
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t begin = g * width, end = std::min(in_, begin + width);
      const IntegerGroup group =
          integer_group(x + begin, end - begin, w4a8 ? DType::kBF16 : result_.scales.dtype());
      scales[g] = group.scale;
      if (layout_.zero_points) {
        result_.zero_points.as<std::uint8_t>()[row * groups + g] =
            static_cast<std::uint8_t>(group.zero);
      }
      for (std::int64_t i = begin; i < end; ++i) {
        const float code = std::nearbyint(x[i] / group.scale) + group.zero;
        codes[i] = static_cast<std::uint8_t>(std::clamp(code, 0.0F, largest));
      }
    }
    pack_words(row, codes);
    if (w4a8) {
      store_channel_scales(row, scales);
    } else {
      for (std::int64_t g = 0; g < groups; ++g) {
        store_f32(result_.scales.data(), result_.scales.dtype(), row * groups + g, scales[g]);
      }
    }
  }

  // llama.cpp's blocks.
  void quantize_blocks_of_row(std::int64_t row, const float* x) {
    const std::int64_t width = key_.global_group.cols, groups = result_.scales.size(1);
    const std::int64_t factors = result_.global_scale.size(1);
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(in_));
    for (std::int64_t begin = 0; begin < in_; begin += width) {
      const std::int64_t group = row * groups + begin / key_.group.cols;
      const core::BlockScales scales{
          result_.global_scale.as<std::uint16_t>() + row * factors +
              begin / width * layout_.factors_per_block(),
          result_.scales.as<std::uint8_t>() + group,
          layout_.zero_points ? result_.zero_points.as<std::uint8_t>() + group : nullptr};
      core::quantize_block(x + begin, std::min(width, in_ - begin), key_, codes.data() + begin,
                           scales);
    }
    pack_words(row, codes);
  }

  void quantize_iq4_row(std::int64_t row, const float* x) {
    const std::int64_t width = key_.group.cols, groups = result_.scales.size(1);
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(in_));
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t begin = g * width, end = std::min(in_, begin + width);
      const TensorView scales = result_.scales;
      store_f32(scales.data(), scales.dtype(), row * groups + g,
                core::amax(x + begin, end - begin) / 113);
      const float scale = load_f32(scales.data(), scales.dtype(), row * groups + g);
      for (std::int64_t i = begin; i < end; ++i) {
        codes[i] = core::iq4_code(scale == 0 ? 0 : x[i] / scale);
      }
    }
    pack_words(row, codes);
  }

  void pack_words(std::int64_t row, const std::vector<std::uint8_t>& codes) {
    pack_codes(TensorView(codes.data(), DType::kU8, {1, in_}),
               result_.values.slice(0, row, row + 1), static_cast<int>(32 / layout_.packing));
  }

  // W4A8: group scales become e4m3 with room for a code of -8, and one f32 per row.
  void store_channel_scales(std::int64_t row, const std::vector<float>& scales) {
    const auto groups = static_cast<std::int64_t>(scales.size());
    auto* codes = result_.scales.as<std::uint8_t>() + row * groups;
    float& channel = result_.global_scale.as<float>()[row];
    core::quantize_row(scales.data(), groups, keys::e4m3_row(true), 1, codes, &channel);
    for (std::int64_t g = 0; g < groups; ++g) {
      codes[g] = core::e4m3_code(e4m3_to_f32(codes[g]) / 8);
    }
    channel *= 8;
  }

  const TensorView& values_;
  const QuantKey& key_;
  const QuantizeOptions& options_;
  const WeightLayout layout_;
  const std::int64_t out_, in_;
  QuantizedMatrix result_;
};

}  // namespace

QuantizedMatrix quantize_weights(const TensorView& values, const QuantKey& key,
                                 const QuantizeOptions& options, std::optional<float> global_amax) {
  FUSEDMOE_CHECK_FAULT(values.defined() && values.rank() == 2 &&
                           core::is_activation_dtype(values.dtype()) && values.device().is_cpu() &&
                           values.numel() > 0,
                       kShape, "values", core::describe(values), "(out, in) f32, f16 or bf16");
  FUSEDMOE_CHECK(core::is_activation_dtype(options.scale_dtype), "options.scale_dtype",
                 std::string(name(options.scale_dtype)), "f32, f16 or bf16");
  FUSEDMOE_CHECK(!global_amax || (*global_amax >= 0 && std::isfinite(*global_amax)), "global_amax",
                 core::to_string(*global_amax), "finite, not negative");
  return WeightQuantizer(values, key, options).run(global_amax);
}

}  // namespace fusedmoe
