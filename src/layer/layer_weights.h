// From the weights and options of a layer to what runs them: checks, configurations, selections.
#pragma once

#include <array>
#include <vector>

#include "fusedmoe/layer.h"

namespace fusedmoe::layer {

/// A contiguous copy on `device`: checkpoints may hand out strided or unaligned views of memory
/// that does not outlive them. Undefined for an undefined tensor.
Tensor own(const Tensor& tensor, Device device);

/// Throws Error unless the shapes and dtypes of all weights fit each other. `reads_scales`: as in
/// core::check_weights(), of the routed experts.
void check_weights(const LayerWeights& weights, bool reads_scales);

/// A static activation scale per tensor, and which GEMM's (0 or 1) activations it is of.
struct InputScale {
  TensorView* scale;
  int gemm;
};
/// Those of all matrices; none unless the scheme has such scales.
std::vector<InputScale> static_input_scales(ExpertWeights& weights);
/// Gives all experts one for each GEMM.
void set_input_scales(ExpertWeights& weights, const std::array<float, 2>& scales);

/// The configuration of the routed experts.
MoeConfig layer_config(const LayerWeights& weights, const LayerOptions& options);

/// What runs the routed experts: by the plan, by the name that is required, or the first that can.
Selection select_routed(const LayerWeights& weights, const LayerOptions& options);

/// What runs the shared experts. They see every token, in the standard format. Where the routed
/// experts are required by name, the shared ones are the same.
Selection select_shared(const ExpertWeights& weights, const LayerOptions& options,
                        const Selection& routed);

}  // namespace fusedmoe::layer
