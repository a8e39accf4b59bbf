// Random weights in stacked tensors of the layout that a case asks for.
#include "testing/case_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "fusedmoe/quant.h"

namespace fusedmoe::testing {
namespace {

/// Views of one projection of every local expert, all in stacked tensors.
struct Stack {
  TensorView values, scales, bias;  // (E, out, ...) and (E, out)
};

WeightMatrix matrix_of(const Stack& stack, std::int64_t expert) {
  const auto part = [&](const TensorView& view) {
    return view ? view.select(0, expert) : TensorView();
  };
  WeightMatrix matrix;
  matrix.values = part(stack.values);
  matrix.scales = part(stack.scales);
  matrix.bias = part(stack.bias);
  return matrix;
}

Stack rows_of(const Stack& stack, std::int64_t begin, std::int64_t end, std::int64_t step) {
  const auto part = [&](const TensorView& view) {
    return view ? view.slice(1, begin, end, step) : TensorView();
  };
  return {part(stack.values), part(stack.scales), part(stack.bias)};
}

class WeightMaker {
 public:
  WeightMaker(const Case& spec, std::vector<std::shared_ptr<const void>>& owners)
      : spec_(spec),
        experts_(num_local_experts(spec)),
        codes_(spec.scheme.weights == keys::mxfp4()),
        owners_(owners) {}

  /// Uninitialised (E, out, in) in the layout of the case.
  Stack allocate(std::int64_t out, std::int64_t in) {
    Stack stack;
    if (codes_) {
      stack.values = keep(Tensor::empty({experts_, out, (in + 1) / 2}, DType::kU8));
      stack.scales = keep(Tensor::empty({experts_, out, (in + 31) / 32}, DType::kU8));
    } else if (spec_.transposed) {
      stack.values =
          keep(Tensor::empty({experts_, in, out}, spec_.scheme.weights.value)).transpose(1, 2);
    } else {
      stack.values = keep(Tensor::empty({experts_, out, in}, spec_.scheme.weights.value));
    }
    if (spec_.bias) {
      const DType dtype = codes_ ? DType::kBF16 : spec_.scheme.weights.value;
      stack.bias = keep(Tensor::empty({experts_, out}, dtype));
    }
    return stack;
  }

  /// Random numbers for one expert, row by row, whatever the strides.
  void fill(const WeightMatrix& matrix, Random& random) const {
    const TensorView& values = matrix.values;
    const std::int64_t out = values.size(0), columns = values.size(1);
    const double fan_in = static_cast<double>(matrix.scales ? 2 * columns : columns);
    const double deviation = 1 / std::sqrt(fan_in);
    for (std::int64_t r = 0; r < out; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        const std::int64_t index = r * values.stride(0) + c * values.stride(1);
        if (matrix.scales) {
          values.as<std::uint8_t>()[index] = static_cast<std::uint8_t>(random.bits() >> 56);
        } else {
          store_f32(values.data(), values.dtype(), index,
                    static_cast<float>(random.normal() * deviation));
        }
      }
      if (matrix.scales) fill_scales(matrix.scales.select(0, r), deviation, random);
      if (matrix.bias) {
        store_f32(matrix.bias.data(), matrix.bias.dtype(), r * matrix.bias.stride(0),
                  static_cast<float>(random.normal() / 2));
      }
    }
  }

 private:
  TensorView keep(const Tensor& tensor) {
    owners_.push_back(tensor.owner());
    return tensor;
  }

  static void fill_scales(const TensorView& scales, double deviation, Random& random) {
    constexpr double kRmsOfCodes = 2.93;  // of the 16 E2M1 values
    const int exponent = std::ilogb(deviation / kRmsOfCodes);
    for (std::int64_t b = 0; b < scales.size(0); ++b) {
      scales.as<std::uint8_t>()[b * scales.stride(0)] =
          static_cast<std::uint8_t>(127 + exponent + random.below(3) - 1);
    }
  }

