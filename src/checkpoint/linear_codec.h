// The way from a stored tensor to its part of a WeightMatrix and back.
#pragma once

#include <memory>
#include <vector>

#include "checkpoint/linear_layouts.h"

namespace fusedmoe::checkpoint {

/// The shape in which it is written, and whether another one is accepted for it.
Shape stored_shape(const StoredTensor& stored, const QuantKey& weights, LinearShape shape);
bool accepts_shape(const StoredTensor& stored, const Shape& expected, const Shape& actual);

/// Fills the part of `matrix` that the tensor holds: with a view, or where bits must move with
/// memory that `owners` gets. Throws Error for contents that contradict the layout.
void decode(const StoredTensor& stored, const TensorView& tensor, const QuantScheme& scheme,
            LinearShape shape, WeightMatrix& matrix,
            std::vector<std::shared_ptr<const void>>& owners);

/// The tensor to write for `matrix`: contiguous, of stored_shape and the written dtype.
Tensor encode(const StoredTensor& stored, const WeightMatrix& matrix, const QuantKey& weights,
              LinearShape shape);

/// The dtype in which the layout stores the scales of integer weights.
DType scale_dtype(const LinearLayout& layout);

/// `amax`, or the next larger one whose NVFP4 global scale is its own reciprocal's reciprocal in
/// fp32: compressed-tensors stores the reciprocal, and both layouts shall hold the same weights.
float amax_with_reciprocal(float amax);

}  // namespace fusedmoe::checkpoint
