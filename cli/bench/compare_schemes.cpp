// See compare.h.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "bench/bench_problem.h"
#include "bench/compare.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "support.h"
#include "testing/cases.h"
#include "tools/calibrate.h"

namespace fusedmoe::cli {
namespace {

Tensor head(const Tensor& tensor, std::int64_t rows) {
  return tensor ? Tensor(tensor.slice(0, 0, rows), tensor.owner()) : tensor;
}

Tensor converted(const TensorView& from, DType dtype) {
  Tensor result = Tensor::empty(from.shape(), dtype);
  convert(from, result);
  return result;
}

float amax(const Tensor& values) {
  float largest = 0;
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    largest = std::max(largest, std::abs(values.as<const float>()[i]));
  }
  return largest;
}

bool needs_input_scale(const QuantScheme& scheme) {
  return scheme.activations && (!scheme.activations->dynamic || scheme.activations->global_scale);
}

/// Quantizes expert after expert; keeps what the views of the result need.
class ExpertQuantizer {
 public:
  ExpertQuantizer(const ExpertWeights& source, const QuantScheme& scheme, ActivationRange range)
      : source_(source), range_(std::move(range)), result_(source) {
    result_.scheme = scheme;
    result_.experts.clear();
    const std::vector<float>& each = range_.intermediate;
    if (!each.empty()) largest_intermediate_ = *std::max_element(each.begin(), each.end());
  }

  void add(const ExpertMatrices& expert) {
    const std::array sources{&expert.gate, &expert.up, &expert.down};
    std::array<Tensor, 3> values;
    std::array<float, 3> largest{};
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (!sources[i]->values) continue;  // no up
      const std::int64_t in = i == 2 ? source_.intermediate : source_.hidden;
      values[i] = dequantize_weights(*sources[i], source_.scheme.weights, in);
      largest[i] = amax(values[i]);
    }
    // Gate and up share a global scale, as in every published checkpoint.
    largest[0] = largest[1] = std::max(largest[0], largest[1]);
    ExpertMatrices quantized;
    const std::array targets{&quantized.gate, &quantized.up, &quantized.down};
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (!values[i]) continue;
      *targets[i] = quantize(values[i], largest[i], i == 2);
      targets[i]->bias = sources[i]->bias;
    }
    result_.experts.push_back(quantized);
  }

  ExpertWeights take() { return std::move(result_); }

 private:
  WeightMatrix quantize(const Tensor& values, float largest, bool down) {
    const QuantKey& key = result_.scheme.weights;
    std::optional<float> global;
    if (key.global_scale && key.global_group == GroupShape{-1, -1}) global = largest;
    QuantizeOptions options;
    options.scale_dtype = DType::kBF16;  // as published checkpoints have them
    const QuantizedMatrix quantized = quantize_weights(values, key, options, global);
    WeightMatrix matrix = quantized.view();
    for (const Tensor* tensor :
         {&quantized.values, &quantized.scales, &quantized.zero_points, &quantized.global_scale}) {
      result_.owners.push_back(tensor->owner());
    }
    if (needs_input_scale(result_.scheme)) matrix.input_scale = input_scale(down);
    return matrix;
  }

  // An expert without tokens takes the largest of the others.
  TensorView input_scale(bool down) {
    float largest = range_.hidden;
    if (down) {
      largest = range_.intermediate[result_.experts.size()];
      if (largest == 0) largest = largest_intermediate_;
    }
    Tensor scale = Tensor::empty({1}, DType::kF32);
    *scale.as<float>() = largest / (result_.scheme.activations->global_scale ? 2688.0F : 448.0F);
    result_.owners.push_back(scale.owner());
    return scale;
  }

  const ExpertWeights& source_;
  const ActivationRange range_;
  float largest_intermediate_ = 0;
  ExpertWeights result_;
};

/// Fills everything that follows from the outputs.
void measure_error(const Tensor& actual, const Tensor& expected, SchemeError& result) {
  const std::int64_t num_tokens = expected.size(0), hidden = expected.size(1);
  double dots = 0, actual_squares = 0, expected_squares = 0, error_squares = 0;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    double row_error = 0, row_expected = 0;
    for (std::int64_t i = token * hidden; i < (token + 1) * hidden; ++i) {
      const double a = actual.as<const float>()[i], e = expected.as<const float>()[i];
      dots += a * e;
      actual_squares += a * a;
      row_expected += e * e;
      row_error += (a - e) * (a - e);
    }
    expected_squares += row_expected;
    error_squares += row_error;
    const double relative =
        row_error == 0 ? 0 : std::sqrt(row_error / std::max(row_expected, 1e-300));
    if (result.worst_token < 0 || !(relative <= result.worst_token_error)) {
      result.worst_token = token;
      result.worst_token_error = relative;
    }
  }
  result.relative_error = std::sqrt(error_squares / std::max(expected_squares, 1e-300));
  result.cosine = dots / std::sqrt(std::max(actual_squares * expected_squares, 1e-300));
}

}  // namespace

