// Input scales of experts that saw no calibration data.
//
// One rule for every layout: an input scale that is missing, 0, negative, infinite or NaN (in the
// file, or once its reciprocal is taken) says that the expert saw no token of the calibration data.
// It takes the largest one of the layer's other experts, that of gate and up from their gate and
// up, that of down from their down. Where no expert has one, the layer is refused.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/problems.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

struct StoredScale {
  std::string name;              ///< of the tensor
  std::string text = "missing";  ///< the number in the file
  float value = 0;               ///< what it means
  bool calibrated() const { return std::isfinite(value) && value > 0; }
};

using MatrixMember = WeightMatrix ExpertMatrices::*;

/// What the input scales of some matrices of all experts are.
struct InputScales {
  std::span<const MatrixMember> matrices;  ///< that share the largest one
  std::int64_t num_experts;                ///< of the layer
  std::function<StoredScale(std::int64_t expert, MatrixMember matrix)> read;
};

/// Sets those of `experts`, which are the ones in `weights`. Returns those that the file does not
/// have; where no expert has one, they become problems instead.
std::vector<UncalibratedScale> set_input_scales(const InputScales& scales,
                                                std::span<const std::int32_t> experts,
                                                ExpertWeights& weights, Problems& problems);

}  // namespace fusedmoe::checkpoint
