#include "checkpoint/uncalibrated.h"

#include <algorithm>

#include "core/check.h"

namespace fusedmoe::checkpoint {
namespace {

/// The largest of the experts that are not in `weights`.
float largest_elsewhere(const InputScales& scales, std::span<const std::int32_t> experts) {
  float largest = 0;
  for (std::int64_t e = 0; e < scales.num_experts; ++e) {
    if (std::find(experts.begin(), experts.end(), e) != experts.end()) continue;
    for (const MatrixMember matrix : scales.matrices) {
      const StoredScale scale = scales.read(e, matrix);
      if (scale.calibrated()) largest = std::max(largest, scale.value);
    }
  }
  return largest;
}

}  // namespace

std::vector<UncalibratedScale> set_input_scales(const InputScales& scales,
                                                std::span<const std::int32_t> experts,
                                                ExpertWeights& weights, Problems& problems) {
  const auto count = std::ssize(experts) * std::ssize(scales.matrices);
  const Tensor values = Tensor::empty({count}, DType::kF32);
  weights.owners.push_back(values.owner());
  std::vector<UncalibratedScale> uncalibrated;
  std::vector<std::int64_t> places;
  float largest = 0;
  std::int64_t at = 0;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    for (const MatrixMember matrix : scales.matrices) {
      const StoredScale scale = scales.read(experts[i], matrix);
      values.as<float>()[at] = scale.value;
      (weights.experts[i].*matrix).input_scale = values.slice(0, at, at + 1);
      if (scale.calibrated()) {
        largest = std::max(largest, scale.value);
      } else {
        uncalibrated.push_back({scale.name, scale.text, 0});
        places.push_back(at);
      }
      ++at;
    }
  }
  if (uncalibrated.empty()) return {};
  largest = std::max(largest, largest_elsewhere(scales, experts));
  for (std::size_t i = 0; i < uncalibrated.size(); ++i) {
    uncalibrated[i].used = values.as<float>()[places[i]] = largest;
    if (largest > 0) continue;
    problems.add(uncalibrated[i].tensor,
                 core::format("{}, and no other expert of the layer has a positive one to take "
                              "instead: the inputs were not calibrated",
                              uncalibrated[i].value));
  }
  return largest > 0 ? uncalibrated : std::vector<UncalibratedScale>();
}

}  // namespace fusedmoe::checkpoint