LayerWeights first_experts(LayerWeights layer, std::int64_t max_experts) {
  layer.shared_experts.reset();
  RouterConfig& router = layer.router;
  if (max_experts == 0 || max_experts >= router.num_experts) return layer;
  router.num_experts = max_experts;
  router.num_zero_experts = 0;
  router.topk = std::min(router.topk, max_experts);
  router.num_expert_group = router.topk_group = 0;
  layer.experts.experts.resize(static_cast<std::size_t>(max_experts));
  RouterWeights& weights = layer.router_weights;
  weights.weight = head(weights.weight, max_experts);
  weights.bias = head(weights.bias, max_experts);
  weights.score_correction_bias = head(weights.score_correction_bias, max_experts);
  return layer;
}

LayerWeights random_layer(const ModelConfig& model, std::int64_t max_experts, std::uint64_t seed) {
  testing::Case spec;
  spec.num_experts = model.router.num_experts;
  if (max_experts > 0) spec.num_experts = std::min(spec.num_experts, max_experts);
  spec.num_tokens = 0;
  spec.topk = 1;
  spec.hidden = model.experts_hidden();
  spec.intermediate = model.intermediate;
  spec.activation = model.activation;
  spec.activation_params = model.activation_params;
  spec.bias = model.has_bias;
  spec.seed = seed;
  LayerWeights layer;
  layer.experts = testing::make_problem(spec).weights;
  layer.router = model.router;
  testing::Random random(seed + 1);
  layer.router_weights.weight =
      random_router_weight(model.router, model.hidden, DType::kBF16, random);
  return first_experts(std::move(layer), spec.num_experts);
}

ExpertWeights quantize_experts(const LayerWeights& layer, const QuantScheme& scheme,
                               const TensorView& x) {
  ActivationRange range;
  if (needs_input_scale(scheme)) range = activation_range(layer, x);
  ExpertQuantizer quantizer(layer.experts, scheme, std::move(range));
  for (const ExpertMatrices& expert : layer.experts.experts) quantizer.add(expert);
  return quantizer.take();
}

SchemeComparison::SchemeComparison(LayerWeights layer, Tensor x)
    : layer_(std::move(layer)), x_(std::move(x)) {
  const std::int64_t num_tokens = x_.size(0), topk = layer_.router.topk;
  truth_ = Tensor::empty(x_.shape(), DType::kF32);
  topk_ids_ = Tensor::empty({num_tokens, topk}, DType::kI32);
  topk_weights_ = Tensor::empty({num_tokens, topk}, DType::kF32);
  LayerWeights exact = layer_;
  exact.experts = quantize_experts(layer_, schemes::unquantized(DType::kF32), x_);
  LayerOptions options;
  options.dtype = DType::kF32;
  const MoeLayer f32(std::move(exact), options);
  const std::size_t bytes = f32.workspace_bytes(num_tokens);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  f32.forward(x_, truth_, {workspace.data(), bytes},
              {.topk_ids = topk_ids_, .topk_weights = topk_weights_});
}

SchemeError SchemeComparison::run(const QuantScheme& scheme, DType dtype,
                                  const std::string& experts, int repeat) const {
  LayerWeights quantized = layer_;
  quantized.experts = quantize_experts(layer_, scheme, x_);
  SchemeError result;
  result.scheme = name(scheme);
  result.bytes = quantized.experts.nbytes();
  const ExpertWeights& weights = quantized.experts;
  const double matrices = is_gated(weights.activation) ? 3 : 2;
  result.bits_per_weight = 8.0 * static_cast<double>(result.bytes) /
                           (matrices * static_cast<double>(weights.num_experts() * weights.hidden) *
                            static_cast<double>(weights.intermediate));
  LayerOptions options;
  options.dtype = dtype;
  options.require = experts;
  const MoeLayer layer(std::move(quantized), options);
  result.plan = layer.plan_line();

  const Tensor x = converted(x_, dtype);
  const Tensor output = Tensor::empty(x.shape(), dtype);
  const std::size_t bytes = layer.workspace_bytes(x.size(0));
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  std::vector<double> times(static_cast<std::size_t>(repeat));
  for (double& time : times) {
    time = time_ms([&] {
      layer.forward_routed(x, {topk_ids_, topk_weights_}, output, {workspace.data(), bytes});
    });
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  result.ms = times[times.size() / 2];
  measure_error(converted(output, DType::kF32), truth_, result);
  return result;
}

}  // namespace fusedmoe::cli
