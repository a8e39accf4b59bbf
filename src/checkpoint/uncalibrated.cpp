#include "checkpoint/uncalibrated.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

namespace fusedmoe::checkpoint {
namespace {

void replace_uncalibrated(ExpertWeights& weights,
                          std::initializer_list<WeightMatrix ExpertMatrices::*> matrices) {
  float largest = 0;
  const auto for_each_scale = [&](const auto& function) {
    for (ExpertMatrices& expert : weights.experts) {
      for (const auto member : matrices) {
        TensorView& scale = (expert.*member).input_scale;
        if (scale.defined() && scale.dtype() == DType::kF32) function(scale);
      }
    }
  };
  for_each_scale([&](const TensorView& scale) {
    const float value = *scale.as<const float>();
    if (std::isfinite(value)) largest = std::max(largest, value);
  });
  if (largest == 0) return;
  for_each_scale([&](TensorView& scale) {
    if (!std::isinf(*scale.as<const float>())) return;
    const Tensor replacement = Tensor::empty({1}, DType::kF32);
    *replacement.as<float>() = largest;
    scale = replacement;
    weights.owners.push_back(replacement.owner());
  });
}

}  // namespace

void replace_uncalibrated(ExpertWeights& weights) {
  replace_uncalibrated(weights, {&ExpertMatrices::gate, &ExpertMatrices::up});
  replace_uncalibrated(weights, {&ExpertMatrices::down});
}

}  // namespace fusedmoe::checkpoint
