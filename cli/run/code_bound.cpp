#include "run/code_bound.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "fusedmoe/quant.h"
#include "testing/error_bound.h"

namespace fusedmoe::cli {
namespace {

double largest(const TensorView& values) {
  double result = 0;
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    result = std::max(result, std::abs(double{load_f32(values.data(), values.dtype(), i)}));
  }
  return result;
}

/// The largest number of each slot's row behind the activation, times the largest weight that it
/// meets; 0 for slots without an expert.
std::vector<double> largest_products(const LayerWeights& weights, const TensorView& x,
                                     const Routing& routing) {
  const ExpertWeights& experts = weights.experts;
  std::vector<double> products(static_cast<std::size_t>(routing.topk_ids.numel()));
  ExpertsHooks hooks;
  hooks.after_activation = [&](const HookArgs& args) {
    const auto* offsets = args.expert_offsets.as<const std::int32_t>();
    const auto* slots = args.permuted_to_slot.as<const std::int32_t>();
    for (std::size_t e = 0; e < experts.experts.size(); ++e) {
      if (offsets[e] == offsets[e + 1]) continue;
      const double weight = largest(dequantize_weights(
          experts.experts[e].down, experts.scheme.down_weights(), experts.intermediate));
      for (std::int64_t row = offsets[e]; row < offsets[e + 1]; ++row) {
        products[static_cast<std::size_t>(slots[row])] =
            weight * largest(args.output.select(0, row));
      }
    }
  };
  const MoeLayer layer(weights, {.dtype = x.dtype(), .require = "reference", .hooks = true});
  const std::size_t bytes = layer.workspace_bytes(x.size(0));
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  const Tensor output = Tensor::empty(x.shape(), x.dtype());
  layer.forward_routed(x, routing, output, {workspace.data(), bytes}, {.hooks = &hooks});
  return products;
}

/// Adds those of the routed experts of `weights`.
void add_bounds(const LayerWeights& weights, const TensorView& x, const Routing& routing,
                std::span<double> bounds) {
  const auto& activations = weights.experts.scheme.activations;
  if (!activations) return;
  const std::vector<double> products = largest_products(weights, x, routing);
  const double step = testing::code_step(*activations);
  const auto topk = static_cast<std::size_t>(routing.topk_ids.size(1));
  for (std::size_t slot = 0; slot < products.size(); ++slot) {
    const double factor = weights.router.apply_router_weight_on_input
                              ? 1
                              : std::abs(routing.topk_weights.as<const float>()[slot]);
    bounds[slot / topk] += step * factor * products[slot];
  }
}

}  // namespace

std::vector<double> bounds_of_one_code(const LayerWeights& weights, const TensorView& x,
                                       const Routing& routing) {
  std::vector<double> bounds(static_cast<std::size_t>(x.size(0)));
  if (weights.latent) return bounds;
  LayerWeights routed = weights;
  routed.shared_experts.reset();
  add_bounds(routed, x, routing, bounds);
  if (!weights.shared_experts) return bounds;
  // One expert that every token chooses; its gate, if any, is at most 1.
  LayerWeights shared;
  shared.router.num_experts = shared.router.topk = 1;
  shared.experts = weights.shared_experts->weights;
  const Tensor ids = Tensor::zeros({x.size(0), 1}, DType::kI32);
  const Tensor ones = Tensor::empty({x.size(0), 1}, DType::kF32);
  std::fill_n(ones.as<float>(), ones.numel(), 1.0F);
  add_bounds(shared, x, {ids, ones}, bounds);
  return bounds;
}

std::int64_t most_rows_with_other_codes(const LayerWeights& weights, std::int64_t rows) {
  constexpr double kNoise = 1e-6;
  double codes = 0;  // of a token that differ
  const auto add = [&](const ExpertWeights& experts, std::int64_t topk) {
    if (!experts.scheme.activations) return;
    codes += static_cast<double>(topk * experts.intermediate) * 2 * kNoise /
             testing::code_step(*experts.scheme.activations);
  };
  add(weights.experts, weights.router.topk);
  if (weights.shared_experts) add(weights.shared_experts->weights, 1);
  const double expected = std::min(codes, 1.0) * static_cast<double>(rows);
  return std::min(rows, static_cast<std::int64_t>(expected + 3 * std::sqrt(expected)) + 1);
}

}  // namespace fusedmoe::cli