  const Case& spec_;
  const std::int64_t experts_;
  const bool codes_;  // MXFP4: random codes and scales
  std::vector<std::shared_ptr<const void>>& owners_;
};

ExpertWeights make_plain(const Case& spec, Random& random) {
  ExpertWeights weights;
  weights.scheme = spec.scheme;
  weights.hidden = spec.hidden;
  weights.intermediate = spec.intermediate;
  weights.activation = spec.activation;
  weights.activation_params = spec.activation_params;

  WeightMaker maker(spec, weights.owners);
  const std::int64_t size = spec.intermediate;
  const bool gated = is_gated(spec.activation);
  const Stack w13 = maker.allocate(gated ? 2 * size : size, spec.hidden);
  Stack gate = w13, up;
  if (gated && spec.gate_up_layout == GateUpLayout::kInterleaved) {
    gate = rows_of(w13, 0, 2 * size, 2);
    up = rows_of(w13, 1, 2 * size, 2);
  } else if (gated) {
    const bool gate_first = spec.gate_up_layout == GateUpLayout::kGateUp;
    gate = rows_of(w13, gate_first ? 0 : size, gate_first ? size : 2 * size, 1);
    up = rows_of(w13, gate_first ? size : 0, gate_first ? 2 * size : size, 1);
  }
  const Stack w2 = maker.allocate(spec.hidden, size);
  for (std::int64_t e = 0; e < num_local_experts(spec); ++e) {
    ExpertMatrices expert{matrix_of(gate, e), {}, matrix_of(w2, e)};
    maker.fill(expert.gate, random);
    if (gated) {
      expert.up = matrix_of(up, e);
      maker.fill(expert.up, random);
    }
    maker.fill(expert.down, random);
    weights.experts.push_back(expert);
  }
  return weights;
}

// ------------------------------------------------------------------------------------------------
// Quantized weights: bf16 ones, quantized, in stacked tensors

void copy_elements(const TensorView& from, const TensorView& to) {
  const std::int64_t width = bytes(from.dtype(), 1);
  for (std::int64_t r = 0; r < from.size(0); ++r) {
    for (std::int64_t c = 0; c < from.size(1); ++c) {
      std::memcpy(to.as<char>() + (r * to.stride(0) + c * to.stride(1)) * width,
                  from.as<const char>() + (r * from.stride(0) + c * from.stride(1)) * width,
                  static_cast<std::size_t>(width));
    }
  }
}

/// Several elements in one stored value.
bool packed(DType dtype) {
  return dtype == DType::kE2M1 || dtype == DType::kI4 || dtype == DType::kU8 ||
         dtype == DType::kIq4;
}

class QuantizedStacks {
 public:
  QuantizedStacks(const Case& spec, const ExpertWeights& source)
      : spec_(spec), key_(spec.scheme.weights), source_(source), gated_(is_gated(spec.activation)) {
    stacked_.gate_up_layout = spec.gate_up_layout;
    stacked_.transposed = spec.transposed && !packed(key_.value);
    for (std::int64_t e = 0; e < source.num_experts(); ++e) add(e);
  }

  /// Scales of the largest hidden state, about 4.5, and of the largest activated value, about 8.
  void add_input_scales(Random& random) {
    const std::optional<QuantKey>& key = spec_.scheme.activations;
    if (!key || (key->dynamic && !key->global_scale)) return;
    const double largest = key->global_scale ? 2688 : 448;
    const auto scales = [&](double amax, std::int64_t each) {
      Tensor result = Tensor::empty({source_.num_experts(), each}, DType::kF32);
      for (std::int64_t i = 0; i < result.numel(); ++i) {
        result.as<float>()[i] = static_cast<float>(amax * (0.75 + random.uniform() / 4) / largest);
      }
      return result;
    };
    stacked_.w13_input_scales = scales(4.5, gated_ ? 2 : 1);
    stacked_.w2_input_scales = scales(8, 1);
  }

  const ExpertWeights::Stacked& stacked() const { return stacked_; }

 private:
  /// What of its stack a part takes: everything, the rows of gate or up, or the first or second
  /// entry of what gate and up have one of each.
  enum class Half { kWhole, kGate, kUp, kFirst, kSecond };
  static Half pair(Half half) {
    return half == Half::kGate ? Half::kFirst : half == Half::kUp ? Half::kSecond : half;
  }

  void add(std::int64_t e) {
    const ExpertMatrices& expert = source_.experts[static_cast<std::size_t>(e)];
    QuantizeOptions options;
    options.scale_dtype = spec_.scale_dtype;
    const auto quantize = [&](const TensorView& values) {
      return quantize_weights(values, key_, options);
    };
    const QuantizedMatrix down = quantize(expert.down.values);
    put(stacked_.w2, e, down.values, Half::kWhole, stacked_.transposed);
    put(stacked_.w2_scales, e, down.scales, Half::kWhole);
    put(stacked_.w2_zero_points, e, down.zero_points, Half::kWhole);
    put(stacked_.w2_global_scales, e, down.global_scale, Half::kWhole);
    if (!gated_) return put_w13(e, quantize(expert.gate.values), Half::kWhole);
    if (key_.group.rows > 1) {
      // Blocks of the fused matrix, which may straddle gate and up.
      const TensorView& gate = expert.gate.values;
      const void* first = std::min(gate.data(), expert.up.values.data());
      const TensorView fused(first, gate.dtype(), {2 * spec_.intermediate, spec_.hidden});
      return put_w13(e, quantize(fused), Half::kWhole);
    }
    put_w13(e, quantize(expert.gate.values), Half::kGate);
    put_w13(e, quantize(expert.up.values), Half::kUp);
  }

