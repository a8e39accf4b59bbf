// One layer in several number formats: the error of each against f32, its bytes and its time.
#pragma once

#include <cstdint>
#include <string>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/layer.h"

namespace fusedmoe::cli {

/// The first `max_experts` experts (0: all) and what the router has of them; no shared experts.
LayerWeights first_experts(LayerWeights layer, std::int64_t max_experts);

/// A layer of random weights in bf16, of a model's shape.
LayerWeights random_layer(const ModelConfig& model, std::int64_t max_experts, std::uint64_t seed);

/// The experts in another format, in tensors of their own; static scales from the activations that
/// `x` gives. Throws Error for what cannot be quantized.
ExpertWeights quantize_experts(const LayerWeights& layer, const QuantScheme& scheme,
                               const TensorView& x);

struct SchemeError {
  std::string scheme, plan;
  std::int64_t bytes = 0;      ///< of the experts as stored
  double bits_per_weight = 0;  ///< with scales and biases
  double ms = 0;               ///< of one forward, median
  double relative_error = 0;   ///< |y - f32| / |f32|, norms over all tokens
  double cosine = 0;
  std::int64_t worst_token = -1;
  double worst_token_error = 0;  ///< relative error of that token's row
};

/// What every scheme is compared with: the layer in f32 on `x` (num_tokens, hidden) f32.
class SchemeComparison {
 public:
  SchemeComparison(LayerWeights layer, Tensor x);

  const LayerWeights& layer() const { return layer_; }
  /// `dtype`: of the hidden states; `experts`: as `require` of select().
  SchemeError run(const QuantScheme& scheme, DType dtype, const std::string& experts,
                  int repeat) const;

 private:
  LayerWeights layer_;
  Tensor x_, truth_;  // (num_tokens, hidden) f32
  Tensor topk_ids_, topk_weights_;
};

}  // namespace fusedmoe::cli
