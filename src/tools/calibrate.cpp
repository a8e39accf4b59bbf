// Plain loops: rows of weights times the few tokens of an expert, which lie side by side.
#include "tools/calibrate.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/parallel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "reference/activation.h"

namespace fusedmoe {
namespace {

Tensor to_f32(const TensorView& x) {
  Tensor result = Tensor::empty(x.shape(), DType::kF32);
  convert(x, result);
  return result;
}

float finite_amax(const TensorView& x, const char* argument) {
  float largest = 0;
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const float magnitude = std::abs(x.as<const float>()[i]);
    FUSEDMOE_CHECK(std::isfinite(magnitude), argument, "NaN or infinite", "finite");
    largest = std::max(largest, magnitude);
  }
  return largest;
}

/// Where every token goes, and with which weights.
struct Routed {
  Tensor ids, weights;
};

Routed route_tokens(const LayerWeights& layer, const Tensor& x) {
  const std::int64_t tokens = x.size(0);
  const Tensor logits = Tensor::empty({tokens, layer.router.num_choices()}, DType::kF32);
  Routed routed{Tensor::empty({tokens, layer.router.topk}, DType::kI32),
                Tensor::empty({tokens, layer.router.topk}, DType::kF32)};
  router_logits(layer.router_weights, x, logits);
  route(layer.router, logits, layer.router_weights.score_correction_bias,
        {routed.ids, routed.weights});
  return routed;
}

/// Columns (hidden, count): the tokens that chose the expert.
Tensor gather_columns(const Tensor& x, const Tensor& ids, std::int64_t expert) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t slot = 0; slot < ids.numel(); ++slot) {
    if (ids.as<const std::int32_t>()[slot] == expert) tokens.push_back(slot / ids.size(1));
  }
  const auto count = static_cast<std::int64_t>(tokens.size());
  Tensor columns = Tensor::empty({x.size(1), count}, DType::kF32);
  for (std::int64_t h = 0; h < x.size(1); ++h) {
    for (std::int64_t i = 0; i < count; ++i) {
      columns.as<float>()[h * count + i] =
          x.as<const float>()[tokens[static_cast<std::size_t>(i)] * x.size(1) + h];
    }
  }
  return columns;
}

float bias_at(const TensorView& bias, std::int64_t row) {
  return bias.defined() ? load_f32(bias.data(), bias.dtype(), row * bias.stride(0)) : 0;
}

/// sums[i] = row of weights times column i, plus its bias.
void multiply_row(const Tensor& weights, const TensorView& bias, std::int64_t row,
                  const Tensor& columns, std::vector<float>& sums) {
  const std::int64_t hidden = columns.size(0), count = columns.size(1);
  std::fill(sums.begin(), sums.end(), bias_at(bias, row));
  const float* w = weights.as<const float>() + row * hidden;
  const float* x = columns.as<const float>();
  for (std::int64_t h = 0; h < hidden; ++h, x += count) {
    for (std::int64_t i = 0; i < count; ++i) sums[static_cast<std::size_t>(i)] += w[h] * x[i];
  }
}

float largest_activated(const ExpertWeights& weights, const ExpertMatrices& expert,
                        const Tensor& columns) {
  const ResolvedActivation activation = resolve(weights.activation, weights.activation_params);
  const QuantKey& key = weights.scheme.weights;
  const Tensor gate = dequantize_weights(expert.gate, key, weights.hidden);
  const bool gated = is_gated(weights.activation);
  const Tensor up = gated ? dequantize_weights(expert.up, key, weights.hidden) : Tensor();
  const auto largest_of_rows = [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> g(static_cast<std::size_t>(columns.size(1))), u(g.size());
    float largest = 0;
    for (std::int64_t row = begin; row < end; ++row) {
      multiply_row(gate, expert.gate.bias, row, columns, g);
      if (gated) multiply_row(up, expert.up.bias, row, columns, u);
      for (std::size_t i = 0; i < g.size(); ++i) {
        const auto value = static_cast<float>(reference::activate(activation, g[i], u[i]));
        largest = std::max(largest, std::abs(value));
      }
    }
    return largest;
  };
  const float largest =
      core::parallel_max(default_executor(), weights.intermediate, true, largest_of_rows);
  FUSEDMOE_CHECK(std::isfinite(largest), "activations", "NaN or infinite", "finite");
  return largest;
}

}  // namespace

ActivationRange activation_range(const LayerWeights& layer, const TensorView& hidden_states) {
  const ExpertWeights& weights = layer.experts;
  FUSEDMOE_CHECK_FAULT(hidden_states.defined() && hidden_states.rank() == 2 &&
                           hidden_states.size(1) == layer.hidden() && hidden_states.size(0) > 0,
                       kShape, "hidden_states", core::describe(hidden_states),
                       core::format("(num_tokens, {}) of at least one token", layer.hidden()));
  FUSEDMOE_CHECK(weights.num_experts() == layer.router.num_experts, "layer.experts",
                 core::to_string(weights.num_experts()),
                 core::format("all {} experts of the router", layer.router.num_experts));
  Tensor x = to_f32(hidden_states);
  finite_amax(x, "hidden_states");
  const Routed routed = route_tokens(layer, x);
  if (layer.latent) {
    const Tensor projected = Tensor::empty({x.size(0), weights.hidden}, DType::kF32);
    router_logits({layer.latent->down, {}, {}}, x, projected);
    x = projected;
  }
  if (layer.router.apply_router_weight_on_input) {
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      x.as<float>()[i] *= routed.weights.as<const float>()[i / x.size(1)];
    }
  }
  ActivationRange range;
  range.hidden = finite_amax(x, "hidden_states");
  for (std::int64_t e = 0; e < weights.num_experts(); ++e) {
    const Tensor columns = gather_columns(x, routed.ids, e);
    const ExpertMatrices& expert = weights.experts[static_cast<std::size_t>(e)];
    range.intermediate.push_back(
        columns.size(1) == 0 ? 0 : largest_activated(weights, expert, columns));
  }
  return range;
}

}  // namespace fusedmoe
