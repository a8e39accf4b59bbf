// What one rank holds of a layer. Nothing is copied: experts are picked, matrices are sliced.
#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "fusedmoe/layer.h"
#include "moe/placement.h"
#include "quant/weight_layout.h"

namespace fusedmoe {
namespace {

/// Elements of a row that one stored value holds.
std::int64_t per_value(const WeightMatrix& matrix, const QuantKey& key) {
  return matrix.values.dtype() == DType::kE2M1 ? 1 : core::weight_layout(key, "scheme").packing;
}

/// Scale blocks that elements [begin, end) of a dimension lie in, and where the first lies in its
/// block.
struct Blocks {
  Slice blocks;
  std::int64_t first = 0;
  Blocks(Slice slice, std::int64_t extent, std::int64_t first_element, std::int64_t count) {
    if (extent < 1) {  // one block for all
      blocks = {0, count};
      return;
    }
    const std::int64_t begin = first_element + slice.begin, end = first_element + slice.end;
    blocks = {begin / extent, (end + extent - 1) / extent};
    first = begin % extent;
  }
};

TensorView cut(const TensorView& view, int dim, Slice slice) {
  return view ? view.slice(dim, slice.begin, slice.end) : TensorView();
}

WeightMatrix cut_rows(WeightMatrix matrix, const QuantKey& key, Slice slice) {
  if (!matrix.values) return matrix;
  const std::int64_t rows = matrix.values.size(0);
  matrix.values = cut(matrix.values, 0, slice);
  matrix.bias = cut(matrix.bias, 0, slice);
  if (matrix.global_scale && matrix.global_scale.size(0) == rows && rows > 1) {
    matrix.global_scale = cut(matrix.global_scale, 0, slice);
  }
  if (!matrix.scales) return matrix;
  const Blocks blocks(slice, key.group.rows, matrix.first_row, matrix.scales.size(0));
  matrix.scales = cut(matrix.scales, 0, blocks.blocks);
  matrix.zero_points = cut(matrix.zero_points, 0, blocks.blocks);
  matrix.first_row = blocks.first;
  return matrix;
}

WeightMatrix cut_columns(WeightMatrix matrix, const QuantKey& key, Slice slice) {
  const std::int64_t unit = per_value(matrix, key);
  matrix.values = cut(matrix.values, 1, {slice.begin / unit, (slice.end + unit - 1) / unit});
  if (slice.begin > 0) matrix.bias = {};
  if (!matrix.scales) return matrix;
  if (const std::int64_t block = key.global_group.cols; block > 0) {
    const std::int64_t each = core::weight_layout(key, "scheme").factors_per_block();
    const Blocks factors(slice, block, 0, matrix.global_scale.size(1));
    matrix.global_scale =
        cut(matrix.global_scale, 1, {each * factors.blocks.begin, each * factors.blocks.end});
  }
  const Blocks blocks(slice, key.group.cols, matrix.first_col, matrix.scales.size(1));
  matrix.scales = cut(matrix.scales, 1, blocks.blocks);
  matrix.zero_points = cut(matrix.zero_points, 1, blocks.blocks);
  matrix.first_col = blocks.first;
  return matrix;
}

ExpertWeights pick(const ExpertWeights& weights, const std::vector<std::int32_t>& experts) {
  ExpertWeights picked = weights;
  picked.experts.clear();
  for (const std::int32_t e : experts) picked.experts.push_back(weights.experts[e]);
  if (experts.empty()) picked.experts.push_back(weights.experts.front());
  return picked;
}

}  // namespace

std::int64_t slice_unit(const QuantScheme& scheme) {
  std::int64_t unit = 1;
  const auto include = [&](std::int64_t each) {
    unit = std::lcm(unit, std::max<std::int64_t>(each, 1));
  };
  const QuantKey& down = scheme.down_weights();  // its columns are cut
  include(down.group.cols);
  include(down.global_group.cols);
  include(core::weight_layout(down, "scheme").packing);
  if (scheme.activations) include(scheme.activations->group.cols);
  return unit;
}

ExpertWeights slice_experts(const ExpertWeights& weights, Slice slice) {
  const std::int64_t unit = slice_unit(weights.scheme);
  FUSEDMOE_CHECK(slice.begin >= 0 && slice.begin < slice.end && slice.end <= weights.intermediate,
                 "slice", core::format("[{}, {})", slice.begin, slice.end),
                 core::format("a part of [0, {})", weights.intermediate));
  FUSEDMOE_CHECK(
      slice.begin % unit == 0 && (slice.end % unit == 0 || slice.end == weights.intermediate),
      "slice", core::format("[{}, {})", slice.begin, slice.end),
      core::format("on multiples of {}", unit));
  ExpertWeights part = weights;
  part.intermediate = slice.size();
  const QuantKey& key = weights.scheme.weights;
  for (ExpertMatrices& expert : part.experts) {
    expert.gate = cut_rows(expert.gate, key, slice);
    expert.up = cut_rows(expert.up, key, slice);
    expert.down = cut_columns(expert.down, weights.scheme.down_weights(), slice);
  }
  return part;
}

LayerWeights local_weights(const LayerWeights& whole, const ParallelConfig& parallel,
                           const std::optional<ExpertPlacement>& placement) {
  parallel.validate();
  const std::int64_t num_experts = whole.router.num_experts;
  FUSEDMOE_CHECK(whole.experts.num_experts() == num_experts && !whole.expert_map, "experts",
                 core::format("{} experts", whole.experts.num_experts()),
                 core::format("all {}, without a map", num_experts));
  LayerWeights local = whole;
  if (parallel.tp_size > 1) {
    local.experts = slice_experts(
        whole.experts, slice_of(whole.experts.intermediate, slice_unit(whole.experts.scheme),
                                parallel.tp_size, parallel.tp_rank));
  }
  if (parallel.ep_size == 1) return local;
  const ExpertPlacement all = core::placement_of(placement, num_experts, parallel.ep_size);
  local.experts = pick(whole.experts, all.local_experts(parallel.ep_rank));
  local.expert_map = all.expert_map(parallel.ep_rank);
  return local;
}

LayerWeights own_slice(LayerWeights weights, const ParallelConfig& parallel,
                       std::int64_t intermediate) {
  parallel.validate();
  const std::int64_t given = weights.experts.intermediate;
  if (parallel.tp_size > 1 && intermediate == 0) {
    throw Error::invalid(
        "intermediate",
        core::format("intermediate, the size of the whole layer, must be given with tp_size {}: "
                     "tensors with {} may be the whole or a slice",
                     parallel.tp_size, given));
  }
  if (intermediate == 0) return weights;
  if (parallel.tp_size == 1) {
    FUSEDMOE_CHECK(given == intermediate, "intermediate", core::to_string(intermediate),
                   core::format("{}, as w13 and w2 have", given));
    return weights;
  }
  const Slice slice = slice_of(intermediate, slice_unit(weights.experts.scheme), parallel.tp_size,
                               parallel.tp_rank);
  if (given == intermediate) {
    weights.experts = slice_experts(weights.experts, slice);
    return weights;
  }
  FUSEDMOE_CHECK(given == slice.size(), "intermediate",
                 core::format("{}, but w13 and w2 have {}", intermediate, given),
                 core::format("the size of the whole layer, of which they have all, or the {} of "
                              "tp_rank {} of {}",
                              slice.size(), parallel.tp_rank, parallel.tp_size));
  if (slice.begin > 0) {
    for (ExpertMatrices& expert : weights.experts.experts) expert.down.bias = {};
  }
  return weights;
}

}  // namespace fusedmoe
