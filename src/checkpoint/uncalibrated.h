// Input scales of experts that saw no calibration data.
#pragma once

#include "fusedmoe/weights.h"

namespace fusedmoe::checkpoint {

/// compressed-tensors stores 0 for the input scale of an expert that saw no token of the
/// calibration data, which decodes to infinity: it gets the largest one of the other experts.
void replace_uncalibrated(ExpertWeights& weights);

}  // namespace fusedmoe::checkpoint
