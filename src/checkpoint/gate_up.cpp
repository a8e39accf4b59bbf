#include "checkpoint/gate_up.h"

#include "core/check.h"
#include "quant/weight_layout.h"

namespace fusedmoe::checkpoint {
namespace {

/// Which rows of both a matrix has: begin, begin + step, ... below end.
struct Rows {
  std::int64_t begin, end, step;

  TensorView of(const TensorView& view) const {
    return view ? view.slice(0, begin, end, step) : view;
  }
};

WeightMatrix part(const WeightMatrix& both, const QuantKey& key, const Rows& rows) {
  WeightMatrix result = both;
  result.values = rows.of(both.values);
  result.bias = rows.of(both.bias);
  using core::GlobalScale;
  const GlobalScale global = core::weight_layout(key, "scheme").global_scale;
  if (global == GlobalScale::kPerRow || global == GlobalScale::kPerBlock) {
    result.global_scale = rows.of(both.global_scale);
  }
  const std::int64_t extent = key.group.rows;
  if (!key.quantized() || extent < 0) return result;
  FUSEDMOE_CHECK_SUPPORTED(rows.step == 1 || extent == 1, kQuantScheme, "scales",
                           core::format("of {} rows each", extent),
                           "one for each row where rows of gate and up alternate");
  const Rows blocks{rows.begin / extent, core::num_blocks(rows.end, extent), rows.step};
  result.scales = blocks.of(both.scales);
  result.zero_points = blocks.of(both.zero_points);
  result.first_row = rows.begin % extent;
  return result;
}

}  // namespace

std::pair<WeightMatrix, WeightMatrix> split_gate_up(const WeightMatrix& both, const QuantKey& key,
                                                    GateUpLayout layout) {
  const std::int64_t rows = both.values.size(0), half = rows / 2;
  if (layout == GateUpLayout::kInterleaved) {
    return {part(both, key, {0, rows, 2}), part(both, key, {1, rows, 2})};
  }
  return {part(both, key, {0, half, 1}), part(both, key, {half, rows, 1})};
}

}  // namespace fusedmoe::checkpoint
