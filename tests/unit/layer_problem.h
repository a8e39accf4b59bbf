// A small layer with random parameters, for the tests of MoeLayer.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "fusedmoe/layer.h"
#include "fusedmoe/quant.h"
#include "testing/cases.h"

namespace fusedmoe::testing {

inline Tensor random_tensor(DType dtype, Shape shape, double scale, std::uint64_t seed) {
  Random random(seed);
  Tensor tensor = Tensor::empty(shape, dtype);
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    store_f32(tensor.data(), dtype, i, static_cast<float>(random.normal() * scale));
  }
  return tensor;
}

/// A workspace for so many tokens. Its bytes are 0x7f, huge numbers as floats: a layer that reads
/// what it has not written before gives wrong results.
struct Scratch {
  Tensor memory;
  Workspace workspace;
  Scratch(const MoeLayer& layer, std::int64_t num_tokens, bool fixed_sizes = false)
      : memory(Tensor::empty(
            {static_cast<std::int64_t>(layer.workspace_bytes(num_tokens, fixed_sizes))},
            DType::kU8)),
        workspace{memory.data(), static_cast<std::size_t>(memory.nbytes())} {
    poison(memory);
  }
};

struct LayerSpec {
  Case experts;
  bool shared_experts = false;
  bool shared_gate = false;
  std::int64_t zero_experts = 0;
  std::int64_t latent = 0;  ///< width of the routed experts; experts.hidden stays the layer's
};

inline LayerWeights make_layer_weights(const LayerSpec& spec) {
  const Case& experts = spec.experts;
  const double scale = 1 / std::sqrt(static_cast<double>(experts.hidden));
  LayerWeights weights;
  weights.router.num_experts = experts.num_experts;
  weights.router.topk = experts.topk;
  weights.router.renormalize = true;
  weights.router.apply_router_weight_on_input = experts.weight_on_input;
  weights.router.num_zero_experts = spec.zero_experts;
  const std::int64_t choices = weights.router.num_choices();
  weights.router_weights.weight =
      random_tensor(DType::kBF16, {choices, experts.hidden}, scale, 101);
  weights.router_weights.bias = random_tensor(DType::kBF16, {choices}, 0.1, 102);
  Case routed = experts;
  if (spec.latent > 0) {
    routed.hidden = spec.latent;
    const double latent_scale = 1 / std::sqrt(static_cast<double>(spec.latent));
    weights.latent = {
        random_tensor(DType::kBF16, {spec.latent, experts.hidden}, scale, 108),
        random_tensor(DType::kBF16, {experts.hidden, spec.latent}, latent_scale, 109)};
  }
  weights.experts = make_problem(routed).weights;
  if (!spec.shared_experts) return weights;
  Case shared = experts;
  shared.num_experts = shared.topk = 1;
  shared.seed = 7;
  weights.shared_experts = SharedExperts{make_problem(shared).weights, {}};
  if (spec.shared_gate) {
    weights.shared_experts->gate = random_tensor(DType::kBF16, {1, experts.hidden}, scale, 103);
  }
  return weights;
}

inline Tensor make_hidden_states(DType dtype, std::int64_t num_tokens, std::int64_t hidden) {
  return random_tensor(dtype, {num_tokens, hidden}, 1, 104);
}

/// Of a name of find_variant(), or the best.
inline LayerOptions layer_options(DType dtype, const std::string& variant) {
  LayerOptions options;
  options.dtype = dtype;
  if (variant.empty()) return options;
  const Variant found = find_variant(variant);
  options.require.append(found.experts->name()).append("+").append(found.prepare_finalize->name());
  options.hooks = found.hooks;
  options.monolithic = found.monolithic;
  options.batch_invariant = found.batch_invariant;
  return options;
}

}  // namespace fusedmoe::testing