  void put_w13(std::int64_t e, const QuantizedMatrix& q, Half half) {
    const Half scales = key_.group.rows < 0 ? pair(half) : half;
    const bool per_row = key_.global_scale && key_.global_group.rows == 1;
    put(stacked_.w13, e, q.values, half, stacked_.transposed);
    put(stacked_.w13_scales, e, q.scales, scales);
    put(stacked_.w13_zero_points, e, q.zero_points, scales);
    put(stacked_.w13_global_scales, e, q.global_scale, per_row ? half : pair(half));
  }

  /// Copies a part of expert e to its rows of a stack, which is allocated when first seen.
  void put(Tensor& stack, std::int64_t e, const TensorView& part, Half half,
           bool transposed = false) const {
    if (!part) return;
    const TensorView matrix = part.rank() == 1 ? part.reshape({part.size(0), 1}) : part;
    const std::int64_t rows = matrix.size(0) * (half == Half::kWhole ? 1 : 2);
    if (!stack) {
      const std::int64_t experts = source_.num_experts(), cols = matrix.size(1);
      stack = transposed ? Tensor::empty({experts, cols, rows}, part.dtype())
                         : Tensor::empty({experts, rows, cols}, part.dtype());
    }
    TensorView target = stack.select(0, e);
    if (transposed) target = target.transpose(0, 1);
    const std::int64_t size = matrix.size(0);
    const bool interleaved = spec_.gate_up_layout == GateUpLayout::kInterleaved;
    if (half == Half::kFirst || half == Half::kSecond) {
      target =
          target.slice(0, half == Half::kSecond ? size : 0, half == Half::kSecond ? rows : size);
    } else if (half != Half::kWhole && interleaved) {
      target = target.slice(0, half == Half::kUp ? 1 : 0, rows, 2);
    } else if (half != Half::kWhole) {
      const bool second = (half == Half::kUp) == (spec_.gate_up_layout == GateUpLayout::kGateUp);
      target = target.slice(0, second ? size : 0, second ? rows : size);
    }
    copy_elements(matrix, target);
  }

  const Case& spec_;
  const QuantKey& key_;
  const ExpertWeights& source_;
  const bool gated_;
  ExpertWeights::Stacked stacked_;
};

/// (E, n, 1) as (E, n).
void drop_last(Tensor& stack) {
  if (!stack) return;
  stack = Tensor(stack.reshape({stack.size(0), stack.size(1)}), stack.owner());
}

ExpertWeights make_quantized(const Case& spec, Random& random) {
  Case plain = spec;
  plain.scheme = schemes::unquantized(DType::kBF16);
  plain.transposed = false;
  const ExpertWeights source = make_plain(plain, random);
  QuantizedStacks stacks(spec, source);
  stacks.add_input_scales(random);
  ExpertWeights::Stacked stacked = stacks.stacked();
  const QuantKey& key = spec.scheme.weights;
  if (key.global_group.cols < 0) {
    drop_last(stacked.w13_global_scales);
    drop_last(stacked.w2_global_scales);
  }
  if (key.group == GroupShape{-1, -1}) drop_last(stacked.w13_scales);
  const bool tiles = key.group.rows == 1 && bits(*key.scale) == 8 &&
                     (key.value == DType::kE2M1 || !packed(key.value));
  if (tiles && spec.seed % 2 == 1) {
    stacked.scale_layout = ScaleLayout::kTiled128x4;
    for (Tensor* scales : {&stacked.w13_scales, &stacked.w2_scales}) {
      const Tensor flat = *scales;
      *scales = Tensor::empty(tiled_scales_shape(flat.shape()), flat.dtype());
      tile_scales(flat, *scales);
    }
  }
  ExpertWeights weights =
      ExpertWeights::from_stacked(stacked, spec.scheme, spec.activation, spec.activation_params);
  for (std::size_t e = 0; e < weights.experts.size(); ++e) {
    for (WeightMatrix ExpertMatrices::*matrix :
         {&ExpertMatrices::gate, &ExpertMatrices::up, &ExpertMatrices::down}) {
      (weights.experts[e].*matrix).bias = (source.experts[e].*matrix).bias;
    }
  }
  weights.owners.insert(weights.owners.end(), source.owners.begin(), source.owners.end());
  return weights;
}

}  // namespace

bool is_local(const Case& spec, std::int64_t expert) {
  return !spec.expert_map || expert % 3 != 1;
}

std::int64_t num_local_experts(const Case& spec) {
  std::int64_t count = 0;
  for (std::int64_t e = 0; e < spec.num_experts; ++e) count += is_local(spec, e);
  return count;
}

ExpertWeights make_weights(const Case& spec, Random& random) {
  const QuantKey& key = spec.scheme.weights;
  const std::optional<QuantKey>& rows = spec.scheme.activations;
  const bool has_input_scales = rows && !rows->dynamic;
  const bool plain = !key.quantized() || (key == keys::mxfp4() && !has_input_scales);
  return plain ? make_plain(spec, random) : make_quantized(spec, random);
}

}  // namespace fusedmoe::testing
