#include "reference/packed_weights.h"

#include <algorithm>

#include "moe/experts_args.h"

namespace fusedmoe::reference {
namespace {

/// A view's elements in memory of its own.
TensorView owned_copy(const TensorView& view, std::vector<std::shared_ptr<const void>>& owners) {
  if (!view) return {};
  Tensor copy = Tensor::empty(view.shape(), view.dtype());
  const std::int64_t width = bytes(view.dtype(), 1);
  const std::int64_t columns = view.rank() == 2 ? view.size(1) : 1;
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    const std::int64_t column = view.rank() == 2 ? i % columns * view.stride(1) : 0;
    std::copy_n(view.as<const char>() + (i / columns * view.stride(0) + column) * width, width,
                copy.as<char>() + i * width);
  }
  owners.push_back(copy.owner());
  return copy;
}

}  // namespace

ReferenceWeights::ReferenceWeights(Info info, const ExpertWeights& weights)
    : PackedWeights(std::move(info)), source(weights), replaced(weights.experts.size()) {
  const bool owned = !weights.borrowed && !weights.owners.empty();
  for (std::size_t e = 0; e < source.experts.size(); ++e) {
    source.experts[e] = core::stored_form(source.experts[e]);
    if (owned) continue;
    replaced[e] = copy_expert(source, static_cast<std::int64_t>(e));
    source.experts[e] = replaced[e].experts.front();
  }
}

ExpertWeights copy_expert(const ExpertWeights& weights, std::int64_t expert) {
  ExpertWeights result = weights;
  result.owners.clear();
  result.borrowed = false;
  result.experts = {core::stored_form(weights.experts[static_cast<std::size_t>(expert)])};
  ExpertMatrices& matrices = result.experts.front();
  for (WeightMatrix* matrix : {&matrices.gate, &matrices.up, &matrices.down}) {
    for (TensorView WeightMatrix::*part :
         {&WeightMatrix::values, &WeightMatrix::scales, &WeightMatrix::zero_points,
          &WeightMatrix::global_scale, &WeightMatrix::input_scale, &WeightMatrix::bias}) {
      matrix->*part = owned_copy(matrix->*part, result.owners);
    }
  }
  return result;
}

}  // namespace fusedmoe::reference
